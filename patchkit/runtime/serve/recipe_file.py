"""Read recipes that others write: vLLM's own, eugr's and sparkrun's YAML.

vLLM's (``schema_version: 1``) has flags and variables by checkpoint, feature and hardware. eugr's
and sparkrun's have a command with ``{names}``, which ``defaults`` fill in. A file is hostile until
it is read: nothing of it runs, and what a preset cannot say is named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

GB10 = "dgx_spark_gb10"
# As upstream's command builder: the most exact one wins.
_HARDWARE = (GB10, "blackwell", "nvidia")
# Optional in every recipe, and what makes a single user's answers quick: taken all the same.
_DRAFTING = "spec_decoding"
_SPARK = re.compile(r"DGX Spark|GB10")
# What belongs to a place and not to the model.
_OF_THE_PLACE = re.compile(r"--host|--port|--tensor-parallel-size|--served-model-name|NCCL_\w+")
Settings = dict[str, str]


def recipe_settings(
    recipe: Mapping[str, Any], told: Mapping[str, Settings] | None = None
) -> Iterator[tuple[str, Settings]]:
    """Yield the variants of vLLM's recipe that are for a GB10, with flag or variable → value.

    ``told`` is what the guide's text says, by variant.
    """
    variants, found = recipe["variants"], dict(told or {})
    named = {
        name
        for name, each in variants.items()
        if GB10 in each.get("hardware_overrides", {}) or GB10 in each.get("supported_hardware", ())
    }
    # A recipe that names the device and no variant means all of them.
    whole = not (named or told) and (
        GB10 in recipe["meta"].get("hardware", {}) or _SPARK.search(recipe.get("guide", ""))
    )
    for name, variant in variants.items():
        if name in named or (whole and "supported_hardware" not in variant):
            yield name, joined(_settings(recipe, variant))
        elif name in found:
            yield name, found[name]


def _settings(recipe: Mapping[str, Any], variant: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield flags and variables in the order in which upstream's command builder joins them."""
    model, optional = recipe["model"], recipe.get("opt_in_features", [])
    modes = {
        name: mode_of(name, feature, variant)
        for name, feature in recipe.get("features", {}).items()
        if name == _DRAFTING or name not in optional
    }
    for part in (model, *modes.values(), variant, _on_gb10(variant)):
        yield from split_flags(
            part.get("base_args") or part.get("args") or part.get("extra_args", [])
        )
        yield from (part.get("base_env") or part.get("env") or part.get("extra_env", {})).items()


def mode_of(name: str, feature: Mapping[str, Any], variant: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a feature that counts for a variant on a GB10."""
    wanted = variant.get("default_modes", {}).get(name) or feature.get("default_mode")
    mode = feature.get("modes", {}).get(wanted, feature)
    return _on_gb10(mode) or mode


def _on_gb10(part: Mapping[str, Any]) -> Mapping[str, Any]:
    overrides = part.get("hardware_overrides", {})
    return next((overrides[name] for name in _HARDWARE if name in overrides), {})


def split_flags(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield flag → value, "" for a bare flag; ``--a_b=c`` is ``--a-b c``."""
    parts = [
        part for word in words for part in (word.split("=", 1) if word[:2] == "--" else [word])
    ]
    for word, after in pairwise([*parts, "--"]):
        if word.startswith("--"):
            head, dot, tail = word.partition(".")
            yield head.replace("_", "-") + dot + tail, "" if after.startswith("--") else after


def joined(settings: Iterable[tuple[str, str]]) -> Settings:
    """Return the settings of a model: the last one of a name counts, ``--a.b c`` is JSON."""
    found: Settings = {}
    for name, value in settings:
        flag, _, key = name.partition(".")
        # $NAME is filled in by the guide's reader: of the place as well.
        if _OF_THE_PLACE.fullmatch(flag) or value.startswith("$"):
            continue
        if key:
            value = json.dumps({**json.loads(found.get(flag, "{}")), key: plain(value)})
        found[flag] = value
    return found


def plain(value: str) -> object:
    """Return a text as JSON has it, else the text."""
    try:
        return json.loads(value)
    except ValueError:
        return value
