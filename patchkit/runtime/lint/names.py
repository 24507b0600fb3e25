"""Check the names in a file against those that the installed software reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from patchkit.finding import Finding, Level
from patchkit.runtime.lint.scan import Assignment, short
from patchkit.runtime.lint.values import bounds
from patchkit.runtime.rules.condition import Situation, holds
from patchkit.runtime.rules.lifetimes import Lifetime
from patchkit.runtime.rules.releases import release, within
from patchkit.runtime.rules.variable_rules import Avoid
from patchkit.runtime.rules.variables import Guesses, lifetime, other_variables

_READERS = {"NCCL_": "NCCL", "VLLM_": "vLLM"}
_SILENT = {
    "NCCL": "NCCL ignores what it does not know, without a word.",
    "vLLM": "vLLM ignores it; from 0.17 on it says so in its log.",
}


def check_names(
    assigned: Assignment,
    situation: Situation,
    known: Mapping[str, Mapping[str, str]],
    avoids: Mapping[str, Sequence[Avoid]],
    guesses: Mapping[str, Guesses],
) -> Iterator[Finding]:
    """Return what is wrong with a name, and what the rules say against its value.

    ``known`` are the names that ``vLLM`` and ``NCCL`` read in these versions, ``guesses`` the
    nearest ones by the same two keys; ``avoids`` the rules about assigned name.
    """
    advised = [
        Finding(
            line=assigned.line,
            about=assigned.name,
            level=Level(avoid.severity),
            what=f"{assigned.shown} is advised against",
            why=avoid.reason,
            hint=avoid.instead,
            source=avoid.source,
        )
        for avoid in avoids.get(assigned.name, ())
        if avoid.matches(assigned.value) and (assigned.literal or not avoid.values)
        if holds(avoid.when, situation)
    ]
    yield from advised
    # Both prefixes have five characters.
    reader = _READERS.get(assigned.name[:5])
    # One finding for each name: advice says more than that nobody reads it.
    if advised or (reader and assigned.name in known[reader]):
        return
    if reader:
        yield _unread(assigned, reader, situation.get(reader.lower(), ""), guesses[reader])
    else:
        yield from _other(assigned, situation)


def _unread(assigned: Assignment, reader: str, version: str, guess: Guesses) -> Finding:
    life = lifetime(assigned.name)
    close = "" if life else guess(assigned.name)
    what = f"no known {reader} reads {short(assigned.name)}"
    if life:
        what = f"{reader} {version} does not read {assigned.name}{_span(life, version)}"
    gone = (str(row["instead"]) for row in bounds()["gone"] if assigned.name in row["names"])
    return (assigned.error if close else assigned.warning)(
        what,
        why=_SILENT[reader],
        hint=f"did you mean {close}?" if close else next(gone, "leave it out"),
        source="vLLM envs.py" if reader == "vLLM" else "NCCL's sources",
    )


def _span(life: Lifetime, version: str) -> str:
    if version and release(version) < release(life.first):
        return f" yet: {life.first} does"
    past = version and release(version) > release(life.last)
    return f" any more: {life.first} to {life.last} did" if past else ""


@cache
def _in_capitals() -> Mapping[str, str]:
    return {name.upper(): name for name in other_variables()}


def _other(assigned: Assignment, situation: Situation) -> Iterator[Finding]:
    other = other_variables().get(assigned.name)
    version = situation.get(other.of, "") if other else ""
    if other and other.versions and version and not within(version, other.versions):
        yield assigned.warning(
            f"{other.of} {version} does not read {assigned.name}: {other.versions} does",
            why=other.meaning,
            hint="leave it out",
        )
    alike = "" if other else _in_capitals().get(assigned.name.upper(), "")
    if alike:
        yield assigned.error(
            f"nobody reads {assigned.name}",
            why="Capitals and small letters differ in names of variables.",
            hint=f"write {alike}",
        )
