"""Find the memory that a model must fit into.

A Spark has one pool that CPU and GPU share, and NVML does not say how large it is; other GPUs have
memory of their own, which it does say. What is not known is not checked, and said.
"""

from __future__ import annotations

from dataclasses import dataclass

from patchkit.runtime.host.hardware import target_of
from patchkit.runtime.host.host import Host
from patchkit.runtime.node.decision import Node
from patchkit.runtime.rules.flags import MemoryBudget
from patchkit.target import targets
from patchkit.units import KIB_PER_GIB, MIB_PER_GIB

_SPARK = "gb10"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPool:
    """``gib`` is None where it is unknown; ``shared`` by CPU and GPU, else the GPU's own.

    ``whose`` names the device. ``note`` is what a user should know of the check, "" for nothing.
    """

    gib: float | None
    shared: bool
    whose: str
    note: str = ""


def memory_pool(host: Host, node: Node, budget: MemoryBudget) -> MemoryPool:
    """Return the memory of this host's GPU, or of the device that the command line is for."""
    here, device, why = target_of(host), node.target, ""
    unified = here in targets() and targets()[here].unified
    unknown = "whether it fits was not checked:"
    if device != here:
        why = f"for {device}, which this host is not"
    elif not host.gpus:
        device, why = _SPARK, "no GPU is found here"
    elif unified and host.memory is None:
        why = "/proc/meminfo cannot be read"
    if why and device == _SPARK:
        note = f"{why}: sized for a Spark, with {budget.total_gib} GiB that CPU and GPU share"
        return MemoryPool(gib=budget.total_gib, shared=True, whose="a Spark", note=note)
    if why:
        note = f"{unknown} {why}, and {device}'s memory is not known here"
        return MemoryPool(gib=None, shared=True, whose=device, note=note)
    if unified and host.memory:
        return MemoryPool(gib=host.memory.total / KIB_PER_GIB, shared=True, whose="this host")
    gpu = host.gpus[0]
    if gpu.memory is None:
        note = f"{unknown} nvidia-smi does not say how much memory {gpu.name} has"
        return MemoryPool(gib=None, shared=False, whose=gpu.name, note=note)
    own = gpu.memory / MIB_PER_GIB
    note = (
        f"sized for {gpu.name}, with {own:.1f} GiB of its own: vLLM's share of it, "
        "since that of presets and rules is for memory which CPU and GPU share"
    )
    return MemoryPool(gib=own, shared=False, whose=gpu.name, note=note)
