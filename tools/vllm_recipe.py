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

Part = Mapping[str, Any]
"""A recipe, or a part of it, as YAML has it."""

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


def gb10_settings(recipe: Part) -> dict[str, Settings]:
    """Return the variants of a recipe that are for a GB10, with their settings."""
    variants = recipe["variants"]
    names = [
        name
        for name, variant in variants.items()
        if GB10 in variant.get("hardware_overrides", {})
        or GB10 in variant.get("supported_hardware", ())
    ]

    # A recipe that names the device and no variant means all of them.
    if not names:
        hardware = recipe["meta"].get("hardware", {})
        if GB10 in hardware or _SPARK.search(recipe.get("guide", "")):
            names = [
                row for row in variants if "supported_hardware" not in variants[row]
            ]

    return {name: variant_settings(recipe, variants[name]) for name in names}


def variant_settings(recipe: Part, variant: Part) -> Settings:
    """Return the settings of a variant, joined in the order of upstream's command builder."""
    optional = recipe.get("opt_in_features", [])
    parts = [recipe["model"]]
    for name, feature in recipe.get("features", {}).items():
        if name == _DRAFTING or name not in optional:
            parts.append(feature_mode(name, feature, variant))
    parts += [variant, _on_gb10(variant)]

    settings: list[tuple[str, str]] = []
    for part in parts:
        settings += split_flags(_first_of(part, "base_args", "args", "extra_args"))
        settings += dict(_first_of(part, "base_env", "env", "extra_env")).items()

    return merge_settings(settings)


def _first_of(part: Part, *names: str) -> Any:
    """Return the first field that is there and not empty."""
    return next(filter(None, map(part.get, names)), ())


def feature_mode(name: str, feature: Part, variant: Part) -> Part:
    """Return the part of a feature that counts for a variant on a GB10."""
    chosen = variant.get("default_modes", {}).get(name)
    mode_name = chosen or feature.get("default_mode")
    mode = feature.get("modes", {}).get(mode_name, feature)
    return _on_gb10(mode) or mode


def _on_gb10(part: Part) -> Part:
    overrides = part.get("hardware_overrides", {})
    return next((overrides[name] for name in _HARDWARE if name in overrides), {})


def split_flags(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield flag → value, "" for a bare flag; ``--a_b=c`` is ``--a-b c``."""
    parts: list[str] = []
    for word in words:
        parts += word.split("=", 1) if word.startswith("--") else [word]

    for part, value in pairwise([*parts, "--"]):
        if not part.startswith("--"):
            continue
        flag, dot, key = part.partition(".")
        name = flag.replace("_", "-") + dot + key
        yield name, "" if value.startswith("--") else value


def merge_settings(settings: Iterable[tuple[str, str]]) -> Settings:
    """Return the settings of a model: the last one of a name counts, ``--a.b c`` is JSON."""
    merged: Settings = {}

    for name, text in settings:
        flag, _, key = name.partition(".")
        # The reader of a guide fills in $NAME: it belongs to the machine as well.
        if OF_THE_PLACE.fullmatch(flag) or text.startswith("$"):
            continue

        if not key:
            merged[flag] = text
            continue

        value: object = text
        with suppress(ValueError):
            value = json.loads(text)
        table = json.loads(merged.get(flag, "{}"))
        merged[flag] = json.dumps({**table, key: value})

    return merged
