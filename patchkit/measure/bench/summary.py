"""Write the summary of a folder of results: a table for people, and one for spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from patchkit.measure.bench.difference import differences
from patchkit.measure.bench.results import ENOUGH, MAIN, Series


def csv_text(found: Sequence[Series]) -> str:
    """Return a line for every value: variant, load, figure, unit, round, value."""
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n").writerow
    write(("variant", "input", "concurrency", "load", "figure", "unit", "round", "value"))
    for each in found:
        head = (each.variant, each.depth, each.concurrency, each.load)
        for number, value in enumerate(each.values, 1):
            write((*head, each.measure.name, each.measure.unit, number, f"{value:.6g}"))
    return out.getvalue()


def markdown(found: Sequence[Series], digest: Mapping[str, Any]) -> str:
    """Return the tables: all figures of the main kind, and the variants against the first."""
    names = list(dict.fromkeys(each.variant for each in found))
    lines = ["# " + str(digest.get("model", "")), "", *_machine(digest), ""]
    lines += _table(found, names)
    if any(len(each.values) < ENOUGH for each in found):
        lines += ["", f"`!`: fewer than {ENOUGH} repetitions: the spread says nothing."]
    for name in names[1:]:
        lines += ["", f"## {name} against {names[0]}", "", *_against(found, names[0], name)]
    return "\n".join(lines) + "\n"


def _machine(digest: Mapping[str, Any]) -> list[str]:
    machine = digest.get("machine", {})
    return [
        "  \n".join(
            f"{key}: {value}" for key, value in machine.items() if isinstance(value, str) and value
        ),
        "",
        "Median (least-most) of the rounds; all else that makes these figures: digest.json.",
    ]


def _table(found: Sequence[Series], names: Sequence[str]) -> list[str]:
    lines = ["| input, output, at once | figure | " + " | ".join(names) + " |"]
    lines += ["|---|---|" + "---|" * len(names)]
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for each in found:
        if each.measure in MAIN:
            key = each.load, f"{each.measure.name}, {each.measure.unit}"
            rows.setdefault(key, {})[each.variant] = each.text
    for (load, figure), values in rows.items():
        cells = " | ".join(values.get(name, "") for name in names)
        lines.append(f"| {load} | {figure} | {cells} |")
    return lines


def _against(found: Sequence[Series], first: str, second: str) -> list[str]:
    lines = ["| input, output, at once | figure | ratio (by round) | |", "|---|---|---|---|"]
    of = {
        name: [each for each in found if each.variant == name and each.measure in MAIN]
        for name in (first, second)
    }
    for each in differences(of[first], of[second]):
        measure = each.first.measure
        lines.append(
            f"| {each.first.load} | {measure.name}, {measure.unit} | {each.text} | {each.verdict} |"
        )
    return lines
