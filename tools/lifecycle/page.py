"""Write the table of docs/lifecycle.md: what happens in which failure, as it was seen."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tools.markdown import replaced, table

PAGE = Path(__file__).parents[2] / "docs" / "lifecycle.md"
NAME, MAKER = "table", "nox -s lifecycle -- --write"
HEADER = ("scenario", "what happens", "s", "outcome")
HEAD = table(HEADER, [])
ROW = re.compile(r"(?m)^\| (`\w+`) \| (.*) \| (\d+) \| (.*) \|$")


def line(row: Sequence[str]) -> str:
    """Return a row as the table has it."""
    return table(row, []).splitlines(keepends=True)[0]


def written(text: str, rows: Iterable[Sequence[str]], order: Sequence[str]) -> str:
    """Return a page with these rows in its table, in this order; rows of others stay."""
    kept = {found[0]: tuple(c.replace(r"\|", "|") for c in found) for found in ROW.findall(text)}
    known = kept | {row[0]: row for row in rows}
    places = [f"`{name}`" for name in order]
    return replaced(
        text, NAME, MAKER, table(HEADER, [known[p] for p in places if p in known]).strip()
    )


def write(rows: Iterable[Sequence[str]], order: Sequence[str]) -> None:
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), rows, order), encoding="utf-8")
