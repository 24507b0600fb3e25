"""Read how models are served on Sparks: presets, and upstream's own recipes.

``recipes/env/presets.toml``: its head says how. ``vllm_recipes.tsv``: vLLM ships a recipe per model
from 0.33.0 on. A row is ``MODEL`` with the oldest vLLM that upstream names for it, ``MODEL
vram_minimum_gb``, or ``MODEL --flag`` and ``MODEL VARIABLE`` with their values on a GB10.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated

from patchkit.errors import UsageError
from patchkit.finding import Confidence, Established
from patchkit.records import RECIPES, one_of, read_toml
from patchkit.runtime.rules.releases import read_table
from patchkit.runtime.rules.rule import CHOICES, FlagName
from patchkit.runtime.rules.spelling import is_slip
from patchkit.units import GIB_PER_GB

_SHORTEST = 3  # characters that stand for a name
_MOST = 3  # names that are suggested
PLACE = RECIPES / "env" / "presets.toml"
MODELS = RECIPES / "env" / "vllm_recipes.tsv"
VRAM = "vram_minimum_gb"
# What recipes ask for, in 10^9 bytes, is 1.0 to 1.5 times the weights of checkpoints whose size is
# known: with the largest factor nothing that fits is refused.
_ALLOWANCE = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One model; a flag that is False is never set, ``differs`` is why it is not as upstream's."""

    id: str
    quantization: Annotated[str, one_of(*CHOICES["quantization"])]
    moe: bool
    single: bool
    nodes: int
    gpu_memory_utilization: float
    max_model_len: int
    min_vllm: str
    source: str
    evidence: Established
    confidence: Confidence
    weights_gib: float | None = None
    reads_gb: float | None = None
    flags: Mapping[FlagName, str | bool] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    measured_with: str = ""
    build: str = ""
    needs_token: bool = False
    instead: str = ""
    note: str = ""
    differs: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the last part of the id; it names the preset by itself, since no two share it."""
        return self.id.rpartition("/")[2]


@cache
def load_presets(place: Path = PLACE) -> tuple[Preset, ...]:
    """Return the presets. Raises UsageError for what means nothing, with file and line."""
    return read_toml(tuple[Preset, ...], place, key="preset")


def find(model: str) -> Preset | None:
    """Return the preset of OWNER/NAME, NAME, or a folder of that name; capitals do not matter."""
    asked = model.rstrip("/").lower()
    owner, _, name = asked.rpartition("/")
    for preset in load_presets():
        theirs = preset.id.lower()
        # A folder may be a copy, another owner's checkpoint is not.
        is_folder = "/" in owner or owner in ("", ".", "..", "~")
        may_be = name == preset.name.lower() and (is_folder or "/" not in theirs)
        if asked == theirs or may_be:
            return preset
    return None


def named_preset(name: str) -> Preset:
    """Return the preset of a name. Raises UsageError if there is none."""
    if preset := find(name):
        return preset
    meant = presets_meant(name)
    raise UsageError(
        f"no preset is called {name}",
        hint=f"did you mean {' or '.join(meant)}?"
        if meant
        else "`patchkit serve-args --list` shows them; for another model give --quantization",
    )


def presets_meant(name: str) -> list[str]:
    """Return what a name may stand for: presets a slip away, or those that begin like it."""
    names = [preset.id if "/" in name else preset.name for preset in load_presets()]
    if slips := [known for known in names if is_slip(name, known)]:
        return slips
    # OWNER/NAME may be another checkpoint of the same model; a bare name is at no owner's.
    begun = [known for known in names if known.lower().startswith(name.lower())]
    return [] if "/" in name or len(name) < _SHORTEST else begun[:_MOST]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecipe:
    """One checkpoint: settings on a GB10 by flag or variable, and the least size of its weights."""

    id: str
    min_vllm: str
    weights_gib: float | None = None
    settings: Mapping[str, str] = field(default_factory=dict)


@cache
def model_recipes(release: str = "") -> Mapping[str, ModelRecipe]:
    """Return the recipes of a release by id in small letters; of the newest one for ``""``."""
    rows: dict[str, dict[str, str]] = {}
    table = read_table(MODELS)
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
