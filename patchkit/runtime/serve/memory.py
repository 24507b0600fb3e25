"""Find the memory that a model must fit into, and check that it does.

A Spark has one pool that CPU and GPU share, and NVML does not say how large it is; other GPUs have
memory of their own, which NVML does say. What is not known is not checked, and said.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from patchkit.errors import HostError
from patchkit.runtime.host.hardware import target_of
from patchkit.runtime.host.host import Host
from patchkit.runtime.node.decision import Node
from patchkit.runtime.rules.flag_rules import MemoryBudget
from patchkit.target import targets
from patchkit.units import KIB_PER_GIB, MIB_PER_GIB

_MOST_NODES = 8  # for more than that the advice is another checkpoint, not more Sparks
_SPARK = "gb10"


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The size of a model's weights in GiB; ``least`` where they may be more."""

    gib: float
    least: bool = False


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
    here = target_of(host)
    if node.elsewhere:
        return _pool_of_target(_SPARK, budget, f"{node.elsewhere} is not this host")
    if node.target != here:
        return _pool_of_target(node.target, budget, f"for {node.target}, which this host is not")
    if not host.gpus:
        return _pool_of_target(_SPARK, budget, "no GPU is found here")
    if here in targets() and targets()[here].unified:
        if host.memory is None:
            return _pool_of_target(here, budget, "/proc/meminfo cannot be read")
        return MemoryPool(gib=host.memory.total / KIB_PER_GIB, shared=True, whose="this host")
    gpu = host.gpus[0]
    if gpu.memory is None:
        return MemoryPool(
            gib=None,
            shared=False,
            whose=gpu.name,
            note="whether it fits was not checked: nvidia-smi does not say how much memory "
            f"{gpu.name} has",
        )
    own = gpu.memory / MIB_PER_GIB
    return MemoryPool(
        gib=own,
        shared=False,
        whose=gpu.name,
        note=f"sized for {gpu.name}, with {own:.1f} GiB of its own: vLLM's share of it, "
        "since that of presets and rules is for memory which CPU and GPU share",
    )


def _pool_of_target(target: str, budget: MemoryBudget, why: str) -> MemoryPool:
    """Return the memory of a device that is not at hand; that of a Spark is known."""
    if target != _SPARK:
        note = f"whether it fits was not checked: {why}, and {target}'s memory is not known here"
        return MemoryPool(gib=None, shared=True, whose=target, note=note)
    note = f"{why}: sized for a Spark, with {budget.total_gib} GiB that CPU and GPU share"
    return MemoryPool(gib=budget.total_gib, shared=True, whose="a Spark", note=note)


def check_size(
    model: str,
    weights: ModelWeights | None,
    node: Node,
    pool: MemoryPool,
    share: float,
    margin: float,
) -> None:
    """Raise HostError if a node's part of the weights does not fit ``share`` of its memory."""
    if weights is None or pool.gib is None:
        return
    # Weights are not all: activations and a least KV cache come out of the same share.
    room = pool.gib * share - margin
    if weights.gib <= room * node.nodes:
        return
    size = f"{'at least ' if weights.least else ''}{weights.gib / node.nodes:.0f}"
    rest = "; the CPU needs the rest of the memory" if pool.shared else ""
    raise HostError(
        f"{model} does not fit: {size} GiB of weights per node, and there is room for "
        f"{max(room, 0):.0f}",
        why=f"{share:.2f} of {pool.gib:.1f} GiB ({pool.whose}), less {margin:.0f} for activations "
        f"and the least KV cache{rest}",
        hint="take " + "; or ".join(_ways_out(weights.gib, node, pool, share, margin)),
    )


def _ways_out(
    weights: float, node: Node, pool: MemoryPool, share: float, margin: float
) -> list[str]:
    """Return what to do about a model that does not fit, best first."""
    instead = (node.preset.instead if node.preset else "") or "a checkpoint in fewer bits"
    if not pool.shared:
        enough = math.ceil((weights / node.nodes + margin) / share)
        return [instead, f"a GPU with {enough} GiB", "for a line that a Spark runs: --target gb10"]
    # No number of nodes helps where one has no room at all.
    room = (pool.gib or 0) * share - margin
    nodes = math.ceil(weights / room) if room > 0 else _MOST_NODES + 1
    more = [f"{nodes} nodes: --role head --nodes {nodes}"] if nodes <= _MOST_NODES else []
    return [*more, instead]
