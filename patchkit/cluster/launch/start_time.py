"""Decide how long a start may take: systemd and vLLM get it from here."""

from __future__ import annotations

_BEFORE = 900
"""Seconds for what does not depend on the model's size: kernels that are compiled at the first
start, CUDA graphs, the rendezvous of the ranks."""

_PER_GIB = 12
"""Seconds for a GiB of weights of a node: mapped files on unified memory were reported to load at
0.1 GiB/s and less; read ahead they load at 1 GiB/s and more."""

_UNKNOWN_GIB = 120  # what a node's memory holds at most


def start_seconds(weights_gib: float | None, nodes: int) -> int:
    """Return the seconds after which a start that has not answered is given up."""
    return _BEFORE + round(_PER_GIB * (weights_gib or _UNKNOWN_GIB * nodes) / nodes)
