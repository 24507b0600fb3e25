"""Write what `serve-args` gives as a recipe of vLLM's: ``recipes/models/OWNER/NAME.yaml``."""

from __future__ import annotations

import math
from datetime import date
from typing import Any

import yaml

from patchkit.runtime.rules.presets import DRAFTING
from patchkit.runtime.serve.args import ServeCommand
from patchkit.runtime.serve.recipe_file import GB10, OF_THE_PLACE
from patchkit.units import GIB_PER_GB

_OF_WEIGHTS = 1.2  # upstream's own rule for vram_minimum_gb
_BY_HAND = ("parameter_count", "active_parameters", "context_length")


def recipe_yaml(served: ServeCommand) -> tuple[str, list[str]]:
    """Return the recipe, and the keys that upstream asks for and patchkit does not know."""
    request, preset = served.request, served.request.node.preset
    owner, _, name = request.model.rpartition("/")
    ours = [it for it in served.flags if not OF_THE_PLACE.fullmatch(it.flag)]
    drafting = [word for it in ours if it.flag == DRAFTING for word in it.words]
    model: dict[str, Any] = {
        "model_id": request.model,
        "min_vllm_version": (preset and preset.min_vllm) or request.node.vllm,
        "base_args": [],
        "base_env": {},
    }
    variant: dict[str, Any] = {
        "description": f"{name} on a DGX Spark",
        "supported_hardware": [GB10],
        "hardware_overrides": {
            GB10: {
                "extra_args": [word for it in ours if it.flag != DRAFTING for word in it.words],
                "extra_env": dict(preset.variables) if preset else {},
            }
        },
    }
    if preset and preset.quantization:
        variant["precision"] = preset.quantization
        model["architecture"] = "moe" if preset.moe else "dense"
    if request.weights_gib:
        variant["vram_minimum_gb"] = math.ceil(request.weights_gib / GIB_PER_GB * _OF_WEIGHTS)
    features = {"spec_decoding": {"description": "Drafting", "args": drafting}} if drafting else {}
    recipe = {
        "meta": {
            "title": name,
            "slug": name.lower(),
            "provider": owner,
            "description": f"{name} on a DGX Spark",
            "date_added": date.today(),
            "date_updated": date.today(),
            "tasks": ["text"],
            "hardware": {},  # only what somebody has run counts as verified
        },
        "model": model,
        "features": features,
        "opt_in_features": [],
        "variants": {"default": variant},
        "compatible_strategies": ["multi_node_tp" if request.node.nodes > 1 else "single_node_tp"],
        "hardware_overrides": {},
        "strategy_overrides": {},
        "guide": f"Written by patchkit for vLLM {request.node.vllm}, and not run by it.",
    }
    missing = [f"model.{key}" for key in ("architecture", *_BY_HAND) if key not in model]
    missing += [
        f"variants.default.{k}" for k in ("precision", "vram_minimum_gb") if k not in variant
    ]
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=100), missing
