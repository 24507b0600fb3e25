"""Stop a group, and look whether it is gone: units, processes and memory, on every node."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from patchkit.errors import HostError, PatchkitError
from patchkit.records import record
from patchkit.runtime.launch import unit_state
from patchkit.runtime.launch.cluster import Cluster
from patchkit.runtime.launch.node_facts import user_systemctl
from patchkit.runtime.launch.unit_state import NodeState
from patchkit.runtime.remote.everywhere import everywhere
from patchkit.runtime.remote.node import Remote

_PATIENCE = 200.0  # seconds for systemd to stop a unit, which kills what does not end
_SETTLES = 10.0  # seconds for the driver to give memory back after the last process


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedNode:
    """What became of a node: its state afterwards, and its free memory before, in KiB."""

    state: NodeState
    before: int | None

    @property
    def problem(self) -> str:
        """Return what is left of the group, "" for nothing."""
        running = [
            each.unit for each in self.state.units if each.active not in ("inactive", "failed")
        ]
        if running:
            return f"{', '.join(running)} is still {self.state.units[0].active}"
        if self.state.processes:
            return f"processes are left: {', '.join(map(str, self.state.processes))}"
        return ""


def end(name: str, units: list[str], disable: bool) -> dict[str, Any]:
    """Stop a node's units, wait until the group has no process and its memory is back: there."""
    before = unit_state.state(name, units)
    if disable:
        user_systemctl("disable", "--quiet", units[0])
    done = user_systemctl("stop", *units, timeout=_PATIENCE)
    # A unit that was never there is stopped.
    if done.trouble and "not loaded" not in done.errors:
        raise done.error(hint="systemctl --user status")
    user_systemctl("reset-failed", *units)
    deadline = time.monotonic() + _SETTLES
    after = unit_state.state(name, units)
    while time.monotonic() < deadline:
        time.sleep(0.5)
        last, after = after, unit_state.state(name, units)
        if not after["processes"] and _available(after) <= _available(last):
            break
    return {"state": after, "before": _available(before) or None}


def _available(state: dict[str, Any]) -> int:
    memory = state["memory"]
    return memory["available"] if memory else 0


def stopped(
    cluster: Cluster, *, disable: bool = True, tell: Callable[[str], None] = lambda _text: None
) -> list[StoppedNode | PatchkitError]:
    """Stop a whole group, the head first, which stops its workers; then look at every node."""

    def stop(node: Remote) -> StoppedNode:
        units = cluster.units if node == cluster.head else [cluster.file.unit]
        tell(node.destination)
        said = node.call(end, name=cluster.file.name, units=units, disable=disable)
        return record(StoppedNode, said)

    first, *workers = cluster.nodes
    head = everywhere([first], stop)
    return [*head, *everywhere(workers, stop)]


def check_stopped(cluster: Cluster, results: list[StoppedNode | PatchkitError]) -> None:
    """Raise HostError that names each node where something is left, or that did not answer."""
    trouble = []
    for node, result in zip(cluster.nodes, results, strict=True):
        if isinstance(result, PatchkitError):
            trouble.append(result.what)
        elif result.problem:
            trouble.append(f"{node.destination}: {result.problem}")
    if trouble:
        raise HostError(
            "not stopped everywhere: " + "; ".join(trouble),
            why="a node that did not answer may still hold memory; its rank ends by itself after "
            "15 s without its head",
            hint="patchkit cluster down",
        )
