"""Read how models are served on Sparks: upstream's own recipes, and what presets do otherwise.

``vllm_recipes.tsv``: vLLM ships a recipe per model from 0.33.0 on. A row is ``MODEL`` with the
oldest vLLM that upstream names for it, ``MODEL vram_minimum_gb`` and ``MODEL drafter``; of what is
meant for a GB10 also ``MODEL file``, ``architecture`` and ``precision``, and ``MODEL --flag`` and
``MODEL VARIABLE`` with their values there. ``presets.toml``: its head says how.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated

from patchkit.errors import UsageError
from patchkit.finding import Confidence, Established
from patchkit.records import RECIPES, one_of, read_toml, record
from patchkit.runtime.rules.flags import load_flag_rules
from patchkit.runtime.rules.releases import read_table
from patchkit.runtime.rules.rule import CHOICES, FlagName
from patchkit.runtime.rules.spelling import is_slip
from patchkit.units import GIB_PER_GB

_SHORTEST = 3  # characters that stand for a name
_MOST = 3  # names that are suggested
PLACE = RECIPES / "env" / "presets.toml"
MODELS = RECIPES / "env" / "vllm_recipes.tsv"
VRAM = "vram_minimum_gb"
ABOUT = ("file", "architecture", "precision")
DRAFTING = "--speculative-config"
# What recipes ask for, in 10^9 bytes, is 1.0 to 1.5 times the weights of checkpoints whose size is
# known: with the largest factor nothing that fits is refused.
_ALLOWANCE = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One model; a flag that is False is never set, ``differs`` is why it is not as upstream's.

    ``drafter`` is what it can draft with, where a flag does not set it.
    """

    id: str
    quantization: Annotated[str, one_of(*CHOICES["quantization"], "")] = ""
    family: Annotated[str, one_of(*CHOICES["family"], "")] = ""
    moe: bool = False
    single: bool = True
    nodes: int = 1
    min_vllm: str = ""
    source: str
    evidence: Established
    confidence: Confidence
    weights_gib: float | None = None
    reads_gb: float | None = None
    flags: Mapping[FlagName, str | bool] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    drafter: str = ""
    measured_with: str = ""
    build: str = ""
    needs_token: bool = False
    instead: str = ""
    note: str = ""
    differs: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the last part of the id, which names the preset where no other has it."""
        return self.id.rpartition("/")[2]

    @property
    def settings(self) -> dict[str, str]:
        """Return flag or variable → value, "" for a bare flag: all that it sets."""
        given = {
            name: value for name, value in self.flags.items() if value is not False
        }
        return {n: "" if v is True else str(v) for n, v in given.items()} | {
            **self.variables
        }

    def reason(self, name: str, value: str | None) -> str:
        """Return why a setting is not as in upstream's recipe, "" for none."""
        words, reasons = (
            (name, f"{name} {value}"),
            {**self.differs, **load_flag_rules().recipe},
        )
        found = (
            why
            for what, why in reasons.items()
            if any(fnmatchcase(it, what) for it in words)
        )
        return next(found, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecipe:
    """One checkpoint: settings on a GB10 by flag or variable, and the least size of its weights.

    ``about`` is what else upstream says of it, by the names in ``ABOUT``.
    """

    id: str
    min_vllm: str
    weights_gib: float | None = None
    drafter: str = ""
    about: Mapping[str, str] = field(default_factory=dict)
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
            weights_gib=float(found.pop(VRAM)) / _ALLOWANCE * GIB_PER_GB
            if VRAM in found
            else None,
            drafter=found.pop("drafter", ""),
            about={name: found.pop(name) for name in ABOUT if name in found},
            settings=found,
        )
        for model, found in rows.items()
    }


def recipe_of(model: str, release: str = "") -> ModelRecipe | None:
    """Return upstream's recipe of a model; of a name without an owner, of any one's checkpoint."""
    asked, recipes = model.lower(), model_recipes(release)
    if "/" in asked:
        return recipes.get(asked)
    return next(
        (recipe for name, recipe in recipes.items() if name.endswith(f"/{asked}")), None
    )


def own_presets(place: Path = PLACE) -> tuple[Preset, ...]:
    """Return what the file says. Raises UsageError for what means nothing, with file and line."""
    return read_toml(tuple[Preset, ...], place, key="preset")


@cache
def load_presets() -> tuple[Preset, ...]:
    """Return the presets: those of the file over upstream's recipes, then recipes alone."""
    found = {each.id.lower(): each for each in own_presets()}
    for name, recipe in model_recipes().items():
        if recipe.settings and name not in found:
            source = f"vLLM {read_table(MODELS).newest} recipes/models/{recipe.about['file']}"
            grounds = {
                "source": source,
                "evidence": "documented",
                "confidence": "medium",
            }
            found[name] = record(Preset, {"id": recipe.id, **grounds})
    for name, preset in found.items():
        if (upstream := recipe_of(preset.id)) is None:
            continue
        # What upstream's recipe says beside the preset, and the preset has no reason against.
        taken = {n: v for n, v in upstream.settings.items() if not preset.reason(n, v)}
        flags = {n: value or True for n, value in taken.items() if n[0] == "-"}
        precision = upstream.about.get("precision", "")
        found[name] = replace(
            preset,
            quantization=preset.quantization
            or precision * (precision in CHOICES["quantization"]),
            moe=preset.moe or upstream.about.get("architecture") == "moe",
            min_vllm=preset.min_vllm or upstream.min_vllm,
            flags={**flags, **preset.flags},
            variables={n: v for n, v in taken.items() if n not in flags}
            | {**preset.variables},
            drafter=preset.drafter
            or upstream.drafter
            or upstream.settings.get(DRAFTING, ""),
        )
    return tuple(found.values())


def same_value(one: str | None, other: str | None) -> bool:
    """Return whether two values of a flag mean the same, as numbers and JSON do."""
    if one is None or other is None:
        return one is other
    try:
        return bool(json.loads(one.lower()) == json.loads(other.lower()))
    except ValueError:
        return one.lower() == other.lower()


def find(model: str) -> Preset | None:
    """Return the preset of OWNER/NAME, NAME, or a folder of that name; capitals do not matter.

    None where there is none, and for a name that several have.
    """
    asked = model.rstrip("/").lower()
    owner, _, name = asked.rpartition("/")
    # A folder may be a copy, another owner's checkpoint is not.
    is_folder = "/" in owner or owner in ("", ".", "..", "~")
    found = []
    for preset in load_presets():
        if asked == preset.id.lower():
            return preset
        if name == preset.name.lower() and (is_folder or "/" not in preset.id):
            found.append(preset)
    return found[0] if len(found) == 1 else None


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
    if several := [
        each.id for each in load_presets() if each.name.lower() == name.lower()
    ]:
        return several
    names = [preset.id if "/" in name else preset.name for preset in load_presets()]
    if slips := [known for known in names if is_slip(name, known)]:
        return slips
    # OWNER/NAME may be another checkpoint of the same model; a bare name is at no owner's.
    begun = [known for known in names if known.lower().startswith(name.lower())]
    return [] if "/" in name or len(name) < _SHORTEST else begun[:_MOST]
