"""Tables and colours without rich: for verbs that a node runs from the wheel and click alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import click


def table(rows: Iterable[Sequence[str]], indent: str = "") -> list[str]:
    """Lines with aligned columns; cells may be styled, the last one is not padded."""
    kept = [tuple(row) for row in rows]
    widths = [max(map(_width, column)) for column in zip(*kept, strict=True)]
    return [indent + _line(row, widths) for row in kept]


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [cell + " " * (width - _width(cell)) for cell, width in zip(row, widths, strict=True)]
    return "  ".join([*cells[:-1], row[-1]]).rstrip()


def _width(cell: str) -> int:
    return len(click.unstyle(cell))


def echo(lines: Iterable[str]) -> None:
    """Print lines; click leaves colours out where standard output is no terminal."""
    for line in lines:
        click.echo(line)
