"""What a user should know about a request that is fine."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address

from patchkit.quoting import quoted
from patchkit.runtime.rules.presets import Preset
from patchkit.runtime.serve.request import ServeRequest


def notes(request: ServeRequest) -> Iterator[str]:
    preset = request.preset
    if preset:
        yield from _about(preset, request)
    elif request.weights_gib is None:
        yield (
            f"{request.model} is none of the presets: these flags fit any model, "
            "and whether it fits was not checked"
        )
    if _open(request.host):
        yield (
            f"everybody who reaches {request.host} can use the model: vLLM asks nobody for a key "
            "unless VLLM_API_KEY or --api-key is set"
        )


def _about(preset: Preset, request: ServeRequest) -> Iterator[str]:
    if preset.build:
        yield f"served with {preset.build}; no release is known to do"
    if preset.variables:
        pairs = " ".join(f"{name}={value}" for name, value in preset.variables.items())
        yield (
            f"the environment must hold {pairs}: "
            f"`{quoted('patchkit', 'env', '--model', preset.id)}` writes it"
        )
    if preset.needs_token:
        yield f"{preset.id} needs its licence accepted at Hugging Face, and HF_TOKEN"
    if request.nodes < preset.nodes:
        yield f"it fits one Spark, and is meant for {preset.nodes}"
    if preset.evidence == "single report":
        yield f"the preset rests on one report ({preset.source})"
    if preset.note:
        yield preset.note


def _open(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return address.is_unspecified or address.is_global
