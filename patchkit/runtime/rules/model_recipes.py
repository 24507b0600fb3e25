"""Read how upstream serves models on a GB10: ``recipes/env/vllm_recipes.tsv``.

vLLM ships a recipe per model from 0.33.0 on. A row of the table is ``MODEL`` with the oldest vLLM
that upstream names for it, ``MODEL vram_minimum_gb``, or ``MODEL --flag`` and ``MODEL VARIABLE``
with their values on a GB10.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from patchkit.paths import RECIPES
from patchkit.runtime.rules.lifetimes import read_table
from patchkit.units import GIB_PER_GB

PLACE = RECIPES / "env" / "vllm_recipes.tsv"
VRAM = "vram_minimum_gb"
# What recipes ask for, in 10^9 bytes, is 1.0 to 1.5 times the weights of checkpoints whose size is
# known: with the largest factor nothing that fits is refused.
_ALLOWANCE = 1.5


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
