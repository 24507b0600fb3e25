"""Select the entries of ``recipes/env`` that apply, and the rules that the user wants.

Every entry has a condition and its source. A rule makes a setting while its condition is met; it is
on by default, turned on by ``--with``, or off. A condition
is ``fact = value``, ``fact = [values]`` or, for versions and numbers, ``fact = range``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Annotated, Any, ClassVar, TypeVar

from patchkit.errors import UsageError
from patchkit.finding import SINGLE_REPORT, Confidence, Established
from patchkit.frozen import frozen
from patchkit.records import RECIPES, matching, read_toml
from patchkit.runtime.rules.releases import check_range, within
from patchkit.runtime.rules.spelling import nearest_hint
from patchkit.target import targets

_FACTS = RECIPES / "env" / "facts.toml"
CHOICES = read_toml(dict[str, tuple[str, ...]], _FACTS, key="choices")
CHOICES["target"] = (*targets(), "other")
_RANGES = read_toml(tuple[str, ...], _FACTS, key="ranges")
_UNTOLD = "untold"  # the value in a condition that an unknown fact meets

Names = tuple[str, ...]
Values = Mapping[str, str]
"""Flags, variables or facts → their values."""
Condition = Mapping[str, str | Names]
Situation = Values
Routes = Mapping[str, Names]
"""Layers, by how their names begin → the kernels that they take, as NAME or NAME RANGE."""
VariableName = Annotated[str, matching("[A-Z][A-Za-z0-9_]*", "the name of a variable")]
FlagName = Annotated[
    str, matching(r"--[a-z0-9-]+(\.\w+)?", "a flag, written as --a-flag")
]


def is_met(when: Condition, situation: Situation) -> bool:
    """Return whether all conditions are met; an unknown fact meets only ``"untold"``."""
    for fact, values in when.items():
        value = situation.get(fact, "")
        if fact not in _RANGES:
            is_met_here = (value or _UNTOLD) in _alternatives(values)
        else:
            is_met_here = bool(value) and within(value, str(values))
        if not is_met_here:
            return False

    return True


def _alternatives(values: str | Names) -> Names:
    return (values,) if isinstance(values, str) else values


def check_condition(when: Condition) -> None:
    """Raise ValueError for a condition with an unknown fact, value or range."""
    for fact, values in when.items():
        if fact in _RANGES and isinstance(values, str):
            check_range(values)
            continue

        known_values = {*CHOICES.get(fact, ()), _UNTOLD}
        for value in _alternatives(values):
            if fact not in CHOICES or value not in known_values:
                raise ValueError(f"{fact} = {value!r} means nothing")


def describe_condition(when: Condition) -> str:
    """Return a condition in one line: ``topology roce or ring, nccl >=2.30.7``."""
    parts = []
    for fact, values in when.items():
        words = " or ".join(_alternatives(values)).replace(_UNTOLD, "unknown")
        parts.append(f"{fact} {words}")

    return ", ".join(parts)


@frozen
class Grounded:
    """A statement that holds in some situations, and who says so.

    ``by_release`` maps ranges of vLLM releases to the text that replaces ``text_field`` there.
    """

    text_field: ClassVar[str] = "reason"

    id: str
    when: Annotated[Condition, check_condition] = field(default_factory=dict)
    source: str
    evidence: Established
    confidence: Confidence
    by_release: Mapping[Annotated[str, check_range], str] = field(default_factory=dict)


@frozen
class Rule(Grounded):
    """A setting to make while ``when`` holds, and why; if ``optional``, only by ``--with``."""

    reason: str
    routes: Routes = field(default_factory=dict)
    optional: bool = False
    guides: str = ""

    @property
    def default(self) -> bool:
        """Return whether the rule is on by default; a rule with a single report never is."""
        return not self.optional and self.evidence != SINGLE_REPORT


@frozen
class Discouraged(Grounded):
    """A setting to leave out while ``when`` holds, for values that ``values`` matches, and why."""

    reason: str
    routes: Routes = field(default_factory=dict)
    values: str = ""
    guides: str = ""

    def matches(self, value: str) -> bool:
        return re.fullmatch(self.values or ".*", value) is not None


@frozen
class Advice(Grounded):
    """A problem that no variable and no flag solves, reported while ``when`` holds."""

    text_field: ClassVar[str] = "says"

    says: str
    instead: str


G = TypeVar("G", bound=Grounded)
R = TypeVar("R", bound=Rule)


def describe_routes(routes: Routes) -> str:
    """Return routes in one line: ``NVFP4 MoE: Marlin; FP8 linear per block: CUTLASS``."""
    parts = [f"{layers}: {', '.join(kernels)}" for layers, kernels in routes.items()]
    return "; ".join(parts)


def select_entries(entries: Iterable[G], situation: Situation) -> tuple[G, ...]:
    """Return the entries whose condition is met, with their texts for this vLLM release."""
    vllm = situation.get("vllm", "")

    return tuple(
        adapt_to_release(entry, vllm)
        for entry in entries
        if is_met(entry.when, situation)
    )


def adapt_to_release(entry: G, vllm: str) -> G:
    """Return an entry with its text for a vLLM release; ``vllm`` is "" if unknown."""
    for bounds, text in entry.by_release.items():
        if vllm and within(vllm, bounds):
            changed: dict[str, Any] = {entry.text_field: text}
            return replace(entry, **changed)

    return entry


@frozen
class RuleChoice:
    """The rules that a user turns on (``--with``) and off (``--without``), by id."""

    wanted: frozenset[str] = frozenset()
    unwanted: frozenset[str] = frozenset()

    def check(self, rules: Iterable[Rule], hint: str) -> None:
        """Raise UsageError for an id that no rule has; ``hint`` says what lists the rules."""
        ids = {rule.id for rule in rules}
        unknown = sorted((self.wanted | self.unwanted) - ids)
        if unknown:
            name = unknown[0]
            raise UsageError(
                f"no rule is called {name!r}", hint=nearest_hint(name, ids, hint)
            )

    def divide(self, rules: Sequence[R]) -> tuple[tuple[R, ...], tuple[R, ...]]:
        """Return the rules that are on, by default or by ``--with``, and those that are off."""
        defaults = {rule.id for rule in rules if rule.default}
        active_ids = (defaults | self.wanted) - self.unwanted
        active = tuple(rule for rule in rules if rule.id in active_ids)
        return active, tuple(rule for rule in rules if rule.id not in active_ids)


BY_DEFAULT = RuleChoice()
