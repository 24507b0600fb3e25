"""Names in a file against those that the installed software reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from patchkit.finding import Finding, Level
from patchkit.runtime.lint.scan import Assignment, short
from patchkit.runtime.lint.values import bounds
from patchkit.runtime.rules.releases import release, within
from patchkit.runtime.rules.variable_rules import Avoid, Situation, holds
from patchkit.runtime.rules.variables import (
    Guesses,
    KnownVariable,
    lifetime,
    other_variables,
)

_READERS = {"NCCL_": "NCCL", "VLLM_": "vLLM"}
_SILENT = {
    "NCCL": "NCCL ignores what it does not know, without a word.",
    "vLLM": "vLLM ignores it; from 0.17 on it says so in its log.",
}


def check_names(
    found: Assignment,
    situation: Situation,
    known: Mapping[str, Mapping[str, str]],
    avoids: Mapping[str, Sequence[Avoid]],
    guesses: Mapping[str, Guesses],
) -> Iterator[Finding]:
    """``known`` are the names that ``vLLM`` and ``NCCL`` read, in these versions.

    ``avoids`` are those of each name.
    ``guesses`` are the nearest ones, by the same two keys.
    """
    named = list(_avoided(found, situation, avoids))
    yield from named
    reader = _READERS.get(found.name[:5])
    if named:
        return
    if reader is None:
        yield from _other(found, situation)
        return
    version = situation.get(reader.lower(), "")
    if found.name not in known[reader]:
        yield _unread(found, reader, version, guesses[reader])


def _avoided(
    found: Assignment, situation: Situation, avoids: Mapping[str, Sequence[Avoid]]
) -> Iterator[Finding]:
    for avoid in avoids.get(found.name, ()):
        matches = avoid.matches(found.name, found.value) and (found.literal or not avoid.values)
        if matches and holds(avoid.when, situation):
            yield Finding(
                line=found.line,
                about=found.name,
                level=Level(avoid.severity),
                what=f"{found.shown} is advised against",
                why=avoid.reason,
                hint=avoid.instead,
                source=avoid.source,
            )


def _unread(found: Assignment, reader: str, version: str, guess: Guesses) -> Finding:
    life = lifetime(found.name)
    close = "" if life else guess(found.name)
    what = f"no known {reader} reads {short(found.name)}"
    if life:
        what = f"{reader} {version} does not read {found.name}{_span(life, version)}"
    return Finding(
        line=found.line,
        about=found.name,
        level=Level.ERROR if close else Level.WARNING,
        what=what,
        why=_SILENT[reader],
        hint=f"did you mean {close}?" if close else _instead(found.name),
        source="vLLM envs.py" if reader == "vLLM" else "NCCL's sources",
    )


def _span(life: KnownVariable, version: str) -> str:
    if version and release(version) < release(life.first):
        return f" yet: {life.first} does"
    past = version and release(version) > release(life.last)
    return f" any more: {life.first} to {life.last} did" if past else ""


def _instead(name: str) -> str:
    """What took the place of a variable, by values.toml."""
    for row in bounds()["gone"]:
        if name in row["names"]:
            return str(row["instead"])
    return "leave it out"


@cache
def _in_capitals() -> Mapping[str, str]:
    return {name.upper(): name for name in other_variables()}


def _other(found: Assignment, situation: Situation) -> Iterator[Finding]:
    others = other_variables()
    other = others.get(found.name)
    version = situation.get(other.of, "") if other else ""
    if other and other.versions and version and not within(version, other.versions):
        yield Finding(
            line=found.line,
            about=found.name,
            level=Level.WARNING,
            what=f"{other.of} {version} does not read {found.name}: {other.versions} does",
            why=other.meaning,
            hint="leave it out",
        )
    alike = "" if other else _in_capitals().get(found.name.upper(), "")
    if alike:
        yield Finding(
            line=found.line,
            about=found.name,
            level=Level.ERROR,
            what=f"nobody reads {found.name}",
            why="Capitals and small letters differ in names of variables.",
            hint=f"write {alike}",
        )
