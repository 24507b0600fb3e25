"""Read the model recipes that a release of vLLM ships: ``recipes/models/OWNER/NAME.yaml``.

The rows are those of recipes/env/vllm_recipes.tsv, as ``runtime/rules/presets.py`` reads
them. Releases from 0.33.0 on ship recipes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from patchkit.runtime.rules.presets import (
    ABOUT,
    DRAFTING,
    MODELS,
    VRAM,
    Preset,
    load_flag_rules,
    load_presets,
    model_recipes,
    read_presets,
    same_value,
)
from patchkit.runtime.rules.releases import read_table
from tools.decisions import Decision
from tools.vllm_recipe import (
    feature_mode,
    gb10_settings,
    merge_settings,
    split_flags,
)

_PLACE, _FLAGS = "recipes/env/presets.toml", "recipes/env/flags.toml"
# A recipe without them leaves them to vLLM.
_ALWAYS = ("--gpu-memory-utilization", "--max-model-len")
_HEADING = re.compile(r"^#+ .*$", re.MULTILINE)
_BLOCK = re.compile(r"^ *```\w*\n(?P<text>.*?)^ *```", re.MULTILINE | re.DOTALL)
_SERVE = re.compile(
    r"^(?P<before>(?:\s*[A-Z]\w*=\S+)*)\s*vllm serve (?P<words>.+)$", re.MULTILINE
)


def read_recipes(root: Path) -> dict[str, str]:
    """Return the rows of a release's tree; none if it ships no recipes."""
    rows: dict[str, str] = {}
    for place in sorted((root / "recipes" / "models").glob("*/*.yaml")):
        recipe = yaml.safe_load(place.read_text(encoding="utf-8"))
        guide, variants = recipe.get("guide", ""), recipe["variants"]
        told = {
            name: _in_the_guide(guide, _model(recipe, each))
            for name, each in variants.items()
        }
        from_guide = {name: each for name, each in told.items() if each}
        # A guide with commands of its own does not mean all variants.
        hinted = {**recipe, "guide": "", "meta": {}} if from_guide else recipe
        tuned = {**from_guide, **gb10_settings(hinted)}
        # A checkpoint may be in several variants: the one for a GB10 says most.
        for name in sorted(variants, key=lambda each: each not in tuned):
            model = _model(recipe, variants[name])
            if model not in rows:
                its = {**recipe["model"], **variants[name]}
                its["file"] = f"{place.parent.name}/{place.name}"
                its["drafter"] = DRAFTING not in tuned.get(name, {}) and _drafter(
                    recipe, name
                )
                rows[model] = str(its.get("min_vllm_version") or "")
                wanted = {VRAM, "drafter", *(ABOUT if name in tuned else ())}
                about = {key: its[key] for key in sorted(wanted) if its.get(key)}
                for key, value in {**about, **tuned.get(name, {})}.items():
                    rows[f"{model} {key}"] = " ".join(str(value).split())
    return rows


def _model(recipe: Mapping[str, Any], variant: Mapping[str, Any]) -> str:
    return str(variant.get("model_id") or recipe["model"]["model_id"])


def _drafter(recipe: Mapping[str, Any], name: str) -> str:
    """Return what upstream drafts with on any GPU of NVIDIA, "" for nothing."""
    variant, feature = (
        recipe["variants"][name],
        recipe.get("features", {}).get("spec_decoding", {}),
    )
    mode = feature_mode("spec_decoding", feature, variant)
    if "supported_hardware" in variant or name not in mode.get(
        "variants", recipe["variants"]
    ):
        return ""
    found = merge_settings(split_flags(mode.get("args", []))).get(DRAFTING, "")
    return "" if "$" in found else found


def _in_the_guide(guide: str, model: str) -> dict[str, str]:
    """Return what the guide's command for a DGX Spark sets, empty if it has none for the model."""
    for section in _sections(guide):
        if not re.match(r"#.*(DGX Spark|GB10)", section):
            continue
        for block in _BLOCK.finditer(section):
            for line in _SERVE.finditer(block["text"].replace("\\\n", " ")):
                served, *words = shlex.split(line["words"])
                if served == model:
                    before = (
                        each.partition("=") for each in shlex.split(line["before"])
                    )
                    return merge_settings(
                        [
                            *((name, value) for name, _, value in before),
                            *split_flags(words),
                        ]
                    )
    return {}


def _sections(guide: str) -> Iterator[str]:
    """Yield each heading with the text up to the next one; comments in a block are none."""
    blocks = [block.span() for block in _BLOCK.finditer(guide)]
    starts = [
        match.start()
        for match in _HEADING.finditer(guide)
        if not any(first < match.start() < last for first, last in blocks)
    ]
    for start, end in pairwise([*starts, len(guide)]):
        yield guide[start:end]


# What a person decides


def recipe_releases() -> tuple[str, ...]:
    """Return the releases with which a recipe changed."""
    return tuple(dict.fromkeys(row.first for row in read_table(MODELS).rows))


def undecided(release: str) -> Iterator[Decision]:
    """Yield what presets do otherwise than a release's recipes without a reason, or no more."""
    for preset in load_presets():
        yield from _of_preset(preset, release)


def without_preset(release: str, before: str) -> Iterator[Decision]:
    """Yield the models for a GB10 that are new in a release, and are served as it says."""
    known, own = model_recipes(before), {each.id.lower() for each in read_presets()}
    for name, recipe in model_recipes(release).items():
        if (
            recipe.settings
            and not (name in known and known[name].settings)
            and name not in own
        ):
            says = f"{recipe.id} has a recipe for a GB10 in {release}, which serve-args goes by"
            yield Decision(file=_PLACE, says=says)


def _of_preset(preset: Preset, release: str) -> Iterator[Decision]:
    recipe = model_recipes(release).get(preset.id.lower())
    if recipe is None:
        return
    ours = {"min_vllm": preset.min_vllm, **(preset.settings if recipe.settings else {})}
    theirs = {"min_vllm": recipe.min_vllm or preset.min_vllm, **recipe.settings}
    found = set()
    for name in dict.fromkeys((*ours, *theirs)):
        here, there = ours.get(name), theirs.get(name)
        if (there is None and name in _ALWAYS) or same_value(here, there):
            continue
        found.add(name)
        if not preset.reason(name, there):
            yield Decision(
                file=_PLACE,
                says=f"{preset.id}: {name} is {there or 'not set'!r} in the recipe of "
                f"{release}, and {here or 'not set'!r} in the preset: take it, or say why "
                "not in `differs`",
            )
    reasons = {*load_flag_rules().preset, DRAFTING}
    for name in preset.settings.keys() - preset.variables.keys() - reasons:
        yield Decision(
            file=_FLAGS, says=f"{preset.id}: [preset] has no reason for {name}"
        )
    for name in preset.differs:
        if not any(fnmatchcase(each, name) for each in found):
            yield Decision(
                file=_PLACE, says=f"{preset.id}: `differs` names {name}, which does not"
            )
