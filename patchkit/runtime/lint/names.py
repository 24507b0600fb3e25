"""Check the names in a file against those that the installed software reads."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from patchkit.finding import Finding, Level
from patchkit.runtime.files.content import Assignment, FileContent, short
from patchkit.runtime.lint.strange_names import check_strange
from patchkit.runtime.lint.values import bounds, fits
from patchkit.runtime.rules.condition import Situation, holds
from patchkit.runtime.rules.lifetimes import Lifetime
from patchkit.runtime.rules.owners import owner
from patchkit.runtime.rules.releases import release, within
from patchkit.runtime.rules.spelling import Slips
from patchkit.runtime.rules.variable_rules import Avoid, load_variable_rules
from patchkit.runtime.rules.variables import is_current, lifetime, other_variables

READERS = {"NCCL_": "NCCL", "VLLM_": "vLLM"}  # both have five characters
SILENT = {
    "NCCL": "NCCL ignores what it does not know, without a word.",
    "vLLM": "vLLM ignores it; from 0.17 on it says so in its log.",
}
SOURCES = {"NCCL": "NCCL's sources", "vLLM": "vLLM envs.py"}
_USED = re.compile(r"\$\{?([A-Za-z_]\w*)")
_HANDED_ON = re.compile(r"""\b([A-Za-z_]\w*)(=|:[ \t]+)["']?\$\{?\1\b""")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownNames:
    """The names that ``vLLM`` and ``NCCL`` read in the versions that a file is checked against."""

    names: Mapping[str, Mapping[str, str]]
    # Made once for a file: they keep what was asked, and give up after many names.
    slips: Mapping[str, Slips]

    def lacks(self, name: str) -> bool:
        """Return whether a name looks like vLLM's or NCCL's, and is no known one of anybody."""
        reader = READERS.get(name[:5])
        if reader is None or name in self.names[reader]:
            return False
        return lifetime(name) is None and not owner(name)

    @classmethod
    def of(cls, names: Mapping[str, Mapping[str, str]]) -> KnownNames:
        """Return the names by reader, with what finds the one that was meant."""
        return cls(names=names, slips={reader: Slips(known) for reader, known in names.items()})


def check_names(
    text: str, content: FileContent, situation: Situation, known: KnownNames
) -> Iterator[Finding]:
    """Return what is wrong with names, and what the rules say against their values."""
    strange: list[Assignment] = []
    used = expanded(text)
    for each in content.assignments:
        if each.literal and not each.value:
            continue  # an empty variable is one that is not set, to all who read these
        # One finding for each name: advice says more than that nobody reads it.
        found = list(_advised(each, situation, used)) or list(_unread(each, situation, known))
        yield from found
        if not found and each.name not in used and known.lacks(each.name):
            strange.append(each)
    yield from check_strange(strange, content, situation)


@cache
def _avoids() -> Mapping[str, Sequence[Avoid]]:
    return load_variable_rules().avoids_by_name


def expanded(text: str) -> frozenset[str]:
    """Return the names that a file uses itself, other than to hand them on under the same name."""
    return frozenset(_USED.findall(_HANDED_ON.sub("", text)))


def _advised(
    assigned: Assignment, situation: Situation, used: Collection[str]
) -> Iterator[Finding]:
    """Return what the rules about a name say against its value."""
    name = assigned.name
    # A name of no project that the file itself uses is its own, whoever else had one like it.
    own = name in used and name[:5] not in READERS and name not in other_variables()
    for avoid in () if own or not assigned.literal else _avoids().get(name, ()):
        if avoid.matches(assigned.value) and holds(avoid.when, situation):
            yield Finding(
                line=assigned.line,
                about=name,
                level=Level(avoid.severity),
                what=f"{assigned.shown} is advised against",
                why=avoid.reason,
                hint=avoid.instead,
                source=avoid.source,
            )


def _unread(assigned: Assignment, situation: Situation, known: KnownNames) -> Iterator[Finding]:
    """Return that nobody reads a name here, if it is clear which name or release was meant."""
    reader = READERS.get(assigned.name[:5])
    if reader is None:
        yield from _other(assigned, situation)
        return
    version = situation.get(reader.lower(), "")
    if version and assigned.name in known.names[reader]:
        return
    if life := lifetime(assigned.name):
        if version or not is_current(life):
            yield _out_of_time(assigned, reader, version, life)
    elif (close := known.slips[reader](assigned.name)) and fits(assigned, close, situation):
        yield assigned.warning(
            f"no known {reader} reads {short(assigned.name)}",
            why=SILENT[reader],
            hint=f"did you mean {close}?",
            source=SOURCES[reader],
        )


def _out_of_time(assigned: Assignment, reader: str, version: str, life: Lifetime) -> Finding:
    """Return that this release does not read a name which another one reads."""
    gone = (str(row["instead"]) for row in bounds()["gone"] if assigned.name in row["names"])
    found = assigned.warning(
        f"{reader} {version} does not read {assigned.name}{_span(life, version)}",
        why=SILENT[reader],
        hint=next(gone, "leave it out"),
        source=SOURCES[reader],
    )
    if version:
        return found
    # The file may be for a release that reads the name.
    what = f"no {reader} after {life.last} reads {assigned.name}"
    return replace(found, level=Level.NOTE, what=what, hint=f"with a later one: {found.hint}")


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
    # A name in small letters alone is a script's own, whatever variable it was named after.
    alike = "" if other else _in_capitals().get(assigned.name.upper(), "")
    if alike and not assigned.name.islower():
        yield assigned.warning(
            f"nobody reads {assigned.name}",
            why="Capitals and small letters differ in names of variables.",
            hint=f"write {alike}",
        )
