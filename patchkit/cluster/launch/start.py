"""Wait until a started group has answered, or say why not; stop it, and look whether it is gone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from patchkit.cluster.agent.control import end_group
from patchkit.cluster.agent.journal import JournalLine, read_units
from patchkit.cluster.agent.server_answers import ServerAnswers, ask_cluster_server, wanted_metrics
from patchkit.cluster.agent.unit_state import NodeState, UnitState
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.journals import read_group_journal
from patchkit.cluster.ssh.node import Remote, everywhere
from patchkit.errors import HostError, PatchkitError
from patchkit.quoting import quoted
from patchkit.records import RecordError, read_json

_LOADING = ("activating", "deactivating", "reloading")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What a start came to: seconds until the server was up, and until it gave its first token."""

    model: str
    load_s: float
    token_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedStart:
    """What all ranks of a failed start wrote, by time, and ``how`` systemd says that it ended."""

    lines: tuple[tuple[str, JournalLine], ...]
    nodes: int
    how: str


@dataclass(frozen=True, slots=True)
class StartWatcher:
    """Who waits for a start: ``tell`` gets the unit's state and the seconds since the start.

    ``explain`` makes the error of a start that failed from what its ranks wrote.
    """

    tell: Callable[[UnitState, float], None]
    explain: Callable[[FailedStart], HostError]


def wait_until_answered(cluster: Cluster, since: str, watcher: StartWatcher) -> Answered:
    """Wait until the head's unit is active. Raises HostError with the first error of all ranks."""
    began, first = time.monotonic(), ""
    for now, *watches in cluster.follow(cluster.units):
        text = next((watch.text for watch in watches if watch.text), "")
        watcher.tell(replace(now, text=text), time.monotonic() - began)
        if now.active == "active":
            return read_answered(cluster, since)
        first = first or now.invocation
        again = now.sub == "auto-restart" or now.invocation not in ("", first)
        if again or now.active not in _LOADING:
            raise watcher.explain(read_failed_start(cluster, since, now, again=again))
    raise HostError(f"{cluster.head.destination}: the answer was cut short")


def read_answered(cluster: Cluster, since: str = "") -> Answered:
    """Return what the gate of the head wrote when the server had answered.

    Without ``since`` it may have been long ago, and the server is asked again. Raises HostError.
    """
    if not since and (why := token_silence(cluster)):
        down = ("patchkit", "down", *cluster.here_words)
        raise HostError(
            f"{cluster.head.destination}: the model hangs: {why}",
            why="its unit runs, and its server gives no token",
            hint=f"`{quoted(*down)}`, then start it again",
        )
    found = Answered(model="", load_s=0, token_s=0)
    asked = {"units": [cluster.file.unit], "since": since}
    for line in cluster.head.stream(JournalLine, read_units, **asked):
        if line.text.startswith('{"answered"'):
            with contextlib.suppress(RecordError):  # not the gate's: any rank may write so
                found = read_json(dict[str, Answered], line.text)["answered"]
    return found


def token_silence(cluster: Cluster) -> str:
    """Ask the server for a token, on the head; return why none came, "" if one did."""
    asked = {"name": cluster.file.name, "metrics": wanted_metrics()}
    return cluster.head.call(ServerAnswers, ask_cluster_server, **asked).silence


def read_failed_start(cluster: Cluster, since: str, unit: UnitState, *, again: bool) -> FailedStart:
    """Return what the ranks of a start that failed wrote since then."""
    journal = read_group_journal(cluster, since=since)
    lines = tuple(journal.lines)
    how = f"systemd says {unit.result}, status {unit.status}"
    if again:
        how = "its first start; it is started again, four times an hour at most: "
        how += "`patchkit down` ends that"
    how = "; ".join([how, *journal.remarks()])
    return FailedStart(lines=lines, nodes=len(cluster.nodes), how=how)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedNode:
    """What became of a node: its state afterwards, and its free memory before, in KiB."""

    state: NodeState
    before: int | None

    @property
    def problem(self) -> str:
        """Return what is left of the group, "" for nothing."""
        on = [unit.unit for unit in self.state.units if unit.active not in ("inactive", "failed")]
        if on:
            return f"{', '.join(on)} still runs"
        if self.state.processes:
            return f"processes are left: {', '.join(map(str, self.state.processes))}"
        return ""


def stop_group(cluster: Cluster, *, disable: bool = True) -> list[StoppedNode | PatchkitError]:
    """Stop a whole group, the head first, which stops its workers; then look at every node."""

    def stop(node: Remote) -> StoppedNode:
        asked = {"name": cluster.file.name, "units": cluster.units_of(node), "disable": disable}
        return node.call(StoppedNode, end_group, **asked)

    head, *workers = cluster.nodes
    return [*everywhere([head], stop), *everywhere(workers, stop)]


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
            why="a node that did not answer may still hold memory; a rank ends by itself after "
            "15 s without its head, and a head that boots starts all again",
            hint="patchkit down",
        )
