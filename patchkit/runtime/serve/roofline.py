"""Estimate the most tokens per second for one stream.

The estimate is the bandwidth of the memory, divided by the bytes that are read for a token.
"""

from __future__ import annotations

from collections.abc import Iterator

from patchkit.runtime.rules.rule import Values
from patchkit.runtime.serve.dense_layers import find_dense_layers
from patchkit.runtime.serve.model import SPARK
from patchkit.runtime.serve.request import ServeRequest
from patchkit.target import DEFAULT_TARGET, targets


def speed_notes(request: ServeRequest, flags: Values) -> Iterator[str]:
    """Yield a note with the most tokens per second for one stream, if the figures are known."""
    preset = request.node.preset
    checkpoint = request.checkpoint
    prefix = ""
    read_gb = 0.0
    if checkpoint and checkpoint.reads:
        read_bytes = checkpoint.reads
        dense = find_dense_layers(checkpoint, request.node.nodes)
        if dense and flags.get("--quantization-config") == dense.setting:
            read_bytes -= dense.saved
        read_gb = read_bytes / 1e9
    elif preset and preset.reads_gb:
        prefix = "at least "
        read_gb = preset.reads_gb

    is_spark = request.memory.whose == SPARK
    device = targets().get(DEFAULT_TARGET if is_spark else request.node.target)
    if not (read_gb and device and device.bandwidth and request.memory.shared):
        return

    # Only tensor parallelism adds bandwidth: the nodes of a pipeline read one after the other.
    nodes = int(flags.get("--tensor-parallel-size", 1))
    speed = device.bandwidth * nodes
    place = f"{nodes} nodes" if nodes > 1 else "one node"
    alone = " without drafting" if "--speculative-config" in flags else ""
    yield (
        f"at most {speed / read_gb:.3g} tok/s for one stream{alone} on {place}: {prefix}"
        f"{read_gb:.3g} GB of weights are read for each token, at {speed} GB/s; its context's "
        "cache adds to that"
    )
