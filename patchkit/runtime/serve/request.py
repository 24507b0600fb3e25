"""Say what a node is to serve, and check that this makes sense."""

from __future__ import annotations

from dataclasses import dataclass

from patchkit.errors import UsageError
from patchkit.quoting import quoted
from patchkit.runtime.node.decision import Node
from patchkit.runtime.rules.model_recipes import model_recipes
from patchkit.runtime.rules.rule import BY_DEFAULT, RuleChoice
from patchkit.runtime.serve.memory import MemoryPool, ModelWeights

LOCAL = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest:
    """A model and the node that serves it, or its part of it.

    ``rank`` is the node's number, None for the only one that it can be; ``memory`` is what the
    model must fit into, ``folder_gib`` the size of a local checkpoint or of a download, None where
    there is none; ``choice`` is of rules about flags.
    """

    model: str
    node: Node
    memory: MemoryPool
    rank: int | None = None
    host: str = LOCAL
    port: int = 8000
    folder_gib: float | None = None
    choice: RuleChoice = BY_DEFAULT

    @property
    def weights(self) -> ModelWeights | None:
        """Return the size of the weights, None where nobody names it."""
        preset, recipe = self.node.preset, model_recipes().get(self.model.lower())
        if known := self.folder_gib or (preset.weights_gib if preset else None):
            return ModelWeights(known)
        return ModelWeights(recipe.weights_gib, True) if recipe and recipe.weights_gib else None

    @property
    def number(self) -> int:
        """Return the rank; where it is not given, 0 for the head and 1 for a worker."""
        return int(self.node.role == "worker") if self.rank is None else self.rank


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
