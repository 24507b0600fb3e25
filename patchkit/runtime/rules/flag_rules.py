"""Read rules about the flags of `vllm serve`: ``recipes/env/flags.toml`` describes the fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from patchkit.paths import RECIPES
from patchkit.records import read_toml
from patchkit.runtime.rules.rule import Advice, Discouraged, FlagName, Grounded, Rule, check_unique

PLACE = RECIPES / "env" / "flags.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagRule(Rule):
    """A flag; an empty ``value`` is a flag without one."""

    flag: FlagName
    value: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveOut(Discouraged):
    """A flag that is not set, whoever asks for it."""

    flag: FlagName


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit(Grounded):
    """The most that a flag should have; from ``harmful`` on it is likely to do damage.

    Beside the flag ``unless`` it has no effect.
    """

    flag: FlagName
    most: float
    harmful: float
    reason: str
    instead: str
    guides: str = ""
    unless: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """The memory that a model must fit into, per node; ``share`` is vLLM's own."""

    total_gib: float
    margin_gib: float
    share: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagRules:
    """``preset`` says why presets set a flag, ``recipe`` why they lack one of a recipe's."""

    rules: tuple[FlagRule, ...] = field(metadata={"key": "rule"})
    leave_out: tuple[LeaveOut, ...]
    limits: tuple[Limit, ...] = field(metadata={"key": "limit"})
    advice: tuple[Advice, ...]
    memory: MemoryBudget
    preset: Mapping[FlagName, str]
    recipe: Mapping[FlagName, str]

    def __post_init__(self) -> None:
        entries = (*self.rules, *self.leave_out, *self.limits, *self.advice)
        check_unique(entry.id for entry in entries)


@cache
def load_flag_rules(place: Path = PLACE) -> FlagRules:
    """Return the rules. Raises UsageError for what means nothing, with file and line."""
    return read_toml(FlagRules, place)
