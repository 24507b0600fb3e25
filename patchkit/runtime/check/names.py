"""Check the names of variables against those that the installed software reads."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from patchkit.finding import Finding, Level
from patchkit.runtime.check.content import Assignment, FileContent, shorten
from patchkit.runtime.check.messages import make_finding
from patchkit.runtime.check.versions import runs_upstream
from patchkit.runtime.rules.condition import Situation, holds
from patchkit.runtime.rules.flags import flags
from patchkit.runtime.rules.lifetimes import Lifetime
from patchkit.runtime.rules.owners import owner
from patchkit.runtime.rules.releases import release
from patchkit.runtime.rules.spelling import Slips
from patchkit.runtime.rules.variable_rules import Avoid, load_variable_rules
from patchkit.runtime.rules.variable_values import find_value_problems, is_number, value_tables
from patchkit.runtime.rules.variables import (
    is_current,
    lifetime,
    nccl_variables,
    other_variables,
    vllm_variables,
)

_READERS = {"NCCL_": "NCCL", "VLLM_": "vLLM"}  # both have five characters
_SOURCES = {"NCCL": "NCCL's sources", "vLLM": "vLLM envs.py"}
_USED = re.compile(r"\$\{?([A-Za-z_]\w*)")
_HANDED_ON = re.compile(r"""\b([A-Za-z_]\w*)(=|:[ \t]+)["']?\$\{?\1\b""")


@cache
def _avoids() -> Mapping[str, Sequence[Avoid]]:
    return load_variable_rules().avoids_by_name


@cache
def _names_in_capitals() -> Mapping[str, str]:
    return {name.upper(): name for name in other_variables()}


@dataclass(frozen=True, kw_only=True)
class NameCheck:
    """The check of one file's names; ``home`` is the folder of its vLLM, if it is installed."""

    text: str
    content: FileContent
    situation: Situation
    home: Path | None

    @cached_property
    def _known(self) -> Mapping[str, Collection[str]]:
        vllm = vllm_variables(self.situation.get("vllm", ""), self.home)
        return {"vLLM": vllm, "NCCL": nccl_variables(self.situation.get("nccl", ""))}

    @cached_property
    def _slips(self) -> Mapping[str, Slips]:
        return {reader: Slips(names) for reader, names in self._known.items()}

    @cached_property
    def _used(self) -> frozenset[str]:
        """The names that a file uses itself, other than to hand them on under the same name."""
        return frozenset(_USED.findall(_HANDED_ON.sub("", self.text)))

    def find_problems(self) -> Iterator[Finding]:
        """Yield what is wrong with names, and what the rules say against their values."""
        for assignment in self.content.assignments:
            # An empty variable is one that is not set, to all who read these.
            if assignment.value:
                # One finding for each name: advice says more than that nobody reads it.
                yield from [*self._find_advice(assignment)] or self._find_unread(assignment)

    def _find_advice(self, assignment: Assignment) -> Iterator[Finding]:
        name = assignment.name
        # A name of no project that the file itself uses is its own, whoever else had one like it.
        own = name in self._used and name[:5] not in _READERS and name not in other_variables()
        for avoid in () if own or not assignment.literal else _avoids().get(name, ()):
            if avoid.matches(assignment.value) and holds(avoid.when, self.situation):
                yield Finding(
                    id=avoid.id,
                    line=assignment.line,
                    about=name,
                    level=Level(avoid.severity),
                    what=f"{assignment.shown} is advised against",
                    why=avoid.reason,
                    hint=avoid.instead,
                    source=avoid.source,
                )

    def _find_unread(self, assignment: Assignment) -> Iterator[Finding]:
        """Yield that nobody reads a name here, if it is clear which name or release was meant.

        An unknown name may be of a fork, or of an image's start script: it is reported where
        upstream's own vLLM gets it.
        """
        name = assignment.name
        reader = _READERS.get(name[:5], "")
        alike = "" if name in other_variables() else _names_in_capitals().get(name.upper(), "")
        # A name in small letters alone is a script's own, whatever variable it was named after.
        if alike and not name.islower():
            yield make_finding("variable-capitals", assignment, alike=alike)
        version = self.situation.get(reader.lower(), "")
        if not reader or (version and name in self._known[reader]):
            return
        told = {"reader": reader, "version": version, "source": _SOURCES[reader]}
        if life := lifetime(name):
            if version or not is_current(life):
                key = "variable-of-other-release" if version else "variable-gone"
                gone = (row["instead"] for row in value_tables()["gone"] if name in row["names"])
                told |= {"hint": next(gone, "leave it out"), "last": life.last}
                yield make_finding(key, assignment, None, **told, span=_span(life, version))
            return
        upstream = runs_upstream(self.content, assignment.block)
        hint, flag = "leave it out", f"--{name[5:].lower().replace('_', '-')}"
        if (close := self._slips[reader](name)) and self._fits(assignment, close):
            hint = f"did you mean {close}?"
        elif owner(name) or name in self._used or upstream is False:
            return
        elif flag in flags(self.situation.get("vllm", "")) and (upstream or self.content.commands):
            hint = f"use the flag {flag}"
        elif not upstream:
            return
        told |= {"name": shorten(name), "hint": hint}
        yield make_finding("unknown-variable", assignment, None, **told)

    def _fits(self, assignment: Assignment, name: str) -> bool:
        """Return whether a value could be that of another variable, as far as that is known."""
        known, value = lifetime(name), assignment.value
        if not assignment.literal:
            return True
        if known and known.default.isdecimal() and not is_number(value):
            return False
        return not any(find_value_problems(name, value, self.situation.get("role", "")))


def _span(life: Lifetime, version: str) -> str:
    """Return when a name was read, if that was before or after a version."""
    if version and release(version) < release(life.first):
        return f" yet: {life.first} does"
    past = version and release(version) > release(life.last)
    return f" any more: {life.first} to {life.last} did" if past else ""
