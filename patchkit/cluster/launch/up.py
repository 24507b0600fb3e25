"""Bring a cluster to a model: plan, compare, write, start, wait; stop it, or switch."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from types import NoneType

from patchkit.cluster.agent import node_state, unit_state
from patchkit.cluster.agent.judge import ANSWERS
from patchkit.cluster.agent.node_facts import ModelPrint, NodeFacts
from patchkit.cluster.agent.node_state import NodeState
from patchkit.cluster.agent.processes import strangers
from patchkit.cluster.agent.unit_journal import JournalLine
from patchkit.cluster.agent.unit_state import UnitState
from patchkit.cluster.launch.cluster import Cluster, read_group_journal
from patchkit.cluster.launch.condition import ask_life, is_unwatched, standstill_error
from patchkit.cluster.launch.ranks import (
    ServedModel,
    other_model,
    planned_ranks,
    served_model,
)
from patchkit.cluster.launch.survey import IMAGE_DISK_FULL, survey_nodes
from patchkit.cluster.launch.units import GroupUnits, head_ports
from patchkit.cluster.ssh.node import Remote, require_all, run_on_all
from patchkit.cluster.ssh.ssh import ssh_command
from patchkit.durable.signals import Interrupted, committed, deferred
from patchkit.errors import HostError, PatchkitError, UsageError
from patchkit.quoting import quoted

_PAUSE = 2.0  # seconds between two questions to a server that is busy
_LOADING = ("activating", "deactivating", "reloading")
# What of a survey keeps a start from being tried.
_STOPS = (
    *("systemd", "linger", "memlock", "installation"),
    *("engine-missing", "engine-refuses", "engine-stopped"),
    *("image-missing", "image-silent", IMAGE_DISK_FULL, "image-other", "images"),
)


@dataclass(frozen=True, slots=True)
class StartWatcher:
    """Who waits for a start: ``tell`` gets the unit's state and the seconds since the start.

    ``explain`` makes the error of a start that failed from what all ranks wrote, by time, and how
    systemd says that it ended; ``warn`` gets what is left of the former start, ``note`` what was
    mended.
    """

    tell: Callable[[UnitState, float], None]
    explain: Callable[[Sequence[tuple[str, JournalLine]], str], HostError]
    warn: Callable[[str], None]
    note: Callable[[str], None]


def wait_until_answered(cluster: Cluster, since: str, watcher: StartWatcher) -> None:
    """Wait until the head's unit is active: then a token has come back.

    Without ``since`` that may have been long ago, and the server is asked again. Raises HostError,
    of a start that failed with the first error of all ranks.
    """
    began, first, head, units = time.monotonic(), "", cluster.head, cluster.units
    said = head.stream(list[UnitState], unit_state.follow_units, units=units)
    # An error that is kept would keep the connection, until Python ends.
    with closing(said):
        for found in said:
            if [unit.unit for unit in found] != units:
                raise HostError(f"{head.destination}: does not say how its units are")
            now, *watches = found
            guard = cluster.file.guard_unit
            text = next(
                (unit.text for unit in watches if unit.text and unit.unit != guard), ""
            )
            watcher.tell(replace(now, text=text), time.monotonic() - began)
            if now.active == "active":
                if not since:
                    _wait_for_token(cluster, found, watcher, began)
                return
            first = first or now.invocation
            again = now.sub == "auto-restart" or now.invocation not in ("", first)
            if again or now.active not in _LOADING:
                journal = read_group_journal(cluster, since=since)
                lines = list(journal.lines)  # only then it is known who is silent
                how = [f"systemd says {now.result}, status {now.status}"]
                if again:
                    text = "it tries again, at most four times an hour: `patchkit down` ends that"
                    how.append(text)
                how += [
                    f"without the lines of {error.what}"
                    for error in journal.silent.values()
                ]
                raise watcher.explain(lines, "; ".join(how))
    raise HostError(f"{head.destination}: the answer was cut short")


def _wait_for_token(
    cluster: Cluster, units: Sequence[UnitState], watcher: StartWatcher, began: float
) -> None:
    """Ask a server that runs until a token comes, as long as something shows that it works.

    Raises HostError for one that shows nothing, or that gives none until somebody lets it.
    """
    guard = next((unit for unit in units if unit.unit == cluster.file.guard_unit), None)
    while (life := ask_life(cluster)).state != ANSWERS:
        if error := standstill_error(cluster, life, guard):
            raise error
        busy = replace(units[0], sub="busy", text=f"gives no token yet: {life.text}")
        watcher.tell(busy, time.monotonic() - began)
        time.sleep(_PAUSE)


def kill_sentence(node: Remote, kill: str) -> str:
    return f"on {node.destination} the kernel killed {kill}, for memory"


def stop_group(
    cluster: Cluster, *, disable: bool = True
) -> list[NodeState | PatchkitError]:
    """Stop a whole group, the head first, which stops its workers; then look at every node."""
    found: list[NodeState | PatchkitError] = []
    asked = {"name": cluster.file.name, "disable": disable}
    for nodes in (cluster.nodes[:1], cluster.nodes[1:]):
        found += run_on_all(
            nodes,
            lambda node: node.call(
                NodeState, node_state.end_group, **asked, units=cluster.units_of(node)
            ),
        )
    return found


def end_left_nodes(
    cluster: Cluster, states: Sequence[NodeState | PatchkitError]
) -> list[str]:
    """Stop and disable the former start on nodes that the file does not name any more.

    Returns what is left there: of a node that does not answer, what it does at its next boot.
    """
    named = {node.destination for node in cluster.nodes}
    starts = {
        member: state.start
        for state in states
        if isinstance(state, NodeState)
        for member in state.members
        if member not in named
    }
    nodes = [Remote(member) for member in starts]

    def end(node: Remote) -> str:
        asked = {"name": cluster.file.name, "start": starts[node.destination]}
        return node.call(str, node_state.end_start, **asked)

    left = []
    for node, answer in zip(nodes, run_on_all(nodes, end), strict=True):
        if isinstance(answer, PatchkitError):
            text = f"{answer.what}; at its next boot it may start the old model again"
            left.append(f"{text}: `{stop_command(node, cluster.file.name)}`")
        elif answer:
            left.append(f"{node.destination}: {answer}")
    return left


def stop_command(node: Remote, name: str) -> str:
    """Return the command that stops the units of a cluster on a node, and keeps them so."""
    unit = f"patchkit-{name}.service"
    return ssh_command(
        node.destination, "systemctl", "--user", "disable", "--now", unit
    )


def check_stopped(
    cluster: Cluster, results: Sequence[NodeState | PatchkitError]
) -> None:
    """Raise HostError that names each node where something is left, or that did not answer."""
    trouble = []
    cures = []
    for node, result in zip(cluster.nodes, results, strict=True):
        if isinstance(result, PatchkitError):
            trouble.append(result.what)
            cures.append(result.hint)
        elif result.left:
            trouble.append(f"{node.destination}: {result.left}")
    if trouble:
        raise HostError(
            "not stopped everywhere: " + "; ".join(trouble),
            why="a node that did not answer may still hold memory; a rank ends by itself after "
            "15 s without its head, and a head that boots starts all again",
            hint="; then ".join(filter(None, [*cures[:1], "`patchkit down` again"])),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """What a start would write and run; the files, and those that are there, are by node."""

    units: GroupUnits
    files: list[dict[str, str]]
    former: list[dict[str, str]]


def make_plan(cluster: Cluster, model: str) -> GroupPlan:
    """Return the plan for a model. Raises HostError for a node that is not ready for it."""
    serve = cluster.file.serve
    if serve.image and not serve.local_image:
        raise UsageError(
            f"{serve.image}: `image` in cluster.toml is not pinned, by @sha256:",
            why="a tag means another image tomorrow, and on another node",
            hint="patchkit cluster install",
        )
    served = served_model(cluster.file, model)
    facts = cluster.facts([served.folder] if served.folder else [])
    _require_ready(cluster, facts)
    if served.folder:
        _require_same_model(cluster, served, facts)

    ranks = planned_ranks(cluster.file, facts, served)
    addresses = [rank.address for rank in ranks]
    units = GroupUnits(
        cluster=cluster.file,
        model=served,
        ranks=tuple(ranks),
        links=tuple(link.words for link in cluster.links(addresses[1:])),
    )
    if len(ranks) > 1:
        cluster.check_ports(addresses)
    _require_free_ports(cluster, units)
    former = [node.files for node in facts]
    return GroupPlan(units=units, files=units.node_files(), former=former)


def _require_ready(cluster: Cluster, facts: Sequence[NodeFacts]) -> None:
    """Raise the first error of a node that keeps a start from being tried."""
    names = [node.ssh for node in cluster.file.node]
    for found in survey_nodes(names, facts):
        if found.about in _STOPS:
            raise found.kind(
                f"{found.where}: {found.what}", why=found.why, hint=found.hint
            )


def _require_free_ports(cluster: Cluster, units: GroupUnits) -> None:
    """Raise HostError if somebody else listens at a port of the start, on the head."""
    rank = units.ranks[0]
    urls = [units.url]
    if len(units.ranks) > 1:
        ports = head_ports(cluster.file.serve)[rank.env.node.executor.name]
        urls += [f"http://{rank.address}:{port}" for port in ports]
    for url in urls:
        asked = {"url": url, "unit": cluster.file.unit, "name": cluster.file.name}
        for other in cluster.head.call(list[str], strangers, **asked):
            raise _taken_port_error(cluster.head, other)


def _require_same_model(
    cluster: Cluster, served: ServedModel, facts: Sequence[NodeFacts]
) -> None:
    """Raise HostError for a node whose folder is not whole, or holds another model."""
    silent = ModelPrint(folder=served.folder, problem="says nothing of it")
    names = [node.ssh for node in cluster.file.node]
    prints = {
        name: node.models.get(served.folder, silent)
        for name, node in zip(names, facts, strict=True)
    }
    broken = [
        f"{name}: {model.problem}" for name, model in prints.items() if model.problem
    ]
    pin = cluster.file.models.get(served.name, "")
    if broken:
        what = f"{served.name} is not whole: {'; '.join(broken)}"
        verb = "sync" if len(broken) < len(names) else "get"
    elif other := other_model(prints, pin):
        what = f"{served.name} is not the same on every node: {other[0]} {other[1]}"
        # Without any record nobody knows which node is right.
        verb = "sync" if any(model.commit for model in prints.values()) else "get"
    else:
        return

    hint = quoted("patchkit", "model", verb, served.name)
    if served.name == served.folder:
        hint = "copy it there, to the same path on every node"
    why = f"{served.folder} has to hold the same files on every node"
    raise HostError(what, why=why, hint=hint)


def _taken_port_error(head: Remote, listener: str) -> HostError:
    """Return the error of a port that ``listener`` has; another cluster of the user's is named."""
    why = "it would answer instead of the model, or instead of the head's rank"
    hint = (
        f"end it, or set another `port`; {ssh_command(head.destination, 'ss', '-ltnp')}"
    )
    if other := re.search(f" of the cluster ({node_state.NAME.pattern})$", listener):
        why = f"cluster.toml had another `name` when {other[1]} was started, or both serve at once"
        hint = f"`{stop_command(head, other[1])}` stops it; or set another `port`"
    return HostError(
        f"{head.destination}: a port of the start is taken: {listener}",
        why=why,
        hint=hint,
    )


def bring_up(
    cluster: Cluster, model: str, watcher: StartWatcher
) -> tuple[GroupUnits, str]:
    """Write what differs and start; what runs with the same files is left alone.

    Returns the units, and the start's time for the head's journal, "" if they were running. Raises
    BusyError while another patchkit changes the cluster; an error of a node before anything was
    written; HostError if what ran before does not stop.
    """
    with cluster.alone():
        plan = make_plan(cluster, model)
        return plan.units, _start_group(cluster, plan, watcher)


def _start_group(cluster: Cluster, plan: GroupPlan, watcher: StartWatcher) -> str:
    states = require_all(cluster.states())
    # One that failed and waits to be tried again is started now: what failed may be mended.
    waits = states[0].units[0].sub == "auto-restart"
    if plan.files == plan.former and states[0].serves and not waits:
        _watch_again(cluster, states[0], watcher)
        return ""

    for text in end_left_nodes(cluster, states):
        watcher.warn(text)
    if states[0].serves or any(state.processes or state.containers for state in states):
        committed("what ran before is stopped")
        check_stopped(cluster, stop_group(cluster, disable=False))
    committed("the files of this start are on the nodes")
    return _begin_with(cluster, plan.files, f"{plan.units.model.name} is started")


def _watch_again(cluster: Cluster, head: NodeState, watcher: StartWatcher) -> None:
    """Start what watches a server that runs, where somebody stopped it."""
    guard = head.unit(cluster.file.guard_unit)
    if head.units[0].active == "active" and guard and is_unwatched(cluster, guard):
        cluster.head.call(NoneType, unit_state.begin_unit, unit=guard.unit)
        text = f"{guard.unit} was {guard.active}, and is started again"
        watcher.note(f"{cluster.head.destination}: {text}")


def _begin_with(cluster: Cluster, files: Sequence[dict[str, str]], begun: str) -> str:
    """Write the files of all nodes and start; return the time for the head's journal."""
    cluster.put_files(files)
    since = cluster.head.call(str, node_state.begin_group, name=cluster.file.name)
    committed(f"{begun}, and goes on loading")
    return since


@dataclass(frozen=True, slots=True, kw_only=True)
class FormerStart:
    """What a switch goes back to: the model that ran before, and the files of each node."""

    model: str
    files: list[dict[str, str]]


def switch_model(cluster: Cluster, model: str, watcher: StartWatcher) -> None:
    """Serve another model; if it cannot be started or does not answer, the former one again.

    An interrupt before the start brings the former one back as well; after it, the new one goes on.
    Raises the error, with what is served now.
    """
    former = None
    since = None
    try:
        with cluster.alone():
            plan = make_plan(cluster, model)
            former = _former_start(cluster, plan)
            since = _start_group(cluster, plan, watcher)
        wait_until_answered(cluster, since, watcher)
    except (PatchkitError, Interrupted) as error:
        is_detached = since is not None and isinstance(error, Interrupted)
        if former is None or is_detached:
            raise
        began = _begin_again(cluster, former)
        if isinstance(error, Interrupted):
            raise
        what = f"{model} was not started: {error.what}"
        _wait_for_former(cluster, former, began, watcher, what)
        why = "\n  back:  ".join(
            filter(None, (error.why, f"{former.model} is served again"))
        )
        raise type(error)(what, why=why, hint=error.hint) from None


def _former_start(cluster: Cluster, plan: GroupPlan) -> FormerStart | None:
    """Return what a switch goes back to; None where nothing runs that `up` started.

    Raises UsageError if that runs on other nodes than the file has: it could not be started again.
    """
    states = require_all(cluster.states())
    head = states[0]
    starts = {state.start for state in states}
    if (
        plan.files == plan.former
        or starts == {""}
        or not any(state.serves for state in states)
    ):
        return None

    # Another launcher may reach the same nodes by other names.
    is_same = len(starts) == 1 and len(head.members) == len(states)
    if is_same and head.model:
        return FormerStart(model=head.model, files=plan.former)
    raise UsageError(
        "cluster.toml has other nodes, or another head, than what runs",
        why="if the new model does not answer, `switch` starts the former one again, which needs "
        "its own nodes",
        hint=quoted("patchkit", "up", plan.units.model.name),
    )


def _begin_again(cluster: Cluster, former: FormerStart) -> str:
    """Stop what a switch started, start the former model; return the time for its journal."""
    try:
        with deferred(), cluster.alone():  # whatever interrupts
            check_stopped(cluster, stop_group(cluster, disable=False))
            return _begin_with(
                cluster, former.files, f"{former.model} is started again"
            )
    except PatchkitError as lost:
        what = f"{former.model} was stopped, and cannot be started again: {lost.what}"
        raise type(lost)(what, why=lost.why, hint=lost.hint) from None


def _wait_for_former(
    cluster: Cluster, former: FormerStart, since: str, watcher: StartWatcher, what: str
) -> None:
    """Wait until the former model answers again. Raises HostError with ``what`` if it does not."""
    try:
        wait_until_answered(cluster, since, watcher)
    except HostError as error:
        what += f"\nand {former.model}, served before, does not come back: {error.what}"
        raise HostError(what, why=error.why, hint=error.hint) from None


@contextmanager
def serve_model(
    cluster: Cluster, model: str, watcher: StartWatcher
) -> Iterator[GroupUnits]:
    """Serve a model for the time of a block, then stop it on every node, and check.

    Raises what ``bring_up``, ``wait_until_answered`` and ``check_stopped`` raise.
    """
    units, since = bring_up(cluster, model, watcher)
    try:
        wait_until_answered(cluster, since, watcher)
        yield units
    finally:
        with cluster.alone():
            results = stop_group(cluster)
        check_stopped(cluster, results)
        committed(f"{units.model.name} is stopped on every node")
