"""Say what a node is to serve, and check that this makes sense."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from patchkit.errors import HostError, UsageError
from patchkit.quoting import quoted
from patchkit.runtime.host.host import Host
from patchkit.runtime.host.target import target_of
from patchkit.runtime.node.decision import Node
from patchkit.runtime.rules.flag_rules import MemoryBudget
from patchkit.runtime.rules.presets import Preset, find, named_preset
from patchkit.runtime.rules.rule import BY_DEFAULT, RuleChoice

_MOST_NODES = 8  # for more than that the advice is another checkpoint, not more Sparks
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest:
    """A model and the node that serves it, or its part of it.

    ``rank`` is the node's number, None for the only one that it can be; ``weights_gib`` the size of
    a local checkpoint, ``memory_gib`` the host's memory, None where unknown; ``choice`` is of
    rules about flags.
    """

    model: str
    node: Node
    rank: int | None = None
    host: str = ""
    port: int = 8000
    weights_gib: float | None = None
    memory_gib: float | None = None
    choice: RuleChoice = BY_DEFAULT

    @property
    def number(self) -> int:
        """Return the rank; where it is not given, 0 for the head and 1 for a worker."""
        return int(self.node.role == "worker") if self.rank is None else self.rank


def preset_of(model: str, named: str | None) -> Preset | None:
    """Return the preset that ``named`` names, ``none`` for none, None for that of the model.

    Raises UsageError if there is none of that name.
    """
    if named is None:
        return find(model)
    return None if named == "none" else named_preset(named)


def full_name(model: str, preset: Preset | None) -> str:
    """Return a preset's id for its last part, unless there is a folder of that name."""
    named = preset is not None and model.lower() == preset.name.lower()
    return preset.id if preset and named and not Path(model).is_dir() else model


def weights_gib(folder: Path) -> float | None:
    """Return the size of a checkpoint in a folder, in GiB; None if there is none."""
    if not folder.is_dir():
        return None
    return sum(each.stat().st_size for each in folder.glob("*.safetensors")) / _GIB or None


def memory_gib(host: Host) -> float | None:
    """Return a host's memory in GiB; None for one that serves nothing, and only writes commands."""
    known = host.memory is not None and target_of(host) != "other"
    return host.memory.total / 2**20 if host.memory and known else None  # from KiB


def check(request: ServeRequest) -> None:
    """Raise UsageError for a request that makes no sense."""
    model, node = request.model, request.node
    # `vllm serve` would take a dash for an option.
    if not model or model.startswith("-") or not model.isprintable():
        raise UsageError(
            f"{model!r} is not a model", hint="write OWNER/NAME as at Hugging Face, or a folder"
        )
    if node.role == "worker" and node.executor.name == "ray":
        raise UsageError(
            "a worker under Ray serves nothing",
            why="the head's `vllm serve` starts what runs on it",
            hint="on the worker, with its env file loaded: "
            + quoted("ray", "start", f"--address={node.head or 'HEAD'}:6379"),
        )
    if request.rank is None and node.role == "worker" and node.nodes > 2:
        raise UsageError(
            f"missing --node-rank: there are {node.nodes - 1} workers",
            hint="number them from 1: --node-rank 1",
        )
    if (request.number == 0) == (node.role == "worker") or not 0 <= request.number < node.nodes:
        raise UsageError(
            f"rank {request.number} of {node.nodes} nodes cannot be a {node.role}'s",
            hint="the head is 0, each worker has a number of its own: --node-rank 1 …",
        )
    preset = node.preset
    if preset and "/" not in preset.id and model.lower() == preset.id.lower():
        raise UsageError(
            f"ambiguous preset {preset.id!r}: give OWNER/NAME",
            why="checkpoints of several owners have this name",
            hint=f"write OWNER/{preset.id}, or the folder that it lies in",
        )


def check_size(request: ServeRequest, share: float, memory: MemoryBudget) -> None:
    """Raise HostError if a node's part of the weights does not fit ``share`` of its memory."""
    preset, nodes = request.node.preset, request.node.nodes
    weights = request.weights_gib or (preset.weights_gib if preset else None)
    if weights is None:
        return
    total = request.memory_gib or memory.total_gib
    # Weights are not all: activations and a least KV cache come out of the same share.
    room = total * share - memory.margin_gib
    if weights <= room * nodes:
        return
    # No number of nodes helps where one has no room at all.
    enough = math.ceil(weights / room) if room > 0 else _MOST_NODES + 1
    ways = [f"{enough} nodes: --role head --nodes {enough}"] if enough <= _MOST_NODES else []
    ways.append((preset.instead if preset else "") or "a checkpoint in fewer bits")
    raise HostError(
        f"{request.model} does not fit: {weights / nodes:.0f} GiB of weights per node, and there "
        f"is room for {max(room, 0):.0f}",
        why=f"{share:.2f} of {total:.1f} GiB, less {memory.margin_gib:.0f} for activations and the "
        "least KV cache; the CPU needs the rest of the memory",
        hint="take " + "; or ".join(ways),
    )
