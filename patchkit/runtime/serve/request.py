"""Say what a node is to serve, and check that this makes sense and that it fits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from patchkit.errors import HostError, UsageError
from patchkit.quoting import quoted
from patchkit.runtime.node.decision import Node
from patchkit.runtime.rules.broken import Broken, broken_for
from patchkit.runtime.rules.flags import load_flag_rules
from patchkit.runtime.rules.presets import load_presets
from patchkit.runtime.rules.rule import BY_DEFAULT, RuleChoice
from patchkit.runtime.serve.checkpoint import Checkpoint
from patchkit.runtime.serve.model import MemoryPool
from patchkit.runtime.serve.weights import Weights, weigh

LOCAL = "127.0.0.1"
_MOST_NODES = 8  # for more than that the advice is another checkpoint, not more Sparks

MASTER_PORT = 29501  # of vLLM, by default


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest:
    """A model and the node that serves it, or its part of it.

    ``rank`` is the node's number, None for the only one that it can be; ``memory`` is what the
    model must fit into, ``folder_gib`` the size of a local checkpoint or of a download, None where
    there is none, as ``checkpoint``, what it says of itself; ``architectures`` are the classes that
    a checkpoint on another machine names; ``drafter_gib`` is the size of the checkpoint that
    drafts; ``stacks`` is the folder for stacks of a frozen server, "" for none;
    ``frozen`` are the seconds after which it is restarted, 0 for never; ``choice`` is of rules
    about flags; ``master_port`` is where the ranks meet, at the head's address.
    """

    model: str
    node: Node
    memory: MemoryPool
    rank: int | None = None
    host: str = LOCAL
    port: int = 8000
    folder_gib: float | None = None
    checkpoint: Checkpoint | None = None
    architectures: tuple[str, ...] = ()
    drafter_gib: float | None = None
    stacks: str = ""
    frozen: int = 0
    choice: RuleChoice = BY_DEFAULT
    master_port: int = MASTER_PORT

    @property
    def weights(self) -> Weights | None:
        """Return the size of the weights, None where nobody names one."""
        return weigh(
            self.model, self.node.preset, self.folder_gib, self.node.quantization
        )

    @property
    def number(self) -> int:
        """Return the rank; where it is not given, 0 for the head and 1 for a worker."""
        return int(self.node.role == "worker") if self.rank is None else self.rank


def check_request(request: ServeRequest) -> None:
    """Raise UsageError for a request that makes no sense."""
    model, node = request.model, request.node
    # `vllm serve` would take a dash for an option.
    if not model or model.startswith("-") or not model.isprintable():
        raise UsageError(
            f"{model!r} is not a model",
            hint="write OWNER/NAME as at Hugging Face, or a folder",
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
    if (request.number == 0) == (
        node.role == "worker"
    ) or not 0 <= request.number < node.nodes:
        raise UsageError(
            f"rank {request.number} of {node.nodes} nodes cannot be a {node.role}'s",
            hint="the head is 0, each worker has a number of its own: --node-rank 1 …",
        )
    preset = node.preset if node.preset in load_presets() else None
    if preset and "/" not in preset.id and model.lower() == preset.id.lower():
        raise UsageError(
            f"ambiguous preset {preset.id!r}: give OWNER/NAME",
            why="checkpoints of several owners have this name",
            hint=f"write OWNER/{preset.id}, or the folder that it lies in",
        )


def release_faults(request: ServeRequest) -> tuple[Broken, ...]:
    """Return how this release may be broken for this model. Raises HostError if it surely is."""
    preset, checkpoint, node = request.node.preset, request.checkpoint, request.node
    architectures = (
        checkpoint.config["architectures"] if checkpoint else request.architectures
    )
    # A folder may have any name; --preset says what lies in it.
    names = (request.model, preset.id if preset else request.model)
    rows = broken_for(names, architectures, node.situation)
    for row in rows:
        if row.is_certain(node.situation):
            here = " and ".join(
                f"{name} {node.situation[name]}" for name in row.installed
            )
            raise HostError(
                f"{request.model} on vLLM {node.vllm} {row.effect}, and {here} is installed here",
                why=row.cause,
                hint=f"{row.cure} `{row.command}`" if row.command else row.cure,
            )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What a model takes, and has, of the memory: all its weights, and the room of one node.

    ``fitting_nodes`` is the least number of such nodes that hold the weights, 0 for none.
    """

    weights_gib: float
    room_gib: float
    nodes: int
    fitting_nodes: int

    @property
    def is_enough(self) -> bool:
        return 0 < self.fitting_nodes <= self.nodes

    @property
    def left_gib(self) -> float:
        """Return what one node has beside its part of the weights."""
        return self.room_gib - self.weights_gib / self.nodes


def fit_of(request: ServeRequest, share: float, *, drafts: bool = False) -> Fit | None:
    """Return how the weights fit ``share`` of the memory; None where a size is not known."""
    weights, pool, nodes = request.weights, request.memory, request.node.nodes
    if weights is None or pool.gib is None:
        return None

    gib = weights.gib + (request.drafter_gib or 0) * drafts
    # Weights are not all: activations and a least KV cache come out of the same share.
    room = pool.gib * share - load_flag_rules().memory.margin_gib
    fitting = math.ceil(gib / room) if room > 0 else 0

    preset = request.node.preset
    # A least size says less than the preset, which says that one Spark does not hold the model.
    if pool.shared and weights.is_least and preset and not preset.single:
        fitting = max(fitting, preset.nodes)
    return Fit(weights_gib=gib, room_gib=room, nodes=nodes, fitting_nodes=fitting)


def check_size(request: ServeRequest, share: float, fit: Fit) -> None:
    """Raise HostError if a node's part of the weights does not fit ``share`` of its memory."""
    if fit.is_enough:
        return

    weights, preset, pool = request.weights, request.node.preset, request.memory
    margin = load_flag_rules().memory.margin_gib
    ways_out = [(preset.instead if preset else "") or "a checkpoint in fewer bits"]
    if not pool.shared:
        enough = math.ceil((fit.weights_gib / fit.nodes + margin) / share)
        ways_out += [
            f"a GPU with {enough} GiB",
            "for a line that a Spark runs: --target gb10",
        ]
    elif 0 < fit.fitting_nodes <= _MOST_NODES:
        count = fit.fitting_nodes
        ways_out.insert(0, f"{count} nodes: --role head --nodes {count}")

    is_least = weights is not None and weights.is_least
    size = f"{'at least ' if is_least else ''}{fit.weights_gib / fit.nodes:.0f}"
    source = f" (by {weights.source})" if weights and is_least else ""
    rest = "; the CPU needs the rest of the memory" if pool.shared else ""
    raise HostError(
        f"{request.model} does not fit: {size} GiB of weights per node{source}, and there is room "
        f"for {max(fit.room_gib, 0):.0f}",
        why=f"{share:.2f} of {pool.gib:.1f} GiB ({pool.whose}), less {margin:.0f} for "
        f"activations and the least KV cache{rest}",
        hint="take " + "; or ".join(ways_out),
    )
