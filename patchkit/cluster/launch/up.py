"""Start a model on a cluster and wait until it answers; or switch to another model.

Judge its server: does it answer, does a unit watch it, what happens next.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from types import NoneType

from patchkit.cluster.agent import node_state
from patchkit.cluster.agent.judge import (
    ANSWERS,
    DOUBT,
    LIVES,
    PAUSED,
    SLEEPS,
    WORKS,
    ServerLife,
    read_life,
)
from patchkit.cluster.agent.node_state import (
    OFF,
    JournalLine,
    NodeLine,
    NodeState,
    UnitState,
)
from patchkit.cluster.launch.cluster import (
    Cluster,
    check_stopped,
    end_left_nodes,
    read_group_journal,
    stop_group,
)
from patchkit.cluster.launch.start_plan import GroupPlan, make_plan
from patchkit.cluster.launch.units import GroupUnits
from patchkit.cluster.openai.server_answers import (
    ServerAnswers,
    ServerSpeed,
    ask_server,
)
from patchkit.cluster.ssh.ssh import ssh_command
from patchkit.durable.signals import Interrupted, committed, deferred
from patchkit.errors import HostError, PatchkitError, UsageError
from patchkit.finding import finding_from_text
from patchkit.frozen import Values, frozen, positional
from patchkit.quoting import quoted
from patchkit.runtime.serve.command_notes import (
    SCRIPT,
    first_start_notes,
    missing_calls,
)

_PAUSE = 2.0  # seconds between two questions to a server that is busy
_LEFT = "the start compiles it beside the weights"
_LOADING = ("activating", "deactivating", "reloading")


@positional
class StartWatcher:
    """The functions that a start reports to.

    ``tell`` gets the state of the head's unit, and the seconds since the wait began. ``explain``
    makes the error of a failed start: from the lines of all ranks, by time, and from systemd's
    words about the end. ``note`` gets what is left of the former start, and what was mended.
    """

    tell: Callable[[UnitState, float], None]
    explain: Callable[[Sequence[NodeLine], str], HostError]
    note: Callable[[str], None]


def wait_until_answered(
    cluster: Cluster,
    since: str,
    watcher: StartWatcher,
) -> None:
    """Wait until the server answers: the head's unit becomes active after the first token.

    ``since`` is the time of the start in the head's journal; "" for a server that ran before, which
    is asked for a token again. Raises HostError: for a failed start that of ``watcher.explain``,
    else for a server that gives no token, or for a head that stops answering.
    """
    began = time.monotonic()
    head = cluster.head
    invocation = ""
    stream = head.stream(list[UnitState], node_state.follow_units, units=cluster.units)

    # Somebody may keep an error raised in the block: without `closing` it keeps the connection.
    with closing(stream):
        for units in stream:
            cluster.check_units(head, units)
            unit = units[0]
            is_active = unit.active == "active"
            if is_active and not since:
                _wait_for_token(cluster, units, watcher, began)

            shown = replace(unit, text=_watch_text(cluster, units))
            watcher.tell(shown, time.monotonic() - began)
            if is_active:
                return

            # The id of the first run of the unit: another id means that systemd tries again.
            invocation = invocation or unit.invocation
            is_other = unit.invocation not in ("", invocation)
            is_retry = is_other or unit.sub == "auto-restart"
            if is_retry or unit.active not in _LOADING:
                raise _explain_failure(cluster, since, watcher, unit, is_retry)
    raise HostError(f"{head.destination}: the answer was cut short")


def _watch_text(cluster: Cluster, units: Sequence[UnitState]) -> str:
    """Return the first status line of the units that the head's server waits for, "" for none."""
    for unit in units[1:]:
        if unit.text and unit.unit != cluster.guard_unit:
            return unit.text
    return ""


def _explain_failure(
    cluster: Cluster,
    since: str,
    watcher: StartWatcher,
    unit: UnitState,
    is_retry: bool,
) -> HostError:
    """Return the error of a failed start; with ``is_retry`` it says that systemd tries again."""
    journal = read_group_journal(cluster, since=since)
    lines = list(journal.lines)  # read first: until its end nodes may become silent
    reasons = [f"systemd says {unit.result}, status {unit.status}"]

    if is_retry:
        reasons.append(
            "it tries again, at most four times an hour: `patchkit down` ends that"
        )

    silent = journal.silent.values()
    reasons += [f"without the lines of {error.what}" for error in silent]
    return watcher.explain(lines, "; ".join(reasons))


def _wait_for_token(
    cluster: Cluster,
    units: Sequence[UnitState],
    watcher: StartWatcher,
    began: float,
) -> None:
    """Ask a running server until a token comes, as long as the server shows that it works.

    ``units`` are those of the head, ``began`` is when the wait began, on the monotonic clock.
    Raises HostError for a server that shows no life, or that somebody has put to sleep.
    """
    guards = (unit for unit in units if unit.unit == cluster.guard_unit)
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
    """Start a model; leave the group alone if it runs with the same files.

    Returns the units, and the time of the start for the head's journal, "" if the group ran before.
    Raises BusyError while another patchkit changes the cluster; the error of a node that is not
    ready, before anything is written; HostError if the former group does not stop.
    """
    with cluster.alone():
        plan = make_plan(cluster, model)
        return plan.units, _start_group(cluster, plan, watcher)


def _start_group(
    cluster: Cluster,
    plan: GroupPlan,
    watcher: StartWatcher,
) -> str:
    """Stop what runs and start the plan; return the time for the head's journal.

    Returns "", and stops nothing, if the head runs with the files of the plan.
    """
    states = plan.states
    head = states[0]

    # systemd waits before it tries a failed start again: start at once, the user may have mended
    # the cause.
    waits = head.units[0].sub == "auto-restart"
    if plan.files == plan.former and head.serves and not waits:
        _watch_again(cluster, head, watcher)
        return ""

    for text in plan.notes:
        watcher.note(text)
    for text in end_left_nodes(cluster, states):
        watcher.note(f"left: {text}")

    runs = any(state.processes or state.containers for state in states)
    if head.serves or runs:
        committed("what ran before is stopped")
        check_stopped(cluster, stop_group(cluster, disable=False))

    committed("the files of this start are on the nodes")
    cluster.put_files(plan.files)
    _compile_first(cluster, plan, watcher)
    return _begin(cluster, f"{plan.units.model.name} is started")


def _compile_first(
    cluster: Cluster,
    plan: GroupPlan,
    watcher: StartWatcher,
) -> None:
    """Compile what a first start lacks while no weights are in memory; a failure is only noted."""
    rank = plan.units.ranks[0]
    node = rank.env.node
    modules = rank.command.modules
    for text in first_start_notes(node, modules):
        watcher.note(text)

    # Where the head has all, a worker may still lack what it then gets from there.
    lacks = [missing_calls(other.env.node, modules) for other in plan.units.ranks]
    calls = max(lacks, key=len)
    if not calls:
        return

    unit = plan.states[0].units[0]
    began = time.monotonic()

    def update(done: int, total: int) -> None:
        percent = done * 10 // max(total, 1) * 10
        text = f"compiling before the weights are loaded: {percent} % of {total} steps"
        busy = replace(unit, sub="busy", text=text)
        watcher.tell(busy, time.monotonic() - began)

    head = cluster.head
    is_done, lines = head.follow(
        tuple[bool, list[str]],
        update,
        node_state.compile_modules,
        name=cluster.name,
        python=f"{rank.facts.venv}/bin/python",
        script=SCRIPT.read_text(encoding="utf-8"),
        calls=calls,
        variables=plan.units.variables(rank),
        # Not where the user's number decides, or FlashInfer, which knows limits of control groups.
        by_memory=not (node.situation.get("jobs") or "MAX_JOBS" in cluster.serve.set),
    )
    if is_done:
        for text in lines:
            watcher.note(text)
        return

    journal = [
        (head.destination, JournalLine(time=0, unit=unit.unit, text=line))
        for line in lines
    ]
    error = watcher.explain(journal, _LEFT)
    # Of an unknown cause, the log of the start tells more: it compiles the same.
    what, why = (error.what, error.why) if error.why else ("".join(lines[-1:]), _LEFT)
    watcher.note(f"not compiled before: {what}; {why}; next: {error.hint}")


def _watch_again(
    cluster: Cluster,
    head: NodeState,
    watcher: StartWatcher,
) -> None:
    """Start the unit that watches the server if somebody stopped it while the server runs."""
    guard = head.unit(cluster.guard_unit)
    if guard is None or head.units[0].active != "active":
        return

    if is_unwatched(cluster, guard):
        cluster.head.call(NoneType, node_state.begin_unit, unit=guard.unit)
        text = f"{guard.unit} was {guard.active}, and is started again"
        watcher.note(f"{cluster.head.destination}: {text}")


def _begin(cluster: Cluster, begun: str) -> str:
    """Start the group; return the time for the head's journal.

    ``begun`` says to somebody who interrupts later what was started.
    """
    since = cluster.head.call(str, node_state.begin_group, name=cluster.name)
    committed(f"{begun}, and goes on loading")
    return since


def switch_model(
    cluster: Cluster,
    model: str,
    watcher: StartWatcher,
) -> str:
    """Serve another model; if it cannot be started or does not answer, serve the former one again.

    An interrupt before the start of the new model brings the former one back as well; after it,
    the new model goes on loading. Returns the time of the start, "" if the group ran before. Raises
    the error of the new model, with the model that is served now; HostError if the former model
    does not come back either.
    """
    can_return = False
    since = None
    try:
        with cluster.alone():
            plan = make_plan(cluster, model)
            can_return = _can_return(plan)
            since = _start_group(cluster, plan, watcher)
        wait_until_answered(cluster, since, watcher)
        return since
    except (PatchkitError, Interrupted) as error:
        is_detached = since is not None and isinstance(error, Interrupted)
        if not can_return or is_detached:
            raise

        former = plan.states[0].model
        began = _begin_again(cluster, former, plan.former)
        if isinstance(error, Interrupted):
            raise

        error.what = f"{model} was not started: {error.what}"
        _wait_for_former(cluster, former, began, watcher, error.what)
        back = f"{former} is served again"
        error.why = "\n  back:  ".join(filter(None, (error.why, back)))
        raise


def _can_return(plan: GroupPlan) -> bool:
    """Return whether another start than the plan runs, to which a switch can go back.

    Raises UsageError if the start has other nodes than cluster.toml: a switch could not go back to
    it.
    """
    states = plan.states
    head = states[0]
    starts = {state.start for state in states}
    serves = any(state.serves for state in states)
    if plan.files == plan.former or starts == {""} or not serves:
        return False

    # Compare how many nodes there are, not their names: another launcher may use others for them.
    is_same = len(starts) == 1 and len(head.members) == len(states)
    if is_same and head.model:
        return True
    raise UsageError(
        "cluster.toml has other nodes, or another head, than what runs",
        why="if the new model does not answer, `switch` starts the former one again, which needs "
        "its own nodes",
        hint=quoted("patchkit", "up", plan.units.model.name),
    )


def _begin_again(cluster: Cluster, former: str, files: Sequence[Values]) -> str:
    """Stop what a switch started, and start the former model; return the time for its journal.

    Interrupts wait until that is done. Raises the error of a node, with the former model's name.
    """
    try:
        with deferred(), cluster.alone():
            check_stopped(cluster, stop_group(cluster, disable=False))
            cluster.put_files(files)
            return _begin(cluster, f"{former} is started again")
    except PatchkitError as error:
        end = "was stopped, and cannot be started again"
        error.what = f"{former} {end}: {error.what}"
        raise


def _wait_for_former(
    cluster: Cluster,
    former: str,
    since: str,
    watcher: StartWatcher,
    what: str,
) -> None:
    """Wait until the former model answers again.

    Raises HostError if it does not; ``what`` says before that why the switch failed.
    """
    try:
        wait_until_answered(cluster, since, watcher)
    except HostError as error:
        end = f"{former}, served before, does not come back"
        error.what = f"{what}\nand {end}: {error.what}"
        raise


_TEXTS = "standstill.toml"
# Texts of a server that lives, but gives no token until somebody wakes it → their finding.
_HALTS = {SLEEPS: "sleeps", PAUSED: "paused"}


@frozen
class ServerCondition:
    """The condition of a cluster's server, which serves ``model``.

    ``life`` is the server's answer, None if its unit is not active or it could not be asked;
    ``unasked`` says why it could not. ``speed`` is None if it is unknown. ``watch`` is the last
    report of the unit that watches the server; ``unwatched`` is the state of that unit ("inactive",
    "failed") if it is off though cluster.toml wants it, else "".
    """

    life: ServerLife | None = None
    speed: ServerSpeed | None = None
    unasked: str = ""
    watch: ServerLife | None = None
    unwatched: str = ""
    model: str = ""

    @property
    def answers(self) -> bool:
        """Return whether the server gave a token."""
        return self.life is not None and self.life.state == ANSWERS

    @property
    def hangs(self) -> str:
        """Return the words that say how the server hangs, "" if it does not."""
        if self.life and self.life.state == DOUBT:
            return self.life.text
        return ""


def ask_life(cluster: Cluster) -> ServerLife:
    """Ask the server for a token, on the head; return its signs of life. Raises HostError."""
    return _ask(cluster).life


def _ask(cluster: Cluster, *, speed: bool = False) -> ServerAnswers:
    asked = {"cluster": cluster.name, "speed": speed}
    return cluster.head.call(ServerAnswers, ask_server, **asked)


def server_condition(cluster: Cluster, head: NodeState | None) -> ServerCondition:
    """Return the condition of the server; the server is asked if its unit is active.

    ``head`` is the state of the head, None if it is not known. An error of the question is in
    ``unasked``.
    """
    if head is None or head.units[0].active != "active":
        return ServerCondition()

    try:
        answers = _ask(cluster, speed=True)
    except PatchkitError as error:
        return ServerCondition(unasked=error.what)

    watch = None
    unwatched = ""
    if guard := head.unit(cluster.guard_unit):
        if guard.active not in OFF:
            watch = read_life(guard.text)
        if is_unwatched(cluster, guard):
            unwatched = guard.active

    return ServerCondition(
        life=answers.life,
        speed=answers.speed,
        watch=watch,
        unwatched=unwatched,
        model=head.model,
    )


def is_unwatched(cluster: Cluster, guard: UnitState) -> bool:
    """Return whether the unit that watches the server is off, though cluster.toml wants it."""
    return bool(cluster.serve.frozen) and guard.active in OFF


def standstill_error(
    cluster: Cluster,
    life: ServerLife,
    guard: UnitState | None,
) -> PatchkitError | None:
    """Return the error of a server that will give no token; None if it goes on working.

    ``life`` shows that no token came. ``guard`` is the state of the unit that watches the server,
    None if there is none. The reason says what happens next.
    """
    about = life.state
    if about in (LIVES, WORKS):
        about = _HALTS.get(life.text, "")
    if not about:
        return None

    doubt = ""
    if about == DOUBT:
        if guard is None or guard.active in OFF or not cluster.serve.frozen:
            about = "unwatched"
        elif (watch := read_life(guard.text)) and watch.state == DOUBT:
            doubt = f" ({watch.text})"

    name = cluster.head.destination
    return finding_from_text(
        _TEXTS,
        about,
        name,
        said=life.text,
        frozen=cluster.serve.frozen,
        doubt=doubt,
        look=ssh_command(name, "ss", "-ltnp"),
    ).error()
