"""Show what was measured."""

from __future__ import annotations

from pathlib import Path

from patchkit.cli.out import echo, say, table
from patchkit.measure.bench.difference import differences
from patchkit.measure.bench.results import MAIN, series


def figures(folder: Path) -> list[dict[str, object]]:
    return [
        {
            "variant": each.variant,
            "load": each.load,
            "figure": each.measure.name,
            "unit": each.measure.unit,
            "median": each.median,
            "values": list(each.values),
        }
        for each in series(folder)
    ]


def show(folder: Path) -> None:
    found = series(folder, MAIN)
    names = list(dict.fromkeys(each.variant for each in found))
    echo(
        table(
            (each.load, each.measure.name, each.variant, f"{each.text} {each.measure.unit}")
            for each in found
        )
    )
    of = {name: [each for each in found if each.variant == name] for name in names}
    for name in names[1:]:
        say(f"{name} against {names[0]}, by round:")
        echo(
            table(
                (each.first.load, each.first.measure.name, each.text, each.verdict)
                for each in differences(of[names[0]], of[name])
            )
        )
