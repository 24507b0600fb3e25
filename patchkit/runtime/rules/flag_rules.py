"""Rules about the flags of `vllm serve`, as data: ``recipes/env/flags.toml``; its head says how."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from patchkit.errors import UsageError
from patchkit.paths import RECIPES
from patchkit.runtime.rules.variable_rules import (
    CONFIDENCE,
    EVIDENCE,
    SINGLE_REPORT,
    Advice,
    Condition,
    condition_problems,
)

PLACE = RECIPES / "env" / "flags.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagRule:
    """A flag that is set while ``when`` holds; an empty ``value`` is a flag without one."""

    id: str
    flag: str
    when: Condition
    reason: str
    source: str
    evidence: str
    confidence: str
    value: str = ""
    optional: bool = False
    guides: str = ""

    @property
    def default(self) -> bool:
        """What rests on one report is never on by itself."""
        return not self.optional and self.evidence != SINGLE_REPORT


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveOut:
    """A flag, to what ``values`` matches, that is not set while ``when`` holds."""

    id: str
    flag: str
    reason: str
    source: str
    evidence: str
    confidence: str
    values: str = ""
    when: Condition = field(default_factory=dict)
    guides: str = ""

    def matches(self, flag: str, value: str) -> bool:
        return flag == self.flag and re.fullmatch(self.values or ".*", value) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """What a model must fit into, per node; ``share`` is vLLM's own."""

    total_gib: float
    margin_gib: float
    share: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagRules:
    """``preset`` says why presets set a flag."""

    rules: tuple[FlagRule, ...]
    leave_out: tuple[LeaveOut, ...]
    advice: tuple[Advice, ...]
    memory: MemoryBudget
    preset: Mapping[str, str]


@cache
def load_flag_rules(place: Path = PLACE) -> FlagRules:
    """Raises UsageError for a field, a value or a condition that means nothing."""
    table = tomllib.loads(place.read_text(encoding="utf-8"))
    if unknown := set(table) - {"memory", "preset", "rule", "leave_out", "advice"}:
        raise UsageError(f"{place}: unknown table {', '.join(sorted(unknown))}")
    found = FlagRules(
        rules=tuple(_read(FlagRule, entry, place) for entry in table["rule"]),
        leave_out=tuple(_read(LeaveOut, entry, place) for entry in table["leave_out"]),
        advice=tuple(_read(Advice, entry, place) for entry in table["advice"]),
        memory=_built(MemoryBudget, table["memory"], f"{place}: memory"),
        preset=table["preset"],
    )
    ids = [each.id for each in found.rules]
    ids += [each.id for each in found.leave_out]
    ids += [each.id for each in found.advice]
    if twice := {name for name in ids if ids.count(name) > 1}:
        raise UsageError(f"{place}: there twice: {', '.join(sorted(twice))}")
    return found


def _read(kind: type[Any], entry: dict[str, Any], place: Path) -> Any:
    where = f"{place}: {entry.get('id', entry)}"
    found = _built(kind, entry, where)
    problems = list(condition_problems(found.when))
    for key, allowed in (("evidence", EVIDENCE), ("confidence", CONFIDENCE)):
        if entry[key] not in allowed:
            problems.append(f"{key} is {entry[key]!r}, not one of {', '.join(allowed)}")
    if not entry.get("flag", "--").startswith("--"):
        problems.append("flags are written as --a-flag")
    if problems:
        raise UsageError(f"{where}: {problems[0]}")
    return found


def _built(kind: type[Any], entry: dict[str, Any], where: str) -> Any:
    try:
        return kind(**entry)
    except TypeError as error:
        raise UsageError(f"{where}: {error}") from None
