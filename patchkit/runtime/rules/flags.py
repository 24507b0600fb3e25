"""Read flags of `vllm serve`, the values that they take, and the rules about them, by release."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from functools import cache
from pathlib import Path

from patchkit.frozen import frozen
from patchkit.records import RECIPES, read_toml
from patchkit.runtime.rules.releases import read_table, within
from patchkit.runtime.rules.rule import (
    Advice,
    Discouraged,
    FlagName,
    Grounded,
    Names,
    Rule,
    Values,
)
from patchkit.runtime.rules.variable_values import ONE, AllowedValues
from patchkit.runtime.rules.vllm_names import read_flags

FLAGS = RECIPES / "env" / "vllm_flags.tsv"
VALUES = RECIPES / "env" / "flag_values.toml"
RULES = RECIPES / "env" / "flags.toml"
_LEVELS = ("--optimization-level", "-O")


@cache
def flags(version: str, home: Path | None = None) -> frozenset[str]:
    """Return all flags of a release, of any release for "", or of the vLLM in ``home``."""
    return read_flags(home) if home else frozenset(read_table(FLAGS).at(version))


def has_flag(flag: str, version: str, home: Path | None = None) -> bool:
    """Return whether `vllm serve` takes a flag, in any spelling, for example:

    ``--max_model_len=8``, ``--no-enable-prefix-caching``, ``--compilation-config.mode``, ``-O3``.
    """
    known_flags = flags(version, home)
    name = re.split(r"[=.]", flag, maxsplit=1)[0]

    if name.startswith("-O"):  # vLLM expands -O3 before it parses flags
        return not known_flags.isdisjoint(_LEVELS)

    if name.startswith("--"):  # vLLM's parser takes _ for -
        name = name.replace("_", "-")

    # argparse makes --no-X of every switch --X (BooleanOptionalAction).
    switch = name.replace("--no-", "--", 1)
    return not known_flags.isdisjoint((name, switch))


@frozen
class Choices:
    """A flag with fixed values, NAME or NAME RANGE; the first file with ``symbol`` counts."""

    flag: str
    files: Names
    symbol: str
    values: Names
    capitals: bool = True

    def allowed_by(self, version: str) -> AllowedValues:
        """Return the values that a release takes, or for "" those of any release."""
        names = []

        for value in self.values:
            name, _blank, bounds = value.partition(" ")
            if not version or within(version, bounds):
                names.append(name)

        return AllowedValues(how=ONE, words=tuple(names), any_case=not self.capitals)


@cache
def load_choices() -> Mapping[str, Choices]:
    """Return flag → its fixed values. Raises UsageError, with file and line."""
    rows = read_toml(tuple[Choices, ...], VALUES, key="flag")
    return {row.flag: row for row in rows}


@frozen
class FlagRule(Rule):
    """A rule that sets a flag; ``value`` is "" for a bare flag."""

    flag: FlagName
    value: str = ""


@frozen
class LeaveOut(Discouraged):
    """A flag that patchkit never sets, even if a preset or a user names it."""

    flag: FlagName

    def is_against(self, flag: str, value: str) -> bool:
        """Return whether the entry is against this flag with this value."""
        return flag == self.flag and self.matches(value)


@frozen
class Limit(Grounded):
    """The largest value that a flag should have; beside the flag ``unless`` any value is fine."""

    flag: FlagName
    most: float
    harmful: float
    reason: str
    instead: str
    guides: str = ""
    unless: str = ""


@frozen
class MemoryBudget:
    """The memory that a model must fit into, per node; ``share`` is vLLM's part of it.

    ``bits`` has the bits of a weight by a word of a model's name or quantization, ``least_bits``
    the bits where no word says so. ``cache_bytes`` has the bytes of a value by --kv-cache-dtype.
    """

    total_gib: float
    margin_gib: float
    share: float
    bits: Mapping[str, float]
    least_bits: float
    cache_bytes: Mapping[str, float]
    source: str


@frozen
class DenseNames:
    """The dense layers of architectures, by vLLM's names; ``files`` give them a config."""

    architectures: Names
    layers: Names
    files: Names


@frozen
class FlagRules:
    """All of flags.toml.

    ``preset`` says why presets set a flag, ``recipe`` why they lack a flag of upstream's recipe.
    """

    rules: tuple[FlagRule, ...] = field(metadata={"key": "rule"})
    leave_out: tuple[LeaveOut, ...]
    limits: tuple[Limit, ...] = field(metadata={"key": "limit"})
    advice: tuple[Advice, ...]
    memory: MemoryBudget
    dense: tuple[DenseNames, ...]
    dense_parts: Mapping[str, Names]
    preset: Mapping[FlagName, str]
    recipe: Values


@cache
def load_flag_rules(place: Path = RULES) -> FlagRules:
    """Return the rules. Raises UsageError, with file and line, for a wrong entry."""
    return read_toml(FlagRules, place)
