"""Take flags and variables for a GB10 out of a recipe of vLLM's (``schema_version: 1``).

Such a recipe has them by checkpoint (variant), feature and hardware.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

Settings = dict[str, str]
"""Flag or variable → value, "" for a flag without one."""

GB10 = "dgx_spark_gb10"
# As in upstream's command builder: the most exact one wins.
_HARDWARE = (GB10, "blackwell", "nvidia")
# Optional in every recipe, and taken all the same: it makes a single user's answers quick.
_DRAFTING = "spec_decoding"
_SPARK = re.compile(r"DGX Spark|GB10")
# Flags and variables that belong to the machine, and not to the model.
OF_THE_PLACE = re.compile(
    r"--(host|port|(tensor|pipeline)-parallel(-size)?|nnodes|node-rank|master-(addr|port)"
    r"|headless|distributed-executor-backend|served-model-name)|NCCL_\w+"
)


def gb10_settings(
    recipe: Mapping[str, Any], from_guide: Mapping[str, Settings] | None = None
) -> Iterator[tuple[str, Settings]]:
    """Yield the variants of a recipe that are for a GB10, with their settings.

    ``from_guide`` are the settings in the text of the guide, by variant.
    """
    variants = recipe["variants"]
    from_guide = from_guide or {}
    chosen = {name for name, variant in variants.items() if _names_gb10(variant)}
    if not chosen and not from_guide and _is_for_spark(recipe):
        # A recipe that names the device and no variant means all of them.
        chosen = {
            name
            for name, variant in variants.items()
            if "supported_hardware" not in variant
        }

    for name, variant in variants.items():
        if name in chosen:
            yield name, variant_settings(recipe, variant)
        elif name in from_guide:
            yield name, from_guide[name]


def _names_gb10(variant: Mapping[str, Any]) -> bool:
    overrides = variant.get("hardware_overrides", {})
    return GB10 in overrides or GB10 in variant.get("supported_hardware", ())


def _is_for_spark(recipe: Mapping[str, Any]) -> bool:
    hardware = recipe["meta"].get("hardware", {})
    return GB10 in hardware or bool(_SPARK.search(recipe.get("guide", "")))


def variant_settings(recipe: Mapping[str, Any], variant: Mapping[str, Any]) -> Settings:
    """Return the settings of a variant, joined in the order of upstream's command builder."""
    optional = recipe.get("opt_in_features", [])
    modes = [
        feature_mode(name, feature, variant)
        for name, feature in recipe.get("features", {}).items()
        if name == _DRAFTING or name not in optional
    ]
    settings: list[tuple[str, str]] = []
    for part in (recipe["model"], *modes, variant, _on_gb10(variant)):
        flags = part.get("base_args") or part.get("args") or part.get("extra_args", [])
        settings += split_flags(flags)
        variables = part.get("base_env") or part.get("env") or part.get("extra_env", {})
        settings += variables.items()
    return merge_settings(settings)


def feature_mode(
    name: str, feature: Mapping[str, Any], variant: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the part of a feature that counts for a variant on a GB10."""
    wanted = variant.get("default_modes", {}).get(name) or feature.get("default_mode")
    mode = feature.get("modes", {}).get(wanted, feature)
    return _on_gb10(mode) or mode


def _on_gb10(part: Mapping[str, Any]) -> Mapping[str, Any]:
    overrides = part.get("hardware_overrides", {})
    return next((overrides[name] for name in _HARDWARE if name in overrides), {})


def split_flags(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield flag → value, "" for a bare flag; ``--a_b=c`` is ``--a-b c``."""
    parts: list[str] = []
    for word in words:
        parts += word.split("=", 1) if word.startswith("--") else [word]

    for part, after in pairwise([*parts, "--"]):
        if part.startswith("--"):
            flag, dot, key = part.partition(".")
            value = "" if after.startswith("--") else after
            yield flag.replace("_", "-") + dot + key, value


def merge_settings(settings: Iterable[tuple[str, str]]) -> Settings:
    """Return the settings of a model: the last one of a name counts, ``--a.b c`` is JSON."""
    merged: Settings = {}
    for name, value in settings:
        flag, _, key = name.partition(".")
        # The reader of a guide fills in $NAME: it belongs to the machine as well.
        if OF_THE_PLACE.fullmatch(flag) or value.startswith("$"):
            continue
        merged[flag] = _add_key(merged.get(flag, "{}"), key, value) if key else value
    return merged


def _add_key(table: str, key: str, value: str) -> str:
    """Return a table in JSON with one more key; its value may be JSON."""
    read: object = value
    with suppress(ValueError):
        read = json.loads(value)
    return json.dumps({**json.loads(table), key: read})
