"""Describe the memory that a model must fit into.

A Spark has one memory that CPU and GPU share, and NVML does not tell its size. Other GPUs have
their own memory, and NVML tells its size. If a size is unknown, it is not checked, and a note says
so.
"""

from dataclasses import replace

from patchkit.frozen import frozen
from patchkit.runtime.host.host import Host
from patchkit.runtime.memory.budget import load_budget
from patchkit.runtime.node.decision import Node
from patchkit.target import DEFAULT_TARGET, is_unified, targets
from patchkit.units import KIB_PER_GIB, MIB_PER_GIB

_UNCHECKED = "whether it fits was not checked:"


@frozen
class MemoryPool:
    """The memory that a model must fit into; ``gib`` is None if its size is unknown.

    ``shared`` says that CPU and GPU share it; otherwise it is the GPU's alone. ``whose`` names the
    device. ``floor_gib`` is kept free: below it the guard ends the rank. ``note`` tells a user
    which size was used and why, "" for the host's own size. ``target`` is the device's profile.
    """

    gib: float | None
    shared: bool
    whose: str
    note: str = ""
    floor_gib: float = 0.0
    target: str = DEFAULT_TARGET


def memory_pool(host: Host, node: Node, floor_gib: float | None = None) -> MemoryPool:
    """Return the memory of the host, or an assumed one if the node is for another device.

    It is also assumed if the host does not tell the size of its memory or has no GPU. Without
    ``floor_gib``, what is kept free is the device's own.
    """
    device = targets().get(node.target)
    if floor_gib is None:
        floor_gib = device.memory_floor if device else 0.0
    pool = _find_pool(host, node)
    return replace(pool, floor_gib=floor_gib, target=node.target)


def _find_pool(host: Host, node: Node) -> MemoryPool:
    if node.target == DEFAULT_TARGET and not host.gpus:
        return _assumed_pool(node.target, "no GPU is found here")
    if node.target != host.target:
        return _assumed_pool(node.target, f"for {node.target}, which this host is not")
    if is_unified(host.target):
        if host.memory is None:
            return _assumed_pool(node.target, "/proc/meminfo cannot be read")
        return MemoryPool(
            gib=host.memory.total / KIB_PER_GIB, shared=True, whose="this host"
        )

    gpu = host.gpus[0]
    gib = None
    note = f"{_UNCHECKED} nvidia-smi does not say how much memory {gpu.name} has"
    if gpu.memory is not None:
        gib = gpu.memory / MIB_PER_GIB
        note = (
            f"sized for {gpu.name}, with {gib:.1f} GiB of its own: vLLM's share of it, "
            "since that of presets and rules is for memory which CPU and GPU share"
        )
    return MemoryPool(gib=gib, shared=False, whose=gpu.name, note=note)


def _assumed_pool(device: str, reason: str) -> MemoryPool:
    """Return the known size for a Spark, and an unknown size for another device."""
    if device != DEFAULT_TARGET:
        note = f"{_UNCHECKED} {reason}, and {device}'s memory is not known here"
        shared = is_unified(device)
        return MemoryPool(gib=None, shared=shared, whose=device, note=note)

    gib = load_budget().size.total_gib
    note = f"{reason}: sized for a Spark, with {gib} GiB that CPU and GPU share"
    return MemoryPool(gib=gib, shared=True, whose="a Spark", note=note)
