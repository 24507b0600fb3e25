"""Read rules about variables: ``recipes/env/rules.toml``, whose head describes the fields.

`patchkit env` writes what the rules set, `check` finds what the avoids name, `env explain` and
the docs show both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from patchkit.paths import RECIPES
from patchkit.records import read_toml
from patchkit.runtime.rules.executors import Executor
from patchkit.runtime.rules.rule import Advice, Discouraged, Rule, VariableName, check_ids

PLACE = RECIPES / "env" / "rules.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableRule(Rule):
    """Variables, whose values may hold ``{facts}``; ``shared`` ones are the same on all nodes.

    ``replaces`` is the rule in whose place it stands while it is on.
    """

    set: Mapping[VariableName, str]
    scope: Literal["shared", "host"]
    replaces: str = ""

    @property
    def variables(self) -> tuple[str, ...]:
        return tuple(self.set)


@dataclass(frozen=True, slots=True, kw_only=True)
class Avoid(Discouraged):
    """Variables that should not be set; ``instead`` is what to do."""

    variables: tuple[VariableName, ...]
    severity: Literal["error", "warning", "note"]
    instead: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableAdvice(Advice):
    """Add what a file of variables says of the problem: it is solved where ``unless`` is set.

    It is a note where that may stand elsewhere, so that no file is refused for it.
    """

    severity: Literal["warning", "note"] = "warning"
    unless: Mapping[VariableName, str] = field(default_factory=dict)

    def solved(self, values: Mapping[str, str]) -> bool:
        return bool(self.unless) and self.unless.items() <= values.items()


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableRules:
    rules: tuple[VariableRule, ...] = field(metadata={"key": "rule"})
    avoids: tuple[Avoid, ...] = field(metadata={"key": "avoid"})
    advice: tuple[VariableAdvice, ...]
    executors: tuple[Executor, ...] = field(metadata={"key": "executor"})

    def __post_init__(self) -> None:
        check_ids((*self.entries, *self.advice))
        ids = {rule.id for rule in self.rules}
        if lost := sorted({rule.replaces for rule in self.rules} - {"", *ids}):
            raise ValueError(f"replaces what is no rule: {', '.join(lost)}")

    @property
    def avoids_by_name(self) -> Mapping[str, Sequence[Avoid]]:
        found: dict[str, list[Avoid]] = {}
        for avoid in self.avoids:
            for name in avoid.variables:
                found.setdefault(name, []).append(avoid)
        return found

    @property
    def entries(self) -> tuple[VariableRule | Avoid, ...]:
        """Return everything that is about variables."""
        return (*self.rules, *self.avoids)

    @property
    def of_host(self) -> frozenset[str]:
        """Return the variables that some rule sets for each node by itself."""
        return frozenset(name for rule in self.rules if rule.scope == "host" for name in rule.set)


@cache
def load_variable_rules(place: Path = PLACE) -> VariableRules:
    """Return the rules. Raises UsageError for what means nothing, with file and line."""
    return read_toml(VariableRules, place)
