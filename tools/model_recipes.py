"""Read the model recipes that a release of vLLM ships: ``recipes/models/OWNER/NAME.yaml``.

The rows are those of recipes/env/vllm_recipes.tsv: ``MODEL`` with the oldest vLLM that upstream
names for it, ``MODEL vram_minimum_gb``, and, for what is meant for a GB10, ``MODEL --flag`` and
``MODEL VARIABLE`` with their values. Releases from 0.33.0 on ship recipes.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from patchkit.runtime.rules.flags import load_flag_rules
from patchkit.runtime.rules.presets import (
    MODELS,
    VRAM,
    ModelRecipe,
    Preset,
    find,
    load_presets,
    model_recipes,
)
from patchkit.runtime.rules.releases import read_table
from tools.decisions import Decision

# Every preset states them; a recipe without them leaves them to vLLM.
_ALWAYS = ("--gpu-memory-utilization", "--max-model-len")
GB10 = "dgx_spark_gb10"
_PLACE = "recipes/env/presets.toml"
# Optional in every recipe, and what makes a single user's answers quick: recorded all the same.
_DRAFTING = "spec_decoding"
_HEADING = re.compile(r"^#+ .*$", re.MULTILINE)
_BLOCK = re.compile(r"^ *```\w*\n(?P<text>.*?)^ *```", re.MULTILINE | re.DOTALL)
_SERVE = re.compile(r"^(?P<before>(?:\s*[A-Z]\w*=\S+)*)\s*vllm serve (?P<words>.+)$", re.MULTILINE)
# What belongs to a place and not to the model.
_OF_THE_PLACE = re.compile(r"--host|--port|--tensor-parallel-size|--served-model-name|NCCL_\w+")


def read_recipes(root: Path) -> dict[str, str]:
    """Return the rows of a release's tree; none if it ships no recipes."""
    rows: dict[str, str] = {}
    for place in sorted((root / "recipes" / "models").glob("*/*.yaml")):
        recipe = yaml.safe_load(place.read_text(encoding="utf-8"))
        tuned = dict(_for_gb10(recipe))
        # A checkpoint may be in several variants: the one for a GB10 says most.
        for name in sorted(recipe["variants"], key=lambda each: each not in tuned):
            variant = recipe["variants"][name]
            model = _model(recipe, variant)
            if model not in rows:
                both = (variant.get("min_vllm_version"), recipe["model"].get("min_vllm_version"))
                rows[model] = str(next(filter(None, both), ""))
                if VRAM in variant:
                    rows[f"{model} {VRAM}"] = str(variant[VRAM])
                for setting, value in tuned.get(name, {}).items():
                    rows[f"{model} {setting}"] = " ".join(value.split())
    return rows


def _model(recipe: Mapping[str, Any], variant: Mapping[str, Any]) -> str:
    return str(variant.get("model_id") or recipe["model"]["model_id"])


def _for_gb10(recipe: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the variants that are meant for a GB10, each with flag or variable → value."""
    variants = recipe["variants"]
    told = {
        name: settings
        for name, each in variants.items()
        if (settings := _in_the_guide(recipe.get("guide", ""), _model(recipe, each)))
    }
    named = {
        name
        for name, each in variants.items()
        if GB10 in each.get("hardware_overrides", {}) or GB10 in each.get("supported_hardware", ())
    }
    # A recipe that names the device and no variant means all of them.
    whole = GB10 in recipe["meta"].get("hardware", {}) and not (named or told)
    for name, variant in variants.items():
        if whole or name in named:
            yield name, _joined(_settings(recipe, variant))
        elif name in told:
            yield name, told[name]


def _settings(recipe: Mapping[str, Any], variant: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield flags and variables in the order in which upstream's command builder joins them."""
    model, optional = recipe["model"], recipe.get("opt_in_features", [])
    yield from _flags(model.get("base_args", []))
    yield from model.get("base_env", {}).items()
    for name, feature in recipe.get("features", {}).items():
        if name == _DRAFTING or name not in optional:
            mode = _mode(name, feature, variant)
            yield from _flags(mode.get("args", []))
            yield from mode.get("env", {}).items()
    for part in (variant, variant.get("hardware_overrides", {}).get(GB10, {})):
        yield from _flags(part.get("extra_args", []))
        yield from part.get("extra_env", {}).items()


def _mode(name: str, feature: Mapping[str, Any], variant: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a feature that counts for a variant on a GB10."""
    wanted = variant.get("default_modes", {}).get(name) or feature.get("default_mode")
    mode = feature.get("modes", {}).get(wanted, feature)
    return mode.get("hardware_overrides", {}).get(GB10) or mode


def _in_the_guide(guide: str, model: str) -> dict[str, str]:
    """Return what the guide's command for a DGX Spark sets, empty if it has none for the model."""
    for section in _sections(guide):
        if not re.match(r"#.*(DGX Spark|GB10)", section):
            continue
        for block in _BLOCK.finditer(section):
            for line in _SERVE.finditer(block["text"].replace("\\\n", " ")):
                served, *words = shlex.split(line["words"])
                if served == model:
                    before = (each.partition("=") for each in shlex.split(line["before"]))
                    return _joined([*((name, value) for name, _, value in before), *_flags(words)])
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


def _flags(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield flag → value, "" for a bare flag; ``--a_b=c`` is ``--a-b c``."""
    parts = [part for word in words for part in _parted(word)]
    for word, after in pairwise([*parts, "--"]):
        if word.startswith("--"):
            head, dot, tail = word.partition(".")
            yield head.replace("_", "-") + dot + tail, "" if after.startswith("--") else after


def _parted(word: str) -> list[str]:
    return word.split("=", 1) if word.startswith("--") else [word]


def _joined(settings: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the settings of a model: the last one of a name counts, ``--a.b c`` is JSON."""
    found: dict[str, str] = {}
    for name, value in settings:
        flag, _, key = name.partition(".")
        # $NAME is filled in by the guide's reader: of the place as well.
        if _OF_THE_PLACE.fullmatch(flag) or value.startswith("$"):
            continue
        if key:
            value = json.dumps({**json.loads(found.get(flag, "{}")), key: _plain(value)})
        found[flag] = value
    return found


def _plain(value: str) -> object:
    try:
        return json.loads(value)
    except ValueError:
        return value


# What a person decides


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A flag, a variable or ``min_vllm``: a preset's value and the recipe's, None for none."""

    name: str
    preset: str | None
    recipe: str | None

    def reason(self, preset: Preset, common: Mapping[str, str]) -> str:
        """Return why; ``common`` are the reasons for what presets never take. "" for none."""
        own = (why for name, why in preset.differs.items() if fnmatchcase(self.name, name))
        return next(own, "") or ("" if self.preset else common.get(self.name, ""))


def preset_settings(preset: Preset) -> dict[str, str]:
    """Return flag or variable → value, "" for a bare flag: all that a preset sets."""
    given = {name: value for name, value in preset.flags.items() if value is not False}
    return {
        "--gpu-memory-utilization": f"{preset.gpu_memory_utilization:.2f}",
        "--max-model-len": str(preset.max_model_len),
        **{name: "" if value is True else str(value) for name, value in given.items()},
        **preset.variables,
    }


def recipe_releases() -> tuple[str, ...]:
    """Return the releases with which a recipe changed."""
    return tuple(dict.fromkeys(row.first for row in read_table(MODELS).rows))


def recipe_of(preset: Preset, release: str = "") -> ModelRecipe | None:
    """Return upstream's recipe of a preset's model; without an owner, of any one's checkpoint."""
    model = preset.id.lower()
    recipes = model_recipes(release)
    if "/" in model:
        return recipes.get(model)
    return next((recipe for name, recipe in recipes.items() if name.endswith(f"/{model}")), None)


def differences(preset: Preset, recipe: ModelRecipe) -> Iterator[Difference]:
    """Yield what is not the same; a recipe that is for no GB10 has only ``min_vllm``."""
    if recipe.min_vllm and preset.min_vllm != recipe.min_vllm:
        yield Difference(name="min_vllm", preset=preset.min_vllm, recipe=recipe.min_vllm)
    if not recipe.settings:
        return
    ours, theirs = preset_settings(preset), recipe.settings
    for name in dict.fromkeys((*ours, *theirs)):
        here, there = ours.get(name), theirs.get(name)
        if there is None and name in _ALWAYS:
            continue
        if here is None or there is None or _plain(here.lower()) != _plain(there.lower()):
            yield Difference(name=name, preset=here, recipe=there)


def undecided(release: str) -> Iterator[Decision]:
    """Yield what presets do otherwise than a release's recipes without a reason, or no more."""
    for preset in load_presets():
        yield from _of_preset(preset, release)


def without_preset(release: str, before: str) -> Iterator[Decision]:
    """Yield the models for a GB10 that are new in a release, and have no preset."""
    known = model_recipes(before)
    for name, recipe in model_recipes(release).items():
        if recipe.settings and not (name in known and known[name].settings) and not find(name):
            yield Decision(file=_PLACE, says=f"{recipe.id} has a recipe for a GB10 in {release}")


def _of_preset(preset: Preset, release: str) -> Iterator[Decision]:
    recipe = recipe_of(preset, release)
    if recipe is None:
        return
    found = list(differences(preset, recipe))
    common = load_flag_rules().recipe
    for each in found:
        if not each.reason(preset, common):
            yield Decision(
                file=_PLACE,
                says=f"{preset.id}: {each.name} is {each.recipe or 'not set'!r} in the recipe of "
                f"{release}, and {each.preset or 'not set'!r} in the preset: take it, or say why "
                "not in `differs`",
            )
    for name in preset.differs:
        if not any(fnmatchcase(each.name, name) for each in found):
            yield Decision(file=_PLACE, says=f"{preset.id}: `differs` names {name}, which does not")
