"""Read from a log what it says of the machine and the software that wrote it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from patchkit.doctor.symptoms.said import SaidText, said
from patchkit.doctor.symptoms.scan import Scan
from patchkit.doctor.symptoms.symptom import SaidIn
from patchkit.paths import RECIPES
from patchkit.records import read_toml
from patchkit.runtime.rules.condition import Situation, is_fact

_NUMBERS = re.compile(r"\d+(?:[.-]\d+)+")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFact:
    """A fact that a log may state: ``value``, or what stands at {value} of the text."""

    name: str
    says: tuple[SaidIn, ...]
    value: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError for a fact that no condition can be about."""
        if not is_fact(self.name):
            raise ValueError(f"{self.name!r} is no fact that a condition can be about")
        if not self.value and any("value" not in said(each).names for each in self.says):
            raise ValueError("has neither a value nor {value} in each text")


@cache
def log_facts() -> tuple[LogFact, ...]:
    """Return what logs are asked."""
    return read_toml(tuple[LogFact, ...], RECIPES / "doctor" / "log_facts.toml", key="fact")


def fact_texts() -> Iterator[SaidText]:
    """Yield the texts to look for."""
    return (said(text) for fact in log_facts() for text in fact.says)


def facts_of(scan: Scan) -> Situation:
    """Return the facts that a log states, without those of which it states two."""
    found: dict[str, set[str]] = {}
    for fact in log_facts():
        for text in fact.says:
            for hit in scan.hits.get(text, ()):
                value = fact.value or _version(hit.values["value"])
                found.setdefault(fact.name, set()).update({value} - {""})
    return {name: values.pop() for name, values in found.items() if len(values) == 1}


def _version(word: str) -> str:
    """Return ``7.0.0.1019`` of ``7.0.0-1019-nvidia``, ``2.28.9`` of ``2.28.9+cuda13.0``."""
    match = _NUMBERS.match(word.lstrip("v"))
    return match[0].replace("-", ".") if match else ""
