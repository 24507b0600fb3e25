"""Wait until a started group has answered, or say why not; stop it, and look whether it is gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from patchkit.cluster.agent.control import end_group
from patchkit.cluster.agent.journal import JournalLine
from patchkit.cluster.agent.server_answers import ServerAnswers, ask_cluster_server, wanted_metrics
from patchkit.cluster.agent.unit_state import NodeState, UnitState
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.journals import read_group_journal
from patchkit.cluster.ssh.node import Remote, everywhere
from patchkit.errors import HostError, PatchkitError

_LOADING = ("activating", "deactivating", "reloading")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedStart:
    """What all ranks of a failed start wrote, by time, and ``how`` systemd says that it ended."""

    lines: tuple[tuple[str, JournalLine], ...]
    how: str


@dataclass(frozen=True, slots=True)
class StartWatcher:
    """Who waits for a start: ``tell`` gets the unit's state and the seconds since the start.

    ``explain`` makes the error of a start that failed from what its ranks wrote.
    """

    tell: Callable[[UnitState, float], None]
    explain: Callable[[FailedStart], HostError]


def wait_until_answered(cluster: Cluster, since: str, watcher: StartWatcher) -> None:
    """Wait until the head's unit is active: then a token has come back.

    Without ``since`` that may have been long ago, and the server is asked again. Raises HostError,
    of a start that failed with the first error of all ranks.
    """
    began, first = time.monotonic(), ""
    for now, *watches in cluster.follow(cluster.units):
        text = next((watch.text for watch in watches if watch.text), "")
        watcher.tell(replace(now, text=text), time.monotonic() - began)
        if now.active == "active":
            if not since and (why := token_silence(cluster)):
                raise HostError(
                    f"{cluster.head.destination}: the model hangs: {why}",
                    why="its unit runs, and its server gives no token",
                    hint="`patchkit down`, then start it again",
                )
            return
        first = first or now.invocation
        again = now.sub == "auto-restart" or now.invocation not in ("", first)
        if again or now.active not in _LOADING:
            raise explain_end(cluster, since, watcher, now, again=again)
    raise HostError(f"{cluster.head.destination}: the answer was cut short")


def token_silence(cluster: Cluster) -> str:
    """Ask the server for a token, on the head; return why none came, "" if one did."""
    asked = {"name": cluster.file.name, "metrics": wanted_metrics()}
    return cluster.head.call(ServerAnswers, ask_cluster_server, **asked).silence


def explain_end(
    cluster: Cluster, since: str, watcher: StartWatcher, unit: UnitState, *, again: bool
) -> HostError:
    """Return why a group ended, from what its ranks wrote since it was started."""
    journal = read_group_journal(cluster, since=since)
    lines = tuple(journal.lines)
    how = f"systemd says {unit.result}, status {unit.status}"
    if again:
        how = "its first start; it is started again, four times an hour at most: "
        how += "`patchkit down` ends that"
    silent = (f"without the lines of {error.what}" for error in journal.silent.values())
    how = "; ".join([how, *silent])
    return watcher.explain(FailedStart(lines=lines, how=how))


def stop_group(cluster: Cluster, *, disable: bool = True) -> list[NodeState | PatchkitError]:
    """Stop a whole group, the head first, which stops its workers; then look at every node."""

    def stop(node: Remote) -> NodeState:
        asked = {"name": cluster.file.name, "units": cluster.units_of(node), "disable": disable}
        return node.call(NodeState, end_group, **asked)

    head, *workers = cluster.nodes
    return [*everywhere([head], stop), *everywhere(workers, stop)]


def check_stopped(cluster: Cluster, results: Sequence[NodeState | PatchkitError]) -> None:
    """Raise HostError that names each node where something is left, or that did not answer."""
    trouble = []
    for node, result in zip(cluster.nodes, results, strict=True):
        if isinstance(result, PatchkitError):
            trouble.append(result.what)
        elif result.left:
            trouble.append(f"{node.destination}: {result.left}")
    if trouble:
        raise HostError(
            "not stopped everywhere: " + "; ".join(trouble),
            why="a node that did not answer may still hold memory; a rank ends by itself after "
            "15 s without its head, and a head that boots starts all again",
            hint="patchkit down",
        )
