"""Decide by rules: what holds where, who says so, and whether the user wants it.

One engine for all of ``recipes/env``: an entry has a condition and its grounds; a rule sets
something while its condition holds, and is on by default, by ``--with`` or not at all. A condition
is ``fact = value``, ``fact = [values]`` or, for versions and numbers, ``fact = range``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, TypeVar

from patchkit.errors import UsageError
from patchkit.finding import SINGLE_REPORT, Confidence, Established
from patchkit.records import RECIPES, matching, read_toml
from patchkit.runtime.rules.releases import check_range, within
from patchkit.runtime.rules.spelling import nearest_hint
from patchkit.target import targets

_FACTS = RECIPES / "env" / "facts.toml"
CHOICES = read_toml(dict[str, tuple[str, ...]], _FACTS, key="choices")
CHOICES["target"] = (*targets(), "other")
_RANGES = read_toml(tuple[str, ...], _FACTS, key="ranges")
_UNTOLD = "untold"  # what a condition says of a fact that is not known

Condition = Mapping[str, str | tuple[str, ...]]
Situation = Mapping[str, str]
Routes = Mapping[str, tuple[str, ...]]
"""layers, by how their names begin → the kernels that they take, as NAME or NAME RANGE"""
VariableName = Annotated[str, matching("[A-Z][A-Za-z0-9_]*", "the name of a variable")]
FlagName = Annotated[
    str, matching(r"--[a-z0-9-]+(\.\w+)?", "a flag, written as --a-flag")
]


def holds(when: Condition, situation: Situation) -> bool:
    """Return whether all conditions are met; an unknown fact meets only ``"untold"``."""
    for key, values in when.items():
        known = situation.get(key, "")
        if key in _RANGES:
            is_met = bool(known) and within(known, str(values))
        else:
            is_met = (known or _UNTOLD) in (
                (values,) if isinstance(values, str) else values
            )
        if not is_met:
            return False
    return True


def check_condition(when: Condition) -> None:
    """Raise ValueError for a condition that means nothing."""
    for key, values in when.items():
        if key in _RANGES and isinstance(values, str):
            check_range(values)
            continue
        for value in (values,) if isinstance(values, str) else values:
            if key not in CHOICES or value not in (*CHOICES[key], _UNTOLD):
                raise ValueError(f"{key} = {value!r} means nothing")


def in_words(when: Condition) -> str:
    """Return a condition in one line: ``topology roce or ring, nccl >=2.30.7``."""
    alternatives = {
        key: (it,) if isinstance(it, str) else it for key, it in when.items()
    }
    return ", ".join(
        f"{key} {' or '.join('unknown' if value == _UNTOLD else value for value in values)}"
        for key, values in alternatives.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Grounded:
    """A statement that holds in some situations, and who says so.

    ``by_release`` has what it says in some releases of vLLM instead, by their ranges.
    """

    text_field: ClassVar[str] = "reason"

    id: str
    when: Annotated[Condition, check_condition] = field(default_factory=dict)
    source: str
    evidence: Established
    confidence: Confidence
    by_release: Mapping[Annotated[str, check_range], str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(Grounded):
    """A setting while ``when`` holds, and why; ``optional`` rules only where a user says so."""

    reason: str
    routes: Routes = field(default_factory=dict)
    optional: bool = False
    guides: str = ""

    @property
    def default(self) -> bool:
        """Return whether it is on by itself; what rests on a single report never is."""
        return not self.optional and self.evidence != SINGLE_REPORT


@dataclass(frozen=True, slots=True, kw_only=True)
class Discouraged(Grounded):
    """A setting to leave out while ``when`` holds, for values that ``values`` matches, and why."""

    reason: str
    routes: Routes = field(default_factory=dict)
    values: str = ""
    guides: str = ""

    def matches(self, value: str) -> bool:
        return re.fullmatch(self.values or ".*", value) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice(Grounded):
    """A problem that no variable and no flag solves, reported while ``when`` holds."""

    text_field: ClassVar[str] = "says"

    says: str
    instead: str


G = TypeVar("G", bound=Grounded)
R = TypeVar("R", bound=Rule)


def routes_in_words(routes: Routes) -> str:
    """Return routes in one line: ``NVFP4 MoE: Marlin; FP8 linear per block: CUTLASS``."""
    return "; ".join(
        f"{layers}: {', '.join(kernels)}" for layers, kernels in routes.items()
    )


def holding(entries: Iterable[G], situation: Situation) -> tuple[G, ...]:
    """Return the entries whose condition holds, with what they say of this release."""
    vllm = situation.get("vllm", "")
    return tuple(
        in_release(entry, vllm) for entry in entries if holds(entry.when, situation)
    )


def in_release(entry: G, vllm: str) -> G:
    """Return an entry with what it says of a release of vLLM, "" for an unknown one."""
    for bounds, text in entry.by_release.items():
        if vllm and within(vllm, bounds):
            changed: dict[str, Any] = {entry.text_field: text}
            return replace(entry, **changed)
    return entry


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleChoice:
    """The rules that a user turns on (``--with``) and off (``--without``), by id."""

    wanted: frozenset[str] = frozenset()
    unwanted: frozenset[str] = frozenset()

    def check(self, rules: Iterable[Rule], hint: str) -> None:
        """Raise UsageError for an id that no rule has; ``hint`` says what lists the rules."""
        ids = {rule.id for rule in rules}
        for name in sorted((self.wanted | self.unwanted) - ids):
            raise UsageError(
                f"no rule is called {name!r}", hint=nearest_hint(name, ids, hint)
            )

    def divide(self, rules: Iterable[R]) -> tuple[tuple[R, ...], tuple[R, ...]]:
        """Return the rules that are on, and those that could be turned on."""
        # False and True as indices: on, off.
        both: tuple[list[R], list[R]] = [], []
        for rule in rules:
            on = rule.id not in self.unwanted and (
                rule.default or rule.id in self.wanted
            )
            both[not on].append(rule)
        return tuple(both[0]), tuple(both[1])


BY_DEFAULT = RuleChoice()
