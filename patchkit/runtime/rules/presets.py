"""Models that people serve on DGX Sparks: ``recipes/env/presets.toml``; its head says how."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from patchkit.errors import UsageError
from patchkit.paths import RECIPES
from patchkit.runtime.rules.releases import within
from patchkit.runtime.rules.variable_rules import CONFIDENCE, EVIDENCE, QUANTIZATIONS

PLACE = RECIPES / "env" / "presets.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One model; ``flags`` holds text for a value, True for a bare flag, False for never."""

    id: str
    quantization: str
    moe: bool
    single: bool
    nodes: int
    gpu_memory_utilization: float
    max_model_len: int
    min_vllm: str
    source: str
    evidence: str
    confidence: str
    weights_gib: float | None = None
    flags: Mapping[str, str | bool] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    build: str = ""
    needs_token: bool = False
    instead: str = ""
    note: str = ""

    @property
    def name(self) -> str:
        """The last part of the id, which names it where it is unique."""
        return self.id.rpartition("/")[2]


@cache
def load_presets(place: Path = PLACE) -> tuple[Preset, ...]:
    """Raises UsageError for a field or a value that means nothing, naming the preset."""
    table = tomllib.loads(place.read_text(encoding="utf-8"))
    if unknown := set(table) - {"preset"}:
        raise UsageError(f"{place}: unknown {', '.join(sorted(unknown))}")
    presets = tuple(_read(entry, place) for entry in table["preset"])
    names = [preset.name.lower() for preset in presets]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(f"{place}: there twice: {', '.join(sorted(twice))}")
    return presets


def _read(entry: dict[str, Any], place: Path) -> Preset:
    where = f"{place}: {entry.get('id', entry)}"
    if unknown := set(entry) - {each.name for each in fields(Preset)}:
        raise UsageError(f"{where}: unknown {', '.join(sorted(unknown))}")
    try:
        preset = Preset(**entry)
    except TypeError as error:
        raise UsageError(f"{where}: {error}") from None
    if problem := _problem(preset):
        raise UsageError(f"{where}: {problem}")
    within(preset.min_vllm, "")
    return preset


def _problem(preset: Preset) -> str:
    choices = {
        "quantization": (preset.quantization, QUANTIZATIONS),
        "evidence": (preset.evidence, EVIDENCE),
        "confidence": (preset.confidence, CONFIDENCE),
    }
    for key, (value, allowed) in choices.items():
        if value not in allowed:
            return f"{key} is {value!r}, not one of {', '.join(allowed)}"
    if not 0 < preset.gpu_memory_utilization < 1:
        return "gpu_memory_utilization is a share below 1"
    if not all(name.startswith("--") and "_" not in name for name in preset.flags):
        return "flags are written as --a-flag"
    return ""


def find(model: str) -> Preset | None:
    """The preset of OWNER/NAME, NAME, or a folder of that name; capitals do not matter."""
    wanted = model.rstrip("/").lower()
    owner, _, name = wanted.rpartition("/")
    for preset in load_presets():
        theirs = preset.id.lower()
        if wanted == theirs or (name == preset.name.lower() and _same_owner(owner, theirs)):
            return preset
    return None


def _same_owner(owner: str, theirs: str) -> bool:
    """Another owner's checkpoint is another one; a folder may well be a copy."""
    return not owner or "/" not in theirs or "/" in owner or owner in (".", "..", "~")
