"""Say what a user should know about a request that is valid."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address

from patchkit.evidence import SINGLE_REPORT
from patchkit.quoting import quoted
from patchkit.runtime.rules.presets import Preset
from patchkit.runtime.serve.request import ServeRequest


def notes(request: ServeRequest) -> Iterator[str]:
    """Return notes on the preset, the size and who can reach the server."""
    preset = request.node.preset
    if preset:
        yield from _of_preset(preset, request.node.nodes)
    elif request.weights_gib is None:
        yield (
            f"{request.model} has no preset: these flags fit any model, "
            "and whether it fits was not checked"
        )
    if _is_open(request.host):
        yield (
            f"everybody who reaches {request.host} can use the model: vLLM asks nobody for a key "
            "unless VLLM_API_KEY or --api-key is set"
        )


def _of_preset(preset: Preset, nodes: int) -> Iterator[str]:
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
    if nodes < preset.nodes:
        yield f"it fits one Spark, and is meant for {preset.nodes}"
    if preset.evidence == SINGLE_REPORT:
        yield f"the preset rests on one report ({preset.source})"
    if preset.note:
        yield preset.note


def _is_open(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return False
    # 0.0.0.0 and :: listen on every interface.
    return address.is_unspecified or address.is_global
