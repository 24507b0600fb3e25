"""Rules about environment variables, as data: what is set, when, why, and who says so.

``recipes/env/rules.toml`` holds them; its head describes the fields. `patchkit env` writes what the
rules set, `env check` finds what the avoids name, `env explain` and the docs show both.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from patchkit.errors import UsageError
from patchkit.paths import RECIPES
from patchkit.runtime.rules.releases import within
from patchkit.target import targets

PLACE = RECIPES / "env" / "rules.toml"
SINGLE_REPORT = "single report"
CHOICES = {
    "role": ("single", "head", "worker"),
    "topology": ("single", "roce", "socket", "ring", "hetero"),
    "executor": ("uni", "mp", "ray"),
    "copies": ("nothing", "overwrites", "fills in"),
    "target": (*targets(), "other"),
    "quantization": ("fp8", "nvfp4", "mxfp4", "gptq", "awq", "bf16"),
    "moe": ("yes", "no", "unknown"),
}
_VERSIONS = ("vllm", "torch", "triton", "nccl", "nodes")
_EVIDENCE = ("read", "measured", "documented", "reported", SINGLE_REPORT)
_CONFIDENCE = ("high", "medium", "contested")
_SCOPES = ("shared", "host")
_SEVERITIES = ("error", "warning", "note")
_NAME = re.compile(r"[A-Z][A-Za-z0-9_]*")
# For rules about flags, for presets and for the facts of env files, which use the same words.
QUANTIZATIONS, EVIDENCE, CONFIDENCE = CHOICES["quantization"], _EVIDENCE, _CONFIDENCE

Condition = Mapping[str, str | list[str]]
Situation = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Variables that are set while ``when`` holds; values may hold ``{facts}`` of the host."""

    id: str
    set: Mapping[str, str]
    when: Condition
    scope: str
    reason: str
    source: str
    evidence: str
    confidence: str
    optional: bool = False
    guides: str = ""

    @property
    def variables(self) -> tuple[str, ...]:
        return tuple(self.set)

    @property
    def default(self) -> bool:
        """What rests on one report is never on by itself."""
        return not self.optional and self.evidence != SINGLE_REPORT


@dataclass(frozen=True, slots=True, kw_only=True)
class Avoid:
    """Variables that should not be set, to what ``values`` matches, while ``when`` holds."""

    id: str
    variables: tuple[str, ...]
    severity: str
    reason: str
    instead: str
    source: str
    evidence: str
    confidence: str
    values: str = ""
    when: Condition = field(default_factory=dict)
    guides: str = ""

    def matches(self, name: str, value: str) -> bool:
        return name in self.variables and re.fullmatch(self.values or ".*", value) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What no variable can mend, to be told while ``when`` holds."""

    id: str
    when: Condition
    says: str
    instead: str
    source: str
    evidence: str
    confidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Executor:
    """What starts the ranks in some releases of vLLM, and what it copies to them from the head.

    ``switch`` is the rule that chooses it where it is not the default; ``copies`` is ``nothing``,
    ``overwrites`` or ``fills in``; ``prefixes`` are those of the variables that are copied.
    """

    name: str
    vllm: str
    copies: str
    prefixes: tuple[str, ...]
    reason: str
    source: str
    switch: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableRules:
    rules: tuple[Rule, ...]
    avoids: tuple[Avoid, ...]
    advice: tuple[Advice, ...]
    executors: tuple[Executor, ...]

    @property
    def avoids_by_name(self) -> Mapping[str, Sequence[Avoid]]:
        found: dict[str, list[Avoid]] = {}
        for avoid in self.avoids:
            for name in avoid.variables:
                found.setdefault(name, []).append(avoid)
        return found

    @property
    def entries(self) -> tuple[Rule | Avoid, ...]:
        """What has a word on variables."""
        return (*self.rules, *self.avoids)


def holds(when: Condition, situation: Situation) -> bool:
    """Whether all conditions are met; one about a fact that is unknown is not."""
    return all(_met(key, wanted, situation.get(key, "")) for key, wanted in when.items())


def _met(key: str, wanted: str | list[str], known: str) -> bool:
    if not known:
        return False
    if key in _VERSIONS:
        return isinstance(wanted, str) and within(known, wanted)
    return known in ([wanted] if isinstance(wanted, str) else wanted)


@cache
def load_rules(place: Path = PLACE) -> VariableRules:
    """Raises UsageError for a field, a value or a condition that means nothing."""
    table = tomllib.loads(place.read_text(encoding="utf-8"))
    if unknown := set(table) - {"rule", "avoid", "advice", "executor"}:
        raise UsageError(f"{place}: unknown table {', '.join(sorted(unknown))}")
    found = VariableRules(
        rules=tuple(_read(Rule, entry, place) for entry in table["rule"]),
        avoids=tuple(_read(Avoid, entry, place) for entry in table["avoid"]),
        advice=tuple(_read(Advice, entry, place) for entry in table["advice"]),
        executors=tuple(_read(Executor, entry, place) for entry in table["executor"]),
    )
    _unique([*found.rules, *found.avoids, *found.advice], place)
    return found


def _read(kind: type[Any], entry: dict[str, Any], place: Path) -> Any:
    where = f"{place}: {entry.get('id', entry.get('reason', entry))}"
    fixed = {key: tuple(entry[key]) for key in ("variables", "prefixes") if key in entry}
    try:
        found = kind(**(entry | fixed))
    except TypeError as error:
        raise UsageError(f"{where}: {error}") from None
    for problem in _problems(entry):
        raise UsageError(f"{where}: {problem}")
    return found


def _problems(entry: dict[str, Any]) -> Iterator[str]:
    known: dict[str, tuple[str, ...]] = {
        "scope": _SCOPES,
        "severity": _SEVERITIES,
        "evidence": _EVIDENCE,
        "confidence": _CONFIDENCE,
        "copies": CHOICES["copies"],
    }
    for key, values in known.items():
        if key in entry and entry[key] not in values:
            yield f"{key} is {entry[key]!r}, not one of {', '.join(values)}"
    for name in [*entry.get("set", ()), *entry.get("variables", ())]:
        if not _NAME.fullmatch(name):
            yield f"{name!r} is no name of a variable"
    yield from condition_problems(entry.get("when", {}))


def condition_problems(when: Condition) -> Iterator[str]:
    """What in a condition means nothing. Raises UsageError for a range that is none."""
    for key, wanted in when.items():
        yield from _condition(key, wanted)


def _condition(key: str, wanted: str | list[str]) -> Iterator[str]:
    if key in _VERSIONS and isinstance(wanted, str):
        within("0", wanted)
        return
    values = [wanted] if isinstance(wanted, str) else wanted
    for value in values:
        if value not in CHOICES.get(key, ()):
            yield f"when: {key} = {value!r} means nothing"


def _unique(entries: list[Rule | Avoid | Advice], place: Path) -> None:
    ids = [entry.id for entry in entries]
    for name in ids:
        if ids.count(name) > 1:
            raise UsageError(f"{place}: {name} is there twice")
