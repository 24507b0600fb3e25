"""Bring a cluster to a model: compare the plan, write, start and wait; or switch to another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from types import NoneType

from patchkit.cluster.agent import node_state, unit_state
from patchkit.cluster.agent.judge import ANSWERS
from patchkit.cluster.agent.node_state import NodeState
from patchkit.cluster.agent.unit_journal import JournalLine
from patchkit.cluster.agent.unit_state import UnitState
from patchkit.cluster.launch.cluster import Cluster, read_group_journal
from patchkit.cluster.launch.condition import ask_life, is_unwatched, standstill_error
from patchkit.cluster.launch.start_plan import GroupPlan, make_plan
from patchkit.cluster.launch.stop import check_stopped, end_left_nodes, stop_group
from patchkit.cluster.launch.units import GroupUnits
from patchkit.cluster.ssh.node import require_all
from patchkit.durable.signals import Interrupted, committed, deferred
from patchkit.errors import HostError, PatchkitError, UsageError
from patchkit.frozen import frozen
from patchkit.quoting import quoted

_PAUSE = 2.0  # seconds between two questions to a server that is busy
_LOADING = ("activating", "deactivating", "reloading")


@dataclass(frozen=True, slots=True)
class StartWatcher:
    """The listener of a start: ``tell`` gets the unit's state and the seconds since the start.

    ``explain`` makes the error of a failed start from the lines of all ranks, by time, and from
    systemd's words about its end; ``warn`` gets what is left of the former start, ``note`` what was
    mended.
    """

    tell: Callable[[UnitState, float], None]
    explain: Callable[[Sequence[tuple[str, JournalLine]], str], HostError]
    warn: Callable[[str], None]
    note: Callable[[str], None]


def wait_until_answered(
    cluster: Cluster,
    since: str,
    watcher: StartWatcher,
) -> None:
    """Wait until the head's unit is active: then a token has come back.

    Without ``since`` that may have been long ago, and the server is asked again. Raises HostError;
    for a failed start it has the first error of all ranks.
    """
    began = time.monotonic()
    head = cluster.head
    invocation = ""
    stream = head.stream(list[UnitState], unit_state.follow_units, units=cluster.units)

    # An error that is kept would keep the connection, until Python ends.
    with closing(stream):
        for units in stream:
            cluster.check_units(head, units)
            unit = units[0]
            shown = replace(unit, text=_watch_text(cluster, units))
            watcher.tell(shown, time.monotonic() - began)

            if unit.active == "active":
                if not since:
                    _wait_for_token(cluster, units, watcher, began)
                return

            invocation = invocation or unit.invocation
            is_other = unit.invocation not in ("", invocation)
            is_retry = is_other or unit.sub == "auto-restart"
            if is_retry or unit.active not in _LOADING:
                raise _explain_failure(cluster, since, watcher, unit, is_retry)
    raise HostError(f"{head.destination}: the answer was cut short")


def _watch_text(cluster: Cluster, units: Sequence[UnitState]) -> str:
    """Return the first text of the head's other units, except the one that guards the server."""
    for unit in units[1:]:
        if unit.text and unit.unit != cluster.file.guard_unit:
            return unit.text
    return ""


def _explain_failure(
    cluster: Cluster,
    since: str,
    watcher: StartWatcher,
    unit: UnitState,
    is_retry: bool,
) -> HostError:
    """Return the error of a start that failed, which systemd may try again."""
    journal = read_group_journal(cluster, since=since)
    lines = list(journal.lines)  # only after them the silent nodes are known
    reasons = [f"systemd says {unit.result}, status {unit.status}"]

    if is_retry:
        cure = "`patchkit down` ends that"
        reasons.append(f"it tries again, at most four times an hour: {cure}")

    silent = journal.silent.values()
    reasons += [f"without the lines of {error.what}" for error in silent]
    return watcher.explain(lines, "; ".join(reasons))


def _wait_for_token(
    cluster: Cluster,
    units: Sequence[UnitState],
    watcher: StartWatcher,
    began: float,
) -> None:
    """Ask a running server until a token comes, as long as something shows that it works.

    Raises HostError for a server that shows nothing, or that somebody has put to sleep.
    """
    guards = (unit for unit in units if unit.unit == cluster.file.guard_unit)
    guard = next(guards, None)

    while (life := ask_life(cluster)).state != ANSWERS:
        if error := standstill_error(cluster, life, guard):
            raise error

        busy = replace(
            units[0],
            sub="busy",
            text=f"gives no token yet: {life.text}",
        )
        watcher.tell(busy, time.monotonic() - began)
        time.sleep(_PAUSE)


def bring_up(
    cluster: Cluster,
    model: str,
    watcher: StartWatcher,
) -> tuple[GroupUnits, str]:
    """Write what differs and start; a group that runs with the same files is left alone.

    Returns the units, and the start's time for the head's journal, "" if they were running. Raises
    BusyError while another patchkit changes the cluster; an error of a node before anything was
    written; HostError if the former group does not stop.
    """
    with cluster.alone():
        plan = make_plan(cluster, model)
        return plan.units, _start_group(cluster, plan, watcher)


def _start_group(
    cluster: Cluster,
    plan: GroupPlan,
    watcher: StartWatcher,
) -> str:
    states = require_all(cluster.states())
    head = states[0]

    # A start that failed and waits to be tried again begins now: its fault may be mended.
    waits = head.units[0].sub == "auto-restart"
    if plan.files == plan.former and head.serves and not waits:
        _watch_again(cluster, head, watcher)
        return ""

    for text in end_left_nodes(cluster, states):
        watcher.warn(text)

    runs = any(state.processes or state.containers for state in states)
    if head.serves or runs:
        committed("what ran before is stopped")
        check_stopped(cluster, stop_group(cluster, disable=False))

    committed("the files of this start are on the nodes")
    return _begin_with(cluster, plan.files, f"{plan.units.model.name} is started")


def _watch_again(
    cluster: Cluster,
    head: NodeState,
    watcher: StartWatcher,
) -> None:
    """Start the unit that watches a running server, if somebody stopped it."""
    guard = head.unit(cluster.file.guard_unit)
    if guard is None or head.units[0].active != "active":
        return

    if is_unwatched(cluster, guard):
        cluster.head.call(NoneType, unit_state.begin_unit, unit=guard.unit)
        text = f"{guard.unit} was {guard.active}, and is started again"
        watcher.note(f"{cluster.head.destination}: {text}")


def _begin_with(
    cluster: Cluster,
    files: Sequence[dict[str, str]],
    begun: str,
) -> str:
    """Write the files of all nodes and start; return the time for the head's journal."""
    cluster.put_files(files)
    since = cluster.head.call(str, node_state.begin_group, name=cluster.file.name)
    committed(f"{begun}, and goes on loading")
    return since


@frozen
class FormerStart:
    """The start that a switch goes back to: its model, and the files of each node."""

    model: str
    files: list[dict[str, str]]


def switch_model(
    cluster: Cluster,
    model: str,
    watcher: StartWatcher,
) -> None:
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
        back = f"{former.model} is served again"
        why = "\n  back:  ".join(filter(None, (error.why, back)))
        raise type(error)(
            what,
            why=why,
            hint=error.hint,
        ) from None


def _former_start(cluster: Cluster, plan: GroupPlan) -> FormerStart | None:
    """Return the start that a switch goes back to; None if nothing runs that `up` started.

    Raises UsageError if that runs on other nodes than the file has: it could not be started again.
    """
    states = require_all(cluster.states())

    head = states[0]
    starts = {state.start for state in states}
    serves = any(state.serves for state in states)
    if plan.files == plan.former or starts == {""} or not serves:
        return None

    # Another launcher may reach the same nodes by other names.
    is_same = len(starts) == 1 and len(head.members) == len(states)
    if is_same and head.model:
        return FormerStart(
            model=head.model,
            files=plan.former,
        )
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
            begun = f"{former.model} is started again"
            return _begin_with(cluster, former.files, begun)
    except PatchkitError as error:
        what = f"{former.model} was stopped, and cannot be started again: {error.what}"
        raise type(error)(
            what,
            why=error.why,
            hint=error.hint,
        ) from None


def _wait_for_former(
    cluster: Cluster,
    former: FormerStart,
    since: str,
    watcher: StartWatcher,
    what: str,
) -> None:
    """Wait until the former model answers again. Raises HostError with ``what`` if it does not."""
    try:
        wait_until_answered(cluster, since, watcher)
    except HostError as error:
        what += f"\nand {former.model}, served before, does not come back: {error.what}"
        raise HostError(
            what,
            why=error.why,
            hint=error.hint,
        ) from None


@contextmanager
def serve_model(
    cluster: Cluster,
    model: str,
    watcher: StartWatcher,
) -> Iterator[GroupUnits]:
    """Serve a model during a block, then stop it on every node, and check.

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
