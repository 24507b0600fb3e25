"""Start a group and wait until it has answered, or say why it did not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from patchkit.errors import HostError
from patchkit.records import record
from patchkit.runtime.launch import journal
from patchkit.runtime.launch.cluster import Cluster
from patchkit.runtime.on_node import journal as of_node
from patchkit.runtime.on_node import unit_state
from patchkit.runtime.on_node.journal import JournalLine
from patchkit.runtime.on_node.unit_state import UnitState
from patchkit.runtime.remote.node import Remote

_LOADING = ("activating", "deactivating", "reloading")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What a start came to: seconds until the server was up, and until it gave its first token.

    ``notes`` are about the model's files.
    """

    model: str
    load_s: float
    token_s: float
    notes: tuple[str, ...] = ()


def waited(cluster: Cluster, since: str, tell: Callable[[UnitState, float], None]) -> Answered:
    """Wait until the head's unit is active. Raises HostError with the first error of all ranks.

    ``tell`` gets the unit's state, and the seconds since the start.
    """
    unit, began = cluster.file.unit, time.monotonic()
    first = ""
    for said in cluster.head.stream(unit_state.follow, units=[unit]):
        (now,) = record(tuple[UnitState, ...], said["units"])
        tell(now, time.monotonic() - began)
        if now.active == "active":
            return answered(cluster, since)
        first = first or now.invocation
        again = now.sub == "auto-restart" or now.invocation not in ("", first)
        if again or now.active not in _LOADING:
            raise failed(cluster, since, now, again=again)
    raise HostError(f"{cluster.head.destination}: the answer was cut short")


def answered(cluster: Cluster, since: str = "") -> Answered:
    """Return what the gate of the head wrote when the server had answered."""
    lines = lines_of(cluster.head, [cluster.file.unit], since=since)
    found = Answered(model="", load_s=0, token_s=0)
    for line in lines:
        if line.text.startswith('{"answered"'):
            said = json.loads(line.text)
            found = Answered(
                model=str(said["answered"]), load_s=said["load_s"], token_s=said["token_s"]
            )
    return found


def failed(cluster: Cluster, since: str, unit: UnitState, *, again: bool) -> HostError:
    """Return the error of a start that failed: the first line of all ranks that says why.

    With what caused it and what cures it, if the text decides that.
    """
    lines = list(journals(cluster, since=since))
    log, nodes = journal.read_journals(lines, {"nodes": str(len(cluster.nodes))})
    how = f"systemd says {unit.result}, status {unit.status}" if not again else "its first start"
    how += (
        "; it is started again, four times an hour at most: `patchkit cluster down` ends that"
        * again
    )
    logs = "patchkit cluster logs"
    known = log.first
    if known and known.decided and not known.symptom.follows:
        node, (cause,) = nodes[known.hit.number - 1], known.causes
        return HostError(
            f"{node}: {known.hit.text.strip()}",
            why=f"{known.filled(cause.cause)} ({cause.evidence}: {cause.source}); {how}",
            hint=" ".join(filter(None, (known.filled(cause.cure), known.pasted(cause.command)))),
        )
    first = journal.first_error(lines)
    if first is None:
        return HostError(f"the model did not start: {how}", hint=logs)
    node, line = first
    return HostError(
        f"{node}: {line.text.strip()}",
        why=f"the first error of all ranks; {how}",
        hint=logs if known is None else "patchkit doctor --cluster",
    )


def journals(
    cluster: Cluster,
    *,
    since: str = "",
    lines: int = 0,
    nodes: Sequence[str] = (),
    follow: bool = False,
) -> Iterator[tuple[str, JournalLine]]:
    """Yield the lines of all ranks by time, each with its node."""
    asked = [
        (
            node.destination,
            lines_of(node, _units(cluster, node), since=since, lines=lines, follow=follow),
        )
        for node in cluster.nodes
        if not nodes or node.destination in nodes
    ]
    return journal.as_they_come(asked) if follow else journal.merged(asked)


def lines_of(
    node: Remote, units: Sequence[str], *, since: str = "", lines: int = 0, follow: bool = False
) -> Iterator[JournalLine]:
    """Yield the lines of a node's units."""
    for said in node.stream(
        of_node.entries, units=list(units), since=since, lines=lines, follow=follow
    ):
        yield record(JournalLine, said)


def _units(cluster: Cluster, node: Remote) -> list[str]:
    return cluster.units if node == cluster.head else [cluster.file.unit]
