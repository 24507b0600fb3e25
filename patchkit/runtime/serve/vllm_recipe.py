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


def gb10_settings(
    recipe: Part,
    from_guide: Mapping[str, Settings] | None = None,
) -> Iterator[tuple[str, Settings]]:
    """Yield the variants of a recipe that are for a GB10, with their settings.

    ``from_guide`` are the settings in the text of the guide, by variant.
    """
    from_guide = from_guide or {}
    has_own = _names_gb10
    if not from_guide and _is_for_spark(recipe):
        has_own = _is_for_any

    for name, variant in recipe["variants"].items():
        if has_own(variant):
            yield name, variant_settings(recipe, variant)
        elif name in from_guide:
            yield name, from_guide[name]


def _names_gb10(variant: Part) -> bool:
    overrides = variant.get("hardware_overrides", {})
    supported = variant.get("supported_hardware", ())
    return GB10 in overrides or GB10 in supported


def _is_for_any(variant: Part) -> bool:
    return "supported_hardware" not in variant


def _is_for_spark(recipe: Part) -> bool:
    """Return whether a recipe names the device and no variant: then it means all of them."""
    if any(map(_names_gb10, recipe["variants"].values())):
        return False
    hardware = recipe["meta"].get("hardware", {})
    guide = recipe.get("guide", "")
    return GB10 in hardware or bool(_SPARK.search(guide))


def variant_settings(recipe: Part, variant: Part) -> Settings:
    """Return the settings of a variant, joined in the order of upstream's command builder."""
    optional = recipe.get("opt_in_features", [])
    parts = [recipe["model"]]
    for name, feature in recipe.get("features", {}).items():
        if name == _DRAFTING or name not in optional:
            mode = feature_mode(name, feature, variant)
            parts.append(mode)
    parts.append(variant)
    parts.append(_on_gb10(variant))

    settings: list[tuple[str, str]] = []
    for part in parts:
        flags = _first_of(part, "base_args", "args", "extra_args")
        settings += split_flags(flags)

        variables = _first_of(part, "base_env", "env", "extra_env")
        settings += dict(variables).items()
    return merge_settings(settings)


def _first_of(part: Part, *names: str) -> Any:
    """Return the first field that is there and not empty."""
    return next(filter(None, map(part.get, names)), ())


def feature_mode(name: str, feature: Part, variant: Part) -> Part:
    """Return the part of a feature that counts for a variant on a GB10."""
    default_modes = variant.get("default_modes", {})
    mode_name = default_modes.get(name) or feature.get("default_mode")

    mode = feature.get("modes", {}).get(mode_name, feature)
    return _on_gb10(mode) or mode


def _on_gb10(part: Part) -> Part:
    overrides = part.get("hardware_overrides", {})
    return next((overrides[name] for name in _HARDWARE if name in overrides), {})


def split_flags(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield flag → value, "" for a bare flag; ``--a_b=c`` is ``--a-b c``."""
    parts: list[str] = []
    for word in words:
        if word.startswith("--"):
            parts += word.split("=", 1)
        else:
            parts.append(word)

    for part, value in pairwise([*parts, "--"]):
        if not part.startswith("--"):
            continue
        flag, dot, key = part.partition(".")
        name = flag.replace("_", "-") + dot + key
        if value.startswith("--"):
            yield name, ""
        else:
            yield name, value


def merge_settings(settings: Iterable[tuple[str, str]]) -> Settings:
    """Return the settings of a model: the last one of a name counts, ``--a.b c`` is JSON."""
    merged: Settings = {}
    for name, value in settings:
        flag, _, key = name.partition(".")
        # The reader of a guide fills in $NAME: it belongs to the machine as well.
        if OF_THE_PLACE.fullmatch(flag) or value.startswith("$"):
            continue

        if key:
            table = merged.get(flag, "{}")
            merged[flag] = _add_key(table, key, value)
        else:
            merged[flag] = value
    return merged


def _add_key(table: str, key: str, text: str) -> str:
    """Return a table in JSON with one more key; its text may be JSON."""
    value: object = text
    with suppress(ValueError):
        value = json.loads(text)
    keys = json.loads(table)
    return json.dumps({**keys, key: value})
