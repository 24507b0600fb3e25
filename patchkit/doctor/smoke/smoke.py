"""Ask nodes to try their GPUs: each by itself, then all of them over the cable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from patchkit.cluster.ssh.node import Remote, everywhere
from patchkit.doctor.smoke.steps import RANK, GpuStep, all_reduce_rank, free_port, gpu_steps
from patchkit.errors import PatchkitError
from patchkit.paths import RECIPES
from patchkit.records import read_toml

_FILE = RECIPES / "doctor" / "gpu.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeStep:
    """A step: its settings, and its texts with the figures that they name.

    ``look`` are words of a command that says more of what failed, ``hint`` the sentence with it.
    """

    id: str
    script: str
    seconds: int
    fine: str
    proves: str
    hint: str
    look: tuple[str, ...]
    block: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """Return what the node is sent."""
        fields = {"step": self.id, "script": self.script, "seconds": self.seconds}
        return {**fields, "block": self.block}


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceTest:
    """How all nodes are tried at once, and from which bandwidth on it is as it should be."""

    seconds: int
    sizes: tuple[int, ...]
    share: float
    hot_plug: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNode:
    """A node whose GPU is tried: ``python`` is the one that has vLLM there, ``address`` its own.

    ``variables`` are those of its env file, empty without one.
    """

    node: str
    python: str
    address: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)


@cache
def smoke_steps() -> tuple[SmokeStep, ...]:
    """Return the steps of a node, in their order."""
    return read_toml(tuple[SmokeStep, ...], _FILE, key="step")


@cache
def all_reduce_test() -> AllReduceTest:
    """Return how all nodes are tried at once."""
    return read_toml(AllReduceTest, _FILE, key="all_reduce")


def smoke(node: GpuNode) -> Iterator[GpuStep]:
    """Yield how each step went on a node, as it ends. Raises HostError if it does not answer."""
    yield from Remote(node.node).stream(
        GpuStep,
        gpu_steps,
        python=node.python,
        steps=[each.settings for each in smoke_steps()],
        variables=dict(node.variables),
    )


def all_reduce(nodes: Sequence[GpuNode], backend: str = "nccl") -> list[GpuStep]:
    """Return how each rank of an all-reduce over all nodes went, the head's first.

    They meet at the first one's address. With ``gloo`` they compute on CPUs: that tries the way,
    and no GPU. Raises HostError if the head does not answer.
    """
    head, test = nodes[0], all_reduce_test()
    port = Remote(head.node).call(int, free_port, address=head.address)
    common = {
        "world": len(nodes),
        "meeting": f"tcp://{head.address}:{port}",
        "backend": backend,
        "sizes": list(test.sizes),
        "seconds": test.seconds,
    }

    def rank(number: int) -> GpuStep:
        node = nodes[number]
        return Remote(node.node).call(
            GpuStep,
            all_reduce_rank,
            python=node.python,
            settings={**common, "rank": number},
            variables=dict(node.variables),
        )

    found = everywhere(range(len(nodes)), rank)
    return [
        GpuStep(step=RANK, state="not-run", reason=each.what)
        if isinstance(each, PatchkitError)
        else each
        for each in found
    ]
