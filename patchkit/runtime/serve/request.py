"""What is to be served where, and whether that makes sense."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from patchkit.errors import HostError, UsageError
from patchkit.quoting import quoted
from patchkit.runtime.rules.flag_rules import FlagRule, FlagRules, MemoryBudget
from patchkit.runtime.rules.presets import Preset
from patchkit.runtime.rules.releases import within

_MOST_NODES = 8  # how far the advice goes to take more Sparks


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest:
    """What is served where. ``topology``, ``executor`` are decided; ``uni`` is a node alone.

    ``weights_gib`` is the size of a local checkpoint; ``memory_gib`` the host's memory, None where
    it is unknown. ``wanted`` and ``unwanted`` are ids of rules.
    """

    model: str
    vllm: str
    role: str = "single"
    topology: str = "single"
    executor: str = "uni"
    nodes: int = 1
    rank: int = 0
    head: str = ""
    host: str = ""
    port: int = 8000
    target: str = "gb10"
    quantization: str = ""
    preset: Preset | None = None
    weights_gib: float | None = None
    memory_gib: float | None = None
    wanted: frozenset[str] = frozenset()
    unwanted: frozenset[str] = frozenset()


def check(request: ServeRequest, rules: FlagRules) -> None:
    """Raises UsageError for a request that makes no sense."""
    if not request.model or request.model.startswith("-") or not request.model.isprintable():
        raise UsageError(
            f"{request.model!r} is no model",
            hint="write OWNER/NAME as at Hugging Face, or a folder",
        )
    ids = {rule.id for rule in rules.rules}
    if unknown := sorted((request.wanted | request.unwanted) - ids):
        raise UsageError(
            f"no rule is called {unknown[0]!r}", hint="`patchkit serve-args … --explain` lists them"
        )
    _check_nodes(request)
    if request.preset:
        _check_preset(request, request.preset)


def check_wanted(request: ServeRequest, active: Sequence[FlagRule]) -> None:
    """Raises UsageError for a rule that is asked for and does not apply."""
    if idle := sorted(request.wanted - {rule.id for rule in active}):
        raise UsageError(
            f"--with {idle[0]} would change nothing here",
            why="its condition does not hold for this release, model and place",
            hint="`--explain` lists the rules that can be turned on",
        )


def _check_nodes(request: ServeRequest) -> None:
    alone = request.role == "single"
    if alone != (request.nodes == 1):
        raise UsageError(
            f"--role {request.role} and {request.nodes} nodes contradict each other",
            hint="a node alone is --role single; else say how many with --nodes",
        )
    if request.role == "worker" and request.executor == "ray":
        raise UsageError(
            "a worker under Ray serves nothing",
            why="the head's `vllm serve` starts what runs on it",
            hint="on the worker, with its env file loaded: "
            + quoted("ray", "start", f"--address={request.head or 'HEAD'}:6379"),
        )
    if not alone and not request.head:
        raise UsageError(
            "which address has the head?", hint="--head-ip A, or the head's file: --from head.env"
        )
    if (request.rank == 0) == (request.role == "worker") or not 0 <= request.rank < request.nodes:
        raise UsageError(
            f"rank {request.rank} of {request.nodes} nodes cannot be a {request.role}'s",
            hint="the head is 0, each worker has a number of its own: --node-rank 1 …",
        )


def _check_preset(request: ServeRequest, preset: Preset) -> None:
    if request.quantization and request.quantization != preset.quantization:
        raise UsageError(
            f"{preset.id} is {preset.quantization}, not {request.quantization}",
            hint="leave --quantization out; another checkpoint of the model: --preset none",
        )
    if not within(request.vllm, f">={preset.min_vllm}"):
        raise UsageError(
            f"{preset.id} takes vLLM {preset.min_vllm} or newer, this is {request.vllm}",
            why=f"no older one is known to serve it ({preset.source})",
            hint="take a newer vLLM; or try with flags that fit any model: --preset none",
        )
    if "/" not in preset.id and request.model.lower() == preset.id.lower():
        raise UsageError(
            f"whose {preset.id}?",
            why="no owner's checkpoint is known to be meant",
            hint=f"write OWNER/{preset.id}, or the folder that it lies in",
        )


def check_size(request: ServeRequest, share: float, memory: MemoryBudget) -> None:
    """Raises HostError if a node's part of the weights does not fit ``share`` of its memory."""
    preset = request.preset
    weights = request.weights_gib or (preset.weights_gib if preset else None)
    if weights is None:
        return
    total = request.memory_gib or memory.total_gib
    room = total * share - memory.margin_gib
    if weights <= room * request.nodes:
        return
    per_node = weights / request.nodes
    raise HostError(
        f"{request.model} does not fit: {per_node:.0f} GiB of weights per node, and there is room "
        f"for {max(room, 0):.0f}",
        why=f"{share:.2f} of {total:.1f} GiB, less {memory.margin_gib:.0f} for activations and the "
        "least KV cache; the CPU needs the rest of the memory",
        hint=_smaller(weights, room, preset),
    )


def _smaller(weights: float, room: float, preset: Preset | None) -> str:
    nodes = math.ceil(weights / room) if room > 0 else _MOST_NODES + 1
    ways = [f"{nodes} nodes: --role head --nodes {nodes}"] if nodes <= _MOST_NODES else []
    ways.append((preset.instead if preset else "") or "a checkpoint in fewer bits")
    return "take " + "; or ".join(ways)
