"""Read the flags of `vllm serve`, the values that they take, and the rules about them."""

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
    """Return the flags of a release; for "", those of all releases.

    With ``home``, return the flags of the vLLM in that folder.
    """
    return read_flags(home) if home else frozenset(read_table(FLAGS).at(version))


def has_flag(flag: str, version: str, home: Path | None = None) -> bool:
    """Return whether `vllm serve` takes a flag.

    The flag may have any spelling that vLLM takes: ``--max_model_len=8``,
    ``--no-enable-prefix-caching``, ``--compilation-config.mode``, ``-O3``.
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
    """A flag that takes only some values.

    A value is NAME, or NAME RANGE if only some releases take it. They are from the first of
    ``files`` of vLLM that has ``symbol``. ``capitals`` says that upper and lower case differ.
    """

    flag: str
    files: Names
    symbol: str
    values: Names
    capitals: bool = True

    def allowed_by(self, version: str) -> AllowedValues:
        """Return the values that a release takes; for "", those of all releases."""
        names = []

        for value in self.values:
            name, _blank, bounds = value.partition(" ")
            if not version or within(version, bounds):
                names.append(name)

        return AllowedValues(how=ONE, words=tuple(names), any_case=not self.capitals)


@cache
def load_choices() -> Mapping[str, Choices]:
    """Return flag → its choices. Raises UsageError, with file and line, if malformed."""
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
        """Return whether this entry is about ``flag`` and its ``values`` match ``value``."""
        return flag == self.flag and self.matches(value)


@frozen
class Limit(Grounded):
    """The largest value that a flag should have.

    A value above ``most`` is reported, from ``harmful`` on as a warning. If the flag ``unless`` is
    also set, any value is fine. ``instead`` says what to do.
    """

    flag: FlagName
    most: float
    harmful: float
    reason: str
    instead: str
    guides: str = ""
    unless: str = ""


@frozen
class MemoryBudget:
    """The memory of a Spark, and what is needed to estimate whether a model fits.

    ``share`` is the part of the memory that vLLM gets; of that, ``margin_gib`` are for activations
    and the least KV cache. ``bits`` maps a word of a model's name or quantization to the bits of a
    weight; without such a word, ``least_bits`` holds. ``cache_bytes`` maps a value of
    --kv-cache-dtype to the bytes of a cached number.
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
    """The names in vLLM of the dense layers of some architectures.

    ``files`` are the files of vLLM that give these layers a quantization config.
    """

    architectures: Names
    layers: Names
    files: Names


@frozen
class FlagRules:
    """The contents of flags.toml.

    ``preset`` maps a flag to the reason why presets set it. ``recipe`` maps a pattern of settings
    in upstream's recipes to the reason why presets leave them out.
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
    """Return the contents of flags.toml. Raises UsageError, with file and line, if malformed."""
    return read_toml(FlagRules, place)
