"""Say the most tokens per second for one stream: the memory's bandwidth over what a token reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from patchkit.runtime.serve.dense import dense_layers
from patchkit.runtime.serve.model import SPARK
from patchkit.runtime.serve.request import ServeRequest
from patchkit.target import DEFAULT_TARGET, targets


def fastest_stream(request: ServeRequest, flags: Mapping[str, str]) -> Iterator[str]:
    """Yield the most tokens per second for one stream; nothing where no figure for it is known."""
    preset, memory, checkpoint = request.node.preset, request.memory, request.checkpoint
    reads, least = preset and preset.reads_gb, "at least "
    if checkpoint and checkpoint.reads:
        dense = dense_layers(checkpoint, request.node.nodes)
        taken = dense and flags.get("--quantization-config") == dense.setting
        reads, least = (
            (checkpoint.reads - (dense.saved if dense and taken else 0)) / 1e9,
            "",
        )
    device = targets().get(
        DEFAULT_TARGET if memory.whose == SPARK else request.node.target
    )
    if reads and memory.shared and device and device.bandwidth:
        parts = int(
            flags.get("--tensor-parallel-size", 1)
        )  # a pipeline's nodes read in turns
        alone = " without drafting" if "--speculative-config" in flags else ""
        nodes, speed = (
            f"{parts} nodes" if parts > 1 else "one node",
            device.bandwidth * parts,
        )
        yield (
            f"at most {speed / reads:.3g} tok/s for one stream{alone} on {nodes}: {least}"
            f"{reads:.3g} GB of weights are read for each token, at {speed} GB/s; its context's "
            "cache adds to that"
        )
