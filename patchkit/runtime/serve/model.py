"""Find what the model of a command line is: a preset's, a folder, another one, or a slip."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from patchkit.errors import UsageError
from patchkit.runtime.rules.presets import Preset, find, model_recipes, named_preset, presets_meant
from patchkit.units import BYTES_PER_GIB


def preset_of(model: str, named: str | None, environment: Mapping[str, str]) -> Preset | None:
    """Return the preset that ``named`` names, ``none`` for none, None for that of the model.

    Raises UsageError if there is none of that name, or if the model's name is a slip of a preset's.
    """
    if named is not None:
        return None if named == "none" else named_preset(named)
    preset = find(model)
    there = Path(model).is_dir() or model.lower() in model_recipes()
    if preset or there or os.access(download(model, environment), os.R_OK):
        return preset
    if meant := presets_meant(model):
        raise UsageError(
            f"no model is known as {model}",
            why="it is neither a preset nor here, and like the name of one",
            hint=f"did you mean {' or '.join(meant)}? If there is such a model, add --preset none",
        )
    return preset


def download(model: str, environment: Mapping[str, str]) -> Path:
    """Return the folder into which huggingface_hub downloads a model, there or not."""
    home = environment.get("HF_HOME") or f"{environment.get('HOME', '')}/.cache/huggingface"
    cache = environment.get("HF_HUB_CACHE") or f"{home}/hub"
    return Path(cache, "models--" + model.replace("/", "--"))


def full_name(model: str, preset: Preset | None) -> str:
    """Return a preset's id for its last part, unless there is a folder of that name."""
    named = preset is not None and model.lower() == preset.name.lower()
    return preset.id if preset and named and not Path(model).is_dir() else model


def weights_gib(model: str, environment: Mapping[str, str]) -> float | None:
    """Return the size of a checkpoint in a folder or a download, in GiB; None if there is none.

    Of several downloads of one model the largest counts: an interrupted one is smaller.
    """
    folders = (Path(model), *download(model, environment).glob("snapshots/*"))
    sizes = (_weight_bytes(each) for each in folders if os.access(each, os.R_OK | os.X_OK))
    return max(sizes, default=0) / BYTES_PER_GIB or None


def _weight_bytes(folder: Path) -> int:
    # Links of a snapshot to blobs that are not there yet, or are somebody else's, have no size.
    readable = (each for each in folder.glob("*.safetensors") if os.access(each, os.R_OK))
    return sum(each.stat().st_size for each in readable)
