"""Start a group and wait until it has answered, or say why it did not."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from patchkit.cluster.agent import journal as of_node
from patchkit.cluster.agent.journal import JournalLine
from patchkit.cluster.agent.server_answers import ServerAnswers, look_at, wanted_metrics
from patchkit.cluster.agent.unit_state import UnitState
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.ssh.node import Remote
from patchkit.doctor.symptoms import journals as journal_reading
from patchkit.errors import HostError, PatchkitError
from patchkit.quoting import quoted
from patchkit.records import RecordError, read_json

_LOADING = ("activating", "deactivating", "reloading")
_SKEW = 2.0  # seconds
_EPOCH = re.compile(r"@\d+(\.\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class _GateLine:
    answered: str
    load_s: float
    token_s: float


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
    began, first = time.monotonic(), ""
    for now, *watches in cluster.follow(cluster.units):
        text = next((watch.text for watch in watches if watch.text), "")
        tell(replace(now, text=text), time.monotonic() - began)
        if now.active == "active":
            return answered(cluster, since)
        first = first or now.invocation
        again = now.sub == "auto-restart" or now.invocation not in ("", first)
        if again or now.active not in _LOADING:
            raise failed(cluster, since, now, again=again)
    raise HostError(f"{cluster.head.destination}: the answer was cut short")


def answered(cluster: Cluster, since: str = "") -> Answered:
    """Return what the gate of the head wrote when the server had answered.

    Without ``since`` it may have been long ago, and the server is asked again. Raises HostError.
    """
    if not since and (why := token_silence(cluster)):
        raise HostError(
            f"{cluster.head.destination}: the model hangs: {why}",
            why="its unit runs, and its server gives no token",
            hint=_anew(cluster),
        )
    lines = lines_of(cluster.head, [cluster.file.unit], since=since)
    found = Answered(model="", load_s=0, token_s=0)
    for line in lines:
        if line.text.startswith('{"answered"'):
            with contextlib.suppress(RecordError):  # not the gate's: any rank may write so
                said = read_json(_GateLine, line.text)
                found = Answered(model=said.answered, load_s=said.load_s, token_s=said.token_s)
    return found


def _anew(cluster: Cluster) -> str:
    where = ["--here"] if cluster.head.here and len(cluster.nodes) == 1 else []
    return f"`{quoted('patchkit', 'cluster', 'down', *where)}`, then start it again"


def token_silence(cluster: Cluster) -> str:
    """Ask the server for a token, on the head; return why none came, "" if one did."""
    asked = {"name": cluster.file.name, "metrics": wanted_metrics()}
    return cluster.head.call(ServerAnswers, look_at, **asked).silence


def failed(cluster: Cluster, since: str, unit: UnitState, *, again: bool) -> HostError:
    """Return the error of a start that failed: the first line of all ranks that says why.

    With what caused it and what cures it, if the text decides that.
    """
    journal_of_all = journals(cluster, since=since)
    lines = list(journal_of_all.lines)
    log, nodes = journal_reading.read_journals(lines, {"nodes": str(len(cluster.nodes))})
    how = f"systemd says {unit.result}, status {unit.status}" if not again else "its first start"
    how += (
        "; it is started again, four times an hour at most: `patchkit cluster down` ends that"
        * again
    )
    how = "; ".join([how, *journal_of_all.remarks()])
    logs = "patchkit cluster logs"
    known = log.first
    if known and known.decided and not known.symptom.follows:
        node, (cause,) = nodes[known.hit.number - 1], known.causes
        return HostError(
            f"{node}: {known.hit.text.strip()}",
            why=f"{known.filled(cause.cause)} ({cause.evidence}: {cause.source}); {how}",
            hint=" ".join(filter(None, (known.filled(cause.cure), known.pasted(cause.command)))),
        )
    first = journal_reading.first_error(lines)
    if first is None:
        return HostError(f"the model did not start: {how}", hint=logs)
    node, line = first
    return HostError(
        f"{node}: {line.text.strip()}",
        why=f"the first error of all ranks; {how}",
        hint=logs if known is None else "patchkit doctor --cluster",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupJournal:
    """The lines of all ranks by time, by this machine's clock, each with its node.

    ``silent`` are nodes that did not answer, and why: more may come with the lines. ``skew`` is how
    far clocks are apart, "" for two seconds at most.
    """

    lines: Iterator[tuple[str, JournalLine]]
    silent: dict[str, PatchkitError]
    skew: str = ""

    def remarks(self) -> list[str]:
        """Return what a reader of the lines has to know."""
        missing = [f"without the lines of {each.what}" for each in self.silent.values()]
        return [*missing, self.skew] if self.skew else missing


def journals(
    cluster: Cluster,
    *,
    since: str = "",
    lines: int = 0,
    nodes: Sequence[str] = (),
    follow: bool = False,
) -> GroupJournal:
    """Return what the ranks wrote, on the nodes that answer.

    ``since`` is as journalctl takes it, by each node's own clock; ``@SECONDS`` is by the head's.
    """
    wanted = [each for each in cluster.nodes if not nodes or each.destination in nodes]
    found = dict(zip(wanted, cluster.clocks(wanted), strict=True))
    silent = {
        node.destination: why for node, why in found.items() if isinstance(why, PatchkitError)
    }
    ahead = {node: by for node, by in found.items() if not isinstance(by, PatchkitError)}
    base = ahead.get(cluster.head, 0.0)

    def read(node: Remote, by: float) -> Iterator[JournalLine]:
        start = f"@{float(since[1:]) + by - base:.6f}" if _EPOCH.fullmatch(since) else since
        units = _units(cluster, node)
        try:
            for line in lines_of(node, units, since=start, lines=lines, follow=follow):
                yield replace(line, time=line.time - round(by * 1e6))
        except PatchkitError as error:
            silent[node.destination] = error

    asked = [(node.destination, read(node, by)) for node, by in ahead.items()]
    merged = journal_reading.as_they_come(asked) if follow else journal_reading.merged(asked)
    return GroupJournal(lines=merged, silent=silent, skew=_skew(ahead))


def _skew(ahead: dict[Remote, float]) -> str:
    """Return how far apart the clocks of nodes are, if that is more than a slow login explains."""
    early, late = (pick(ahead, key=lambda node: ahead[node], default=None) for pick in (min, max))
    if early is None or late is None or (apart := ahead[late] - ahead[early]) <= _SKEW:
        return ""
    return f"the clock of {early.destination} is {apart:.0f} s behind that of {late.destination}"


def lines_of(
    node: Remote, units: Sequence[str], *, since: str = "", lines: int = 0, follow: bool = False
) -> Iterator[JournalLine]:
    """Yield the lines of a node's units."""
    asked = {"units": list(units), "since": since, "lines": lines, "follow": follow}
    return node.stream(JournalLine, of_node.entries, **asked)


def _units(cluster: Cluster, node: Remote) -> list[str]:
    return cluster.units if node == cluster.head else [cluster.file.unit]
