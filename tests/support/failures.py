"""Real failures that people reported, with their known causes, and what patchkit makes of them."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from patchkit.doctor.symptoms.diagnosis import read_log

FOLDER = Path(__file__).parents[1] / "data" / "failures"
VERDICTS = {
    "right": "the cause is named, and right",
    "open": "the cause is among those that are listed, each with what would decide",
    "unknown": "recognised; whoever reported it does not know the cause",
    "wrong": "another cause is named",
    "other": "taken for something else",
    "nothing": "not recognised",
}


def failures() -> Iterator[Mapping[str, Any]]:
    """Yield the failures of all files."""
    for file in sorted(FOLDER.glob("*.toml")):
        yield from tomllib.loads(file.read_text(encoding="utf-8"))["failure"]


def recognised(text: str, facts: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the symptoms of a text that need not be whole, with the causes that are left."""
    found = read_log([text.encode()], facts, whole=False).diagnoses
    return {each.symptom.id: [cause.id for cause in each.causes] for each in found}


def verdict(failure: Mapping[str, Any]) -> tuple[str, dict[str, list[str]]]:
    """Return one of VERDICTS, and what was recognised."""
    found = recognised(failure["text"], failure.get("facts", {}))
    causes = found.get(failure["symptom"])
    if causes is None:
        return ("other" if found else "nothing"), found
    if not failure["cause"]:
        return "unknown", found
    if causes == [failure["cause"]]:
        return "right", found
    return ("open" if failure["cause"] in causes else "wrong"), found


def matrix() -> tuple[Counter[str], list[str]]:
    """Return how often each verdict is given, and a line for each failure that went wrong."""
    counts: Counter[str] = Counter()
    wrong = []
    for each in failures():
        said, found = verdict(each)
        counts[said] += 1
        if said in ("wrong", "other", "nothing"):
            wrong.append(
                f"{each['id']}: {said}: {each['symptom']}/{each['cause']} is {found}"
            )
    return counts, wrong
