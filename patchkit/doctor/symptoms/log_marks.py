"""Read from a log what it says of the machine and the software, and whether a server came up."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from patchkit.doctor.symptoms.scan import Scan
from patchkit.doctor.symptoms.symptom import PatternText
from patchkit.paths import RECIPES
from patchkit.records import read_toml
from patchkit.runtime.rules.condition import Situation

_NUMBERS = re.compile(r"v?(\d+(?:[.-]\d+)+)")
MarkName = Literal["start", "worker", "serving", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogMark:
    """Texts that tell of a server's life."""

    name: MarkName
    says: tuple[PatternText, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFact:
    """A fact that a log may state: ``value``, or what stands at {value} of the text."""

    name: str
    says: tuple[PatternText, ...]
    value: str = ""


@cache
def log_marks() -> Mapping[MarkName, tuple[str, ...]]:
    """Return the texts of each mark."""
    marks = read_toml(tuple[LogMark, ...], RECIPES / "doctor" / "log_marks.toml", key="mark")
    return {mark.name: mark.says for mark in marks}


@cache
def log_facts() -> tuple[LogFact, ...]:
    """Return what logs are asked."""
    return read_toml(tuple[LogFact, ...], RECIPES / "doctor" / "log_facts.toml", key="fact")


def stated_facts(scan: Scan) -> Situation:
    """Return the facts that a log states, without those of which it states two."""
    found: dict[str, set[str]] = {}
    for fact in log_facts():
        for hit in scan.hits_of(fact.says):
            # ``7.0.0.1019`` of ``7.0.0-1019-nvidia``, ``2.28.9`` of ``2.28.9+cuda13.0``.
            number = _NUMBERS.match(hit.values.get("value") or "")
            if value := fact.value or (number[1].replace("-", ".") if number else ""):
                found.setdefault(fact.name, set()).add(value)
    return {name: values.pop() for name, values in found.items() if len(values) == 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """The lines from which on a server served, answered last, and was stopped: 0 for never.

    ``ended`` says that something ended it while it served.
    """

    serving: int = 0
    answered: int = 0
    stopped: int = 0
    ended: bool = False

    def outlived(self, first: int, last: int) -> bool:
        """Return whether the server outlived what stands in the lines ``first`` to ``last``."""
        if not self.serving:
            return False
        if last < self.serving or 0 < self.stopped < first:
            return True
        return last < self.answered and not self.ended


def stream_lives(
    streams: Mapping[str, Scan], answered: Mapping[str, int], endings: Collection[str]
) -> Mapping[str, Life]:
    """Return the life of each stream's server; ``endings`` are texts of what ends one.

    A stream without a server of its own, such as a worker's, lives as the first that serves.
    """
    own = {name: _read_life(scan, answered.get(name, 0), endings) for name, scan in streams.items()}
    serving = [life for life in own.values() if life.serving]
    first = min(serving, key=lambda life: life.serving, default=None)
    lives = {}
    for name, scan in streams.items():
        began = own[name].serving or any(scan.hits_of(log_marks()["start"]))
        lives[name] = own[name] if began or first is None else first
    return {
        name: replace(
            life,
            ended=any(
                streams[other].last.get(text, 0) > life.serving
                for other, its in lives.items()
                for text in endings
                if its is life
            ),
        )
        for name, life in lives.items()
    }


def _read_life(scan: Scan, answered: int, endings: Collection[str]) -> Life:
    serving = min((hit.number for hit in scan.hits_of(log_marks()["serving"])), default=0)
    if any(hit.number < serving for hit in scan.hits_of(endings)):
        serving = 0  # it ended before and did not begin anew: that is another program
    stopped = max((scan.last.get(text, 0) for text in log_marks()["stopped"]), default=0)
    return Life(serving=serving, answered=answered, stopped=stopped if stopped > serving else 0)
