"""Read how upstream serves models on a GB10: ``recipes/env/vllm_recipes.tsv``.

vLLM ships a recipe per model from 0.33.0 on. A row of the table is ``MODEL`` with the oldest vLLM
that upstream names for it, ``MODEL vram_minimum_gb``, or ``MODEL --flag`` and ``MODEL VARIABLE``
with their values on a GB10.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache

from patchkit.paths import RECIPES
from patchkit.runtime.rules.lifetimes import read_table
from patchkit.runtime.rules.presets import Preset
from patchkit.units import GIB_PER_GB

PLACE = RECIPES / "env" / "vllm_recipes.tsv"
VRAM = "vram_minimum_gb"
# What recipes ask for, in 10^9 bytes, is 1.0 to 1.5 times the weights of checkpoints whose size is
# known: with the largest factor nothing that fits is refused.
_ALLOWANCE = 1.5
# Every preset states them; a recipe without them leaves them to vLLM.
_ALWAYS = ("--gpu-memory-utilization", "--max-model-len")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecipe:
    """One checkpoint; ``settings`` is flag or variable → value on a GB10, empty if it has none.

    ``weights_gib`` is what its weights have at least, by the memory that upstream asks for, None
    where it names none.
    """

    id: str
    min_vllm: str
    weights_gib: float | None = None
    settings: Mapping[str, str] = field(default_factory=dict)


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


@cache
def model_recipes(release: str = "") -> Mapping[str, ModelRecipe]:
    """Return the recipes of a release by id in small letters; of the newest one for ``""``."""
    rows: dict[str, dict[str, str]] = {}
    table = read_table(PLACE)
    for name, value in table.at(release or table.newest).items():
        model, _, setting = name.partition(" ")
        rows.setdefault(model, {})[setting] = value
    return {
        model.lower(): ModelRecipe(
            id=model,
            min_vllm=found.pop(""),
            weights_gib=float(found.pop(VRAM)) / _ALLOWANCE * GIB_PER_GB if VRAM in found else None,
            settings=found,
        )
        for model, found in rows.items()
    }


def recipe_releases() -> tuple[str, ...]:
    """Return the releases with which a recipe changed."""
    return tuple(dict.fromkeys(row.first for row in read_table(PLACE).rows))


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
    ours, theirs = preset.settings, recipe.settings
    for name in dict.fromkeys((*ours, *theirs)):
        here, there = ours.get(name), theirs.get(name)
        if there is None and name in _ALWAYS:
            continue
        if here is None or there is None or _parsed_value(here) != _parsed_value(there):
            yield Difference(name=name, preset=here, recipe=there)


def _parsed_value(value: str) -> object:
    """Return what a value means: 0.5 is 0.50, and capitals and spaces in JSON are no matter."""
    try:
        return json.loads(value)
    except ValueError:
        return value.lower()
