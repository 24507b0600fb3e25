"""Bring a cluster to a model: plan, compare, write, start, wait; stop it, or switch."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from types import NoneType

from patchkit.cluster.agent import group_script, unit_state
from patchkit.cluster.agent.judge import ANSWERS, LIVES, WORKS
from patchkit.cluster.agent.node_facts import ModelPrint, NodeFacts
from patchkit.cluster.agent.unit_state import JournalLine, NodeState, UnitState, end_group
from patchkit.cluster.launch.cluster import Cluster, read_group_journal
from patchkit.cluster.launch.condition import ask_life, is_unwatched, silence_error
from patchkit.cluster.launch.plan import (
    ServedModel,
    other_model,
    planned_ranks,
    served_model,
    survey_nodes,
)
from patchkit.cluster.launch.units import GroupUnits, head_ports
from patchkit.cluster.ssh.node import Remote, all_of, everywhere
from patchkit.cluster.ssh.ssh import there
from patchkit.durable.signals import Interrupted, committed, deferred
from patchkit.errors import HostError, PatchkitError, StorageError, UsageError
from patchkit.quoting import quoted

_LOADING = ("activating", "deactivating", "reloading")
# What of a survey keeps a start from being tried.
_STOPS = (
    *("systemd", "linger", "memlock", "installation"),
    *("engine-missing", "engine-refuses", "engine-stopped"),
    *("image-missing", "image-silent", "image-other", "images"),
)


@dataclass(frozen=True, slots=True)
class StartWatcher:
    """Who waits for a start: ``tell`` gets the unit's state and the seconds since the start.

    ``explain`` makes the error of a start that failed from what all ranks wrote, by time, and how
    systemd says that it ended; ``warn`` gets what is left of the former start, or was mended.
    """

    tell: Callable[[UnitState, float], None]
    explain: Callable[[Sequence[tuple[str, JournalLine]], str], HostError]
    warn: Callable[[str], None]


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
            text = next((unit.text for unit in watches if unit.text and unit.unit != guard), "")
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
                    text = "its first start; it is started again, four times an hour at most: "
                    how = [text + "`patchkit down` ends that"]
                how += [f"without the lines of {error.what}" for error in journal.silent.values()]
                raise watcher.explain(lines, "; ".join(how))
    raise HostError(f"{head.destination}: the answer was cut short")


def _wait_for_token(
    cluster: Cluster, units: Sequence[UnitState], watcher: StartWatcher, began: float
) -> None:
    """Ask a server that runs until a token comes, as long as something shows that it works.

    Raises HostError for one that shows nothing.
    """
    guard = next((unit for unit in units if unit.unit == cluster.file.guard_unit), None)
    while (life := ask_life(cluster)).state != ANSWERS:
        if life.state not in (LIVES, WORKS):
            raise silence_error(cluster, life, guard)
        busy = replace(units[0], sub="busy", text=f"gives no token yet: {life.text}")
        watcher.tell(busy, time.monotonic() - began)


def kill_sentence(node: Remote, kill: str) -> str:
    return f"on {node.destination} the kernel killed {kill}, for memory"


def stop_group(cluster: Cluster, *, disable: bool = True) -> list[NodeState | PatchkitError]:
    """Stop a whole group, the head first, which stops its workers; then look at every node."""
    found: list[NodeState | PatchkitError] = []
    asked = {"name": cluster.file.name, "disable": disable}
    for nodes in (cluster.nodes[:1], cluster.nodes[1:]):
        found += everywhere(
            nodes,
            lambda node: node.call(NodeState, end_group, **asked, units=cluster.units_of(node)),
        )
    return found


def end_left_nodes(cluster: Cluster, states: Sequence[NodeState | PatchkitError]) -> list[str]:
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
        return node.call(str, unit_state.end_start, **asked)

    left = []
    for node, answer in zip(nodes, everywhere(nodes, end), strict=True):
        if isinstance(answer, PatchkitError):
            text = f"{answer.what}; it may start its part of the former start at its next boot"
            left.append(f"{text}: `{stop_command(node, cluster.file.name)}`")
        elif answer:
            left.append(f"{node.destination}: {answer}")
    return left


def stop_command(node: Remote, name: str) -> str:
    """Return the command that stops the units of a cluster on a node, and keeps them so."""
    unit = f"patchkit-{name}.service"
    return there(node.destination, "systemctl", "--user", "disable", "--now", unit)


def check_stopped(cluster: Cluster, results: Sequence[NodeState | PatchkitError]) -> None:
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
    names = [node.ssh for node in cluster.file.node]
    for found in survey_nodes(names, facts):
        if found.about in _STOPS:
            full = "no space left" in found.what
            kind, why = (StorageError, "the disk is full") if full else (HostError, found.why)
            raise kind(f"{found.where}: {found.what}", why=why, hint=found.hint)
    if served.folder:
        _require_same_model(cluster, served, facts)
    ranks = planned_ranks(cluster.file, facts, served)
    units = GroupUnits(
        cluster=cluster.file,
        model=served,
        ranks=tuple(ranks),
        links=tuple(link.words for link in cluster.links([rank.address for rank in ranks[1:]])),
    )
    if len(ranks) > 1:
        cluster.check_ports([rank.address for rank in ranks])
    rank, head = ranks[0], cluster.head
    ports = head_ports(serve)[rank.env.node.executor.name] if len(ranks) > 1 else {}
    for url in (units.url, *(f"http://{rank.address}:{port}" for port in ports)):
        asked = {"url": url, "unit": cluster.file.unit, "name": cluster.file.name}
        for other in head.call(list[str], group_script.strangers, **asked):
            raise _taken_port_error(head, other)
    return GroupPlan(units=units, files=units.node_files(), former=[its.files for its in facts])


def _require_same_model(cluster: Cluster, served: ServedModel, facts: Sequence[NodeFacts]) -> None:
    """Raise HostError for a node whose folder is not whole, or holds another model."""
    silent = ModelPrint(folder=served.folder, problem="says nothing of it")
    names = [node.ssh for node in cluster.file.node]
    prints = {
        name: node.models.get(served.folder, silent)
        for name, node in zip(names, facts, strict=True)
    }
    broken = [f"{name}: {model.problem}" for name, model in prints.items() if model.problem]
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
    hint = f"end it, or set another `port`; {there(head.destination, 'ss', '-ltnp')}"
    if other := re.search(f" of the cluster ({unit_state.NAME.pattern})$", listener):
        why = f"cluster.toml had another `name` when {other[1]} was started, or both serve at once"
        hint = f"`{stop_command(head, other[1])}` stops it; or set another `port`"
    return HostError(
        f"{head.destination}: a port of the start is taken: {listener}", why=why, hint=hint
    )


def bring_up(cluster: Cluster, model: str, warn: Callable[[str], None]) -> tuple[GroupUnits, str]:
    """Write what differs and start; what runs with the same files is left alone.

    Returns the units, and the start's time for the head's journal, "" if they were running;
    ``warn`` gets what is left of the former start, or was mended. Raises BusyError while another
    patchkit changes the cluster; an error of a node before anything was written; HostError if what
    ran before does not stop.
    """
    with cluster.alone():
        plan = make_plan(cluster, model)
        return plan.units, _start_group(cluster, plan, warn)


def _start_group(cluster: Cluster, plan: GroupPlan, warn: Callable[[str], None]) -> str:
    states = all_of(cluster.states())
    if plan.files == plan.former and states[0].serves:
        _watch_again(cluster, states[0], warn)
        return ""

    for text in end_left_nodes(cluster, states):
        warn(text)
    if states[0].serves or any(state.processes or state.containers for state in states):
        committed("what ran before is stopped")
        check_stopped(cluster, stop_group(cluster, disable=False))
    committed("the files of this start are on the nodes")
    return _begin_with(cluster, plan.files, f"{plan.units.model.name} is started")


def _watch_again(cluster: Cluster, head: NodeState, warn: Callable[[str], None]) -> None:
    """Start what watches a server that runs, where somebody stopped it."""
    guard = head.unit(cluster.file.guard_unit)
    if head.units[0].active == "active" and guard and is_unwatched(cluster, guard):
        cluster.head.call(NoneType, unit_state.begin_unit, unit=guard.unit)
        warn(f"{cluster.head.destination}: {guard.unit} was {guard.active}, and is started again")


def _begin_with(cluster: Cluster, files: Sequence[dict[str, str]], begun: str) -> str:
    """Write the files of all nodes and start; return the time for the head's journal."""
    cluster.put_files(files)
    since = cluster.head.call(str, unit_state.begin_group, name=cluster.file.name)
    committed(f"{begun}, and goes on loading")
    return since


def switch_model(cluster: Cluster, model: str, watcher: StartWatcher) -> None:
    """Serve another model; if it cannot be started or does not answer, the former one again.

    An interrupt before the start brings the former one back as well; after it, the new one goes on.
    Raises the error, with what is served now.
    """
    former, since = "", None
    try:
        with cluster.alone():
            plan = make_plan(cluster, model)
            if plan.files != plan.former and all_of(cluster.states())[0].serves:
                # Nothing to go back to, if somebody else than `up` wrote it.
                with suppress(KeyError, ValueError, AttributeError):
                    found = [json.loads(files["group.json"]).get("model") for files in plan.former]
                    former = str(found[0] or "")
            since = _start_group(cluster, plan, watcher.warn)
        wait_until_answered(cluster, since, watcher)
    except (PatchkitError, Interrupted) as error:
        if not former or (since is not None and isinstance(error, Interrupted)):
            raise
        try:
            with deferred(), cluster.alone():  # whatever interrupts
                check_stopped(cluster, stop_group(cluster, disable=False))
                since = _begin_with(cluster, plan.former, f"{former} is started again")
        except PatchkitError as lost:
            what = f"{former} was stopped, and cannot be started again: {lost.what}"
            raise type(lost)(what, why=lost.why, hint=lost.hint) from None
        if isinstance(error, Interrupted):
            raise
        what = f"{model} was not started: {error.what}"
        try:
            wait_until_answered(cluster, since, watcher)
        except HostError as again:
            what += f"\nand {former}, served before, does not come back: {again.what}"
            raise HostError(what, why=again.why, hint=again.hint) from None
        why = "\n  back:  ".join(filter(None, (error.why, f"{former} is served again")))
        raise type(error)(what, why=why, hint=error.hint) from None


@contextmanager
def serve_model(cluster: Cluster, model: str, watcher: StartWatcher) -> Iterator[GroupUnits]:
    """Serve a model for the time of a block, then stop it on every node, and check.

    Raises what ``bring_up``, ``wait_until_answered`` and ``check_stopped`` raise.
    """
    units, since = bring_up(cluster, model, watcher.warn)
    try:
        wait_until_answered(cluster, since, watcher)
        yield units
    finally:
        with cluster.alone():
            results = stop_group(cluster)
        check_stopped(cluster, results)
        committed(f"{units.model.name} is stopped on every node")
