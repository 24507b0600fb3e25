"""Select the entries of ``recipes/env`` that apply, and the rules that the user wants.

Every entry has a condition and a source. A rule makes a setting while its condition is met. It is
on by default, or only if ``--with`` turns it on; ``--without`` turns it off. A condition is
``fact = value``, ``fact = [values]`` or, for versions and numbers, ``fact = range``.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Annotated, ClassVar, TypeVar

from patchkit.errors import UsageError
from patchkit.finding import SINGLE_REPORT, Confidence, Established
from patchkit.frozen import Fields, Texts, Values, frozen
from patchkit.records import RECIPES, matching, read_toml
from patchkit.runtime.rules.releases import check_range, within
from patchkit.runtime.rules.spelling import nearest_hint
from patchkit.target import targets

_FACTS = RECIPES / "env" / "facts.toml"
CHOICES = read_toml(dict[str, Texts], _FACTS, key="choices")
CHOICES["target"] = (*targets(), "other")
_RANGES = read_toml(Texts, _FACTS, key="ranges")
_UNTOLD = "untold"  # a value in conditions: it is met if the fact is unknown

Names = Texts
"""Names of flags, variables, releases or kernels."""
Condition = Mapping[str, str | Names]
Situation = Values
Routes = Mapping[str, Names]
"""Kind of layers (the beginning of a description) → kernels they use: NAME, or NAME RANGE."""
VariableName = Annotated[str, matching("[A-Z][A-Za-z0-9_]*", "the name of a variable")]
FlagName = Annotated[
    str, matching(r"--[a-z0-9-]+(\.\w+)?", "a flag, written as --a-flag")
]


def is_met(when: Condition, situation: Situation) -> bool:
    """Return whether a situation meets a condition: all of its facts have to fit.

    An unknown fact fits only the value ``untold``.
    """
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
    """Raise ValueError for an unknown fact or value, UsageError for a malformed range."""
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
    """A statement that holds in the situations of ``when``, with its source.

    ``by_release`` maps a range of vLLM releases to another text for them. ``text_field`` is the
    name of the field that the text replaces.
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
    """A setting to make while ``when`` holds, and why.

    An ``optional`` rule is only on if the user turns it on by ``--with``.
    """

    reason: str
    routes: Routes = field(default_factory=dict)
    optional: bool = False
    guides: str = ""

    @property
    def default(self) -> bool:
        """Return whether the rule is on by default. One that rests on a single report is not."""
        return not self.optional and self.evidence != SINGLE_REPORT


@frozen
class Discouraged(Grounded):
    """A setting to leave out while ``when`` holds, and why.

    ``values`` is a regular expression of the values that it is about, "" for all values.
    """

    reason: str
    routes: Routes = field(default_factory=dict)
    values: str = ""
    guides: str = ""

    def matches(self, value: str) -> bool:
        return re.fullmatch(self.values or ".*", value) is not None


@frozen
class Advice(Grounded):
    """A problem to report while ``when`` holds, which no rule solves by a variable or a flag."""

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
    """Return the entries whose condition is met, with their texts for the situation's vLLM."""
    vllm = situation.get("vllm", "")

    return tuple(
        adapt_to_release(entry, vllm)
        for entry in entries
        if is_met(entry.when, situation)
    )


def adapt_to_release(entry: G, vllm: str) -> G:
    """Return an entry with its text for a release of vLLM, unchanged if the release is ""."""
    for bounds, text in entry.by_release.items():
        if vllm and within(vllm, bounds):
            changed: Fields = {entry.text_field: text}
            return replace(entry, **changed)

    return entry


@frozen
class RuleChoice:
    """The rules that a user turns on (``--with``) and off (``--without``), by id."""

    wanted: frozenset[str] = frozenset()
    unwanted: frozenset[str] = frozenset()

    def check(self, rules: Iterable[Rule], hint: str) -> None:
        """Raise UsageError for an id that no rule has.

        ``hint`` tells how to list the rules; it is used if no rule has a similar id.
        """
        ids = {rule.id for rule in rules}
        unknown = sorted((self.wanted | self.unwanted) - ids)
        if unknown:
            name = unknown[0]
            raise UsageError(
                f"no rule is called {name!r}", hint=nearest_hint(name, ids, hint)
            )

    def divide(self, rules: Sequence[R]) -> tuple[tuple[R, ...], tuple[R, ...]]:
        """Return two groups of rules: those that are on, and those that are off."""
        defaults = {rule.id for rule in rules if rule.default}
        active_ids = (defaults | self.wanted) - self.unwanted
        active = tuple(rule for rule in rules if rule.id in active_ids)
        return active, tuple(rule for rule in rules if rule.id not in active_ids)


BY_DEFAULT = RuleChoice()
