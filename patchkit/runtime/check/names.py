"""Check the names of variables against those that the installed software reads."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from patchkit.finding import Finding, Level
from patchkit.runtime.check.content import Assignment, shorten
from patchkit.runtime.check.messages import make_finding
from patchkit.runtime.check.situation import CheckedText
from patchkit.runtime.check.versions import runs_upstream
from patchkit.runtime.rules.condition import holds
from patchkit.runtime.rules.flags import flags
from patchkit.runtime.rules.lifetimes import Lifetime
from patchkit.runtime.rules.releases import release
from patchkit.runtime.rules.spelling import Slips
from patchkit.runtime.rules.variable_rules import Avoid, load_variable_rules
from patchkit.runtime.rules.variable_values import find_value_problems, is_number, value_tables
from patchkit.runtime.rules.variables import (
    is_current,
    lifetime,
    name_owner,
    nccl_variables,
    other_variables,
    vllm_variables,
)

_READERS = {"NCCL_": "NCCL", "VLLM_": "vLLM"}  # both have five characters
_SOURCES = {"NCCL": "NCCL's sources", "vLLM": "vLLM envs.py"}
_USED = re.compile(r"\$\{?([A-Za-z_]\w*)")
_HANDED_ON = re.compile(r"""\b([A-Za-z_]\w*)(=|:[ \t]+)["']?\$\{?\1\b""")


@cache
def _names_in_capitals() -> Mapping[str, str]:
    return {name.upper(): name for name in other_variables()}


def check_names(checked: CheckedText) -> Iterator[Finding]:
    """Yield what is wrong with names, and what the rules say against their values."""
    known = _KnownNames(checked)
    for assignment in checked.content.assignments:
        # An empty variable is one that is not set, to all who read these.
        if assignment.value:
            # One finding for each name: advice says more than that nobody reads it.
            yield from [*_find_advice(assignment, known)] or _find_unread(assignment, known)


@dataclass(frozen=True)
class _KnownNames:
    """What is read by the software of a file, and what the file uses itself."""

    checked: CheckedText

    @cached_property
    def by_reader(self) -> Mapping[str, Collection[str]]:
        situation = self.checked.situation
        vllm = vllm_variables(situation.get("vllm", ""), self.checked.home)
        return {"vLLM": vllm, "NCCL": nccl_variables(situation.get("nccl", ""))}

    @cached_property
    def avoids(self) -> Mapping[str, Sequence[Avoid]]:
        return load_variable_rules().avoids_by_name

    @cached_property
    def slips(self) -> Mapping[str, Slips]:
        return {reader: Slips(names) for reader, names in self.by_reader.items()}

    @cached_property
    def used_here(self) -> frozenset[str]:
        """The names that a file uses, other than to hand them on under the same name."""
        return frozenset(_USED.findall(_HANDED_ON.sub("", self.checked.text)))


def _find_advice(assignment: Assignment, known: _KnownNames) -> Iterator[Finding]:
    name = assignment.name
    # A name of no project that the file itself uses is its own, whoever else had one like it.
    own = name in known.used_here and name[:5] not in _READERS and name not in other_variables()
    for rule in () if own or not assignment.is_known else known.avoids.get(name, ()):
        if rule.matches(assignment.value) and holds(rule.when, known.checked.situation):
            yield Finding(
                id=rule.id,
                line=assignment.line,
                about=name,
                level=Level(rule.severity),
                what=f"{assignment.shown} is advised against",
                why=rule.reason,
                hint=rule.instead,
                source=rule.source,
            )


def _find_unread(assignment: Assignment, known: _KnownNames) -> Iterator[Finding]:
    """Yield that nobody reads a name here, if it is clear which name or release was meant.

    An unknown name may be of a fork, or of an image's start script: it is reported where upstream's
    own vLLM gets it.
    """
    name, situation = assignment.name, known.checked.situation
    reader = _READERS.get(name[:5], "")
    alike = "" if name in other_variables() else _names_in_capitals().get(name.upper(), "")
    # A name in small letters alone is a script's own, whatever variable it was named after.
    if alike and not name.islower():
        yield make_finding("variable-capitals", assignment, alike=alike)
    version = situation.get(reader.lower(), "")
    if not reader or (version and name in known.by_reader[reader]):
        return
    words = {"reader": reader, "version": version, "source": _SOURCES[reader]}
    if life := lifetime(name):
        if version or not is_current(life):
            key = "variable-of-other-release" if version else "variable-gone"
            gone = (row["instead"] for row in value_tables()["gone"] if name in row["names"])
            words |= {"hint": next(gone, "leave it out"), "last": life.last}
            yield make_finding(key, assignment, None, **words, span=_describe_span(life, version))
        return
    content = known.checked.content
    upstream = runs_upstream(content, assignment.block)
    hint, flag = "leave it out", f"--{name[5:].lower().replace('_', '-')}"
    close = known.slips[reader](name)
    if close and _value_fits(assignment, close, situation.get("role", "")):
        hint = f"did you mean {close}?"
    elif name_owner(name) or name in known.used_here:
        return
    elif flag in flags(situation.get("vllm", "")) and (upstream or content.commands):
        hint = f"use the flag {flag}"
    elif not upstream:
        return
    words |= {"name": shorten(name), "hint": hint}
    yield make_finding("unknown-variable", assignment, None, **words)


def _value_fits(assignment: Assignment, name: str, role: str) -> bool:
    """Return whether a value could be that of another variable, as far as that is known."""
    life, value = lifetime(name), assignment.value
    if not assignment.is_known:
        return True
    wants_number = life is not None and life.default.isdecimal()
    return (is_number(value) or not wants_number) and not any(
        find_value_problems(name, value, role)
    )


def _describe_span(life: Lifetime, version: str) -> str:
    """Return when a name was read, if that was before or after a version."""
    if version and release(version) < release(life.first):
        return f" yet: {life.first} does"
    past = version and release(version) > release(life.last)
    return f" any more: {life.first} to {life.last} did" if past else ""
