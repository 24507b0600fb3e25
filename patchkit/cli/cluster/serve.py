"""Start, stop, watch and switch a model: `patchkit up`, `down`, `status`, `logs`, `switch`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import click

from patchkit.cli import complete
from patchkit.cli.cluster.cluster_options import cluster_option, node_fields
from patchkit.cli.out import (
    LaidOut,
    next_step,
    program,
    record_fields,
    spelled,
    style,
    table,
    tell,
)
from patchkit.cli.render import BAD, GOOD, Block, ExitCode, Record, lead_word, rendered
from patchkit.cli.runtime.node_options import note_lines
from patchkit.cluster.agent.group_script import ANSWERED
from patchkit.cluster.agent.judge import (
    ANSWERS,
    BLIND,
    DOUBT,
    ENDED,
    LIVES,
    REFUSES,
    WORKS,
)
from patchkit.cluster.agent.node_state import NodeState
from patchkit.cluster.agent.unit_state import UnitState
from patchkit.cluster.launch import up as launch
from patchkit.cluster.launch.cluster import Cluster, read_group_journal
from patchkit.cluster.launch.condition import ServerCondition, server_condition
from patchkit.cluster.launch.plan import image_finding
from patchkit.cluster.launch.up import (
    StartWatcher,
    check_stopped,
    stop_group,
    wait_until_answered,
)
from patchkit.cluster.ssh.node import Remote, all_of
from patchkit.doctor.machine import disk_trouble
from patchkit.doctor.symptoms.findings import explain_failed_start, read_journals
from patchkit.durable.signals import Interrupted
from patchkit.errors import HostError, PatchkitError, UsageError
from patchkit.quoting import quoted
from patchkit.runtime.host.host import Memory
from patchkit.runtime.rules.secret_texts import mask_secrets
from patchkit.units import KIB_PER_GIB

_MODEL = click.argument("model", shell_complete=complete.models)
_WORDS = {
    "waiting": "starting the workers",
    "start-pre": "starting",
    "start": "starting",
    "start-post": "loading the model",
    "auto-restart": "waiting before the next start",
    "running": "answers",
    "dead": "stopped",
    "failed": "failed",
}
_TOLD = ("waiting", "busy")  # states in which a unit's own words are told
_STOPPING = (
    "stop",
    "final",
    "cleaning",
)  # how the names of sub-states begin that end a unit
_HEADS = ("node", "rank", "state", "since", "starts", "memory", "GPU")
# By the unit's sub-state, else by its state.
_STATES = {
    "auto-restart": ("waits to restart", "yellow"),
    "waiting": ("waits", "yellow"),
    "active": ("answers", "green"),
    "activating": ("loading", "yellow"),
    "failed": ("failed", "red"),
    "inactive": ("stopped", None),
    "deactivating": ("stopping", "yellow"),
}
# By the state of a life, where the head's unit is active and no token came.
_LIVES = {
    LIVES: ("busy", "yellow"),
    WORKS: ("works", "yellow"),
    BLIND: ("not the model", "red"),
    REFUSES: ("refuses", "red"),
    ENDED: ("ended", "red"),
    DOUBT: ("hangs", "red"),
}


@click.command("up")
@_MODEL
@cluster_option
@rendered
def up_command(model: str, *, cluster: Cluster) -> Iterator[Block]:
    """Start a model, here or on the nodes of cluster.toml; return when it has answered.

    \b
      patchkit up openai/gpt-oss-20b

    Writes env files and units on each node, as `patchkit env` and `patchkit serve-args` would say
    there, and starts the head. What runs with the same files is left alone. systemd keeps it: it
    outlives the terminal, a crash and a reboot. Ctrl-C only detaches; `patchkit down` ends it.
    """
    watcher = _watch_start(cluster)
    nodes = ", ".join(node.destination for node in cluster.nodes)
    units, since = launch.bring_up(cluster, model, watcher)
    what = "is started" if since else "runs with these files already"
    yield GOOD + f"{units.model.name} {what} on {nodes}"
    command = units.ranks[0].command
    for line in note_lines(command.limits, command.advice) if command and since else ():
        tell(line)
    _wait_attached(lambda: wait_until_answered(cluster, since, watcher))
    yield from _answered_blocks(cluster, units.model.name, units.url)


@click.command("switch")
@_MODEL
@cluster_option
@rendered
def switch_command(model: str, *, cluster: Cluster) -> Iterator[Block]:
    """Serve another model; if it does not answer, the former one again.

    The former one is stopped and its memory awaited first. vLLM's sleep mode is not used.
    """
    watcher = _watch_start(cluster)
    _wait_attached(lambda: launch.switch_model(cluster, model, watcher))
    yield from _answered_blocks(cluster, model)


def _wait_attached(wait: Callable[[], None]) -> None:
    """Wait; an interrupt leaves the start to the head's systemd, and says how to come back."""
    try:
        wait()
    except Interrupted:
        tell("")
        tell(next_step(*program(), "status"))
        raise


def _watch_start(cluster: Cluster) -> StartWatcher:
    """Return what tells how a start goes, a line for each change of the unit, or why it failed."""
    lines: list[str] = []

    def tell_unit(unit: UnitState, seconds: float) -> None:
        line = (unit.sub in _TOLD and unit.text) or _unit_word(unit.sub)
        if line not in lines[-1:]:
            lines.append(line)
            tell(
                style(
                    f"  {seconds:5.0f} s  {cluster.head.destination}: {line}", dim=True
                )
            )

    return StartWatcher(tell_unit, explain_failed_start, _warn, _note)


def _unit_word(sub: str) -> str:
    """Return the word for a unit's sub-state; systemd has a dozen for one that ends."""
    return "stopping" if sub.startswith(_STOPPING) else _WORDS.get(sub, sub)


def _warn(text: str) -> None:
    tell(style("left:", fg="yellow") + f" {text}")


def _note(text: str) -> None:
    tell(lead_word("note") + text)


def _answered_blocks(cluster: Cluster, model: str, url: str = "") -> Iterator[Block]:
    """Yield that a model answers, and how it is asked."""
    yield Record({"model": model, "url": url, "answered": True})
    yield GOOD + f"{model} answers"
    if url:
        where = "" if cluster.head.here else f"on {cluster.head.destination}"
        yield next_step("curl", f"{url}/v1/models", where=where)


@click.command("down")
@cluster_option
@rendered
def down_command(*, cluster: Cluster) -> Iterator[Block]:
    """Stop the model on every node, and check: no unit, no process, the memory back.

    It does not come back after a reboot until the next `up`. A node that did not answer is named.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(HostError):  # a head that is off keeps nobody out
            stack.enter_context(cluster.alone())
        results = stop_group(cluster)
        left = launch.end_left_nodes(cluster, results)

    nodes = []
    for node, result in zip(cluster.nodes, results, strict=True):
        nodes.append(node_fields(node.destination, result))
        yield from _stopped_blocks(node, result)
    yield Record({"nodes": nodes})
    for text in left:
        yield BAD + text
    if left:
        yield ExitCode(HostError.exit_code)
    check_stopped(cluster, results)


def _stopped_blocks(node: Remote, result: NodeState | PatchkitError) -> Iterator[Block]:
    """Yield that nothing is left on a node, and which other clusters run there.

    What is left, or silent, the error names at the end.
    """
    if isinstance(result, PatchkitError) or result.left:
        return
    if result.others:
        yield GOOD + f"{node.destination}: stopped; {_other_clusters(node, result)}"
    else:
        yield GOOD + f"{node.destination}: stopped, no process left"


def _other_clusters(node: Remote, state: NodeState) -> str:
    """Return which other clusters run on a node, and how each is stopped: on its head."""
    names = [
        f"{name} (stop: `{launch.stop_command(node, name)}`)" if is_head else name
        for name, is_head in state.others.items()
    ]
    return f"other clusters run here: {', '.join(names)}"


@click.command("status")
@cluster_option
@rendered
def status_command(*, cluster: Cluster) -> Iterator[Block]:
    """Show the state of every node: what systemd says, memory, temperature, the last error.

    The exit code is 0 while the model answers and is watched, 9 if not, or if a node is silent.
    """
    rows = list(zip(cluster.nodes, cluster.states(), strict=True))
    head = rows[0][1] if isinstance(rows[0][1], NodeState) else None
    condition = server_condition(cluster, head)
    error = _last_error(cluster, head.units[0]) if head else None
    wrong = [*_troubles(cluster, head, condition, rows)]
    well = condition.answers and not wrong

    yield Record(
        {
            "answers": well,
            "hangs": condition.hangs or None,
            "server": record_fields(condition),
            "serves": head.units[0].description if head else None,
            "nodes": [node_fields(node.destination, state) for node, state in rows],
            "error": record_fields(error) if error else None,
        }
    )
    if head:
        yield style(head.units[0].description, bold=True)
    yield from _node_table(rows, _condition_word(condition))
    for trouble in wrong:
        yield trouble.line
    yield from _notes(cluster, condition, rows)
    if error:
        clock = time.strftime("%F %T", time.localtime(error.time / 1e6))
        yield style("last error", fg="red") + f" {clock} {error.node}: {error.text}"
    if error or wrong:
        yield _next_of(cluster, wrong)
    if not well:
        yield ExitCode(HostError.exit_code)


_Rows = Sequence[tuple[Remote, NodeState | PatchkitError]]


def _next_of(cluster: Cluster, wrong: Sequence[Trouble]) -> str:
    """Return the first cure that is known, else the command that finds one."""
    if cure := next((trouble.cure for trouble in wrong if trouble.cure), ""):
        return style("next:", bold=True) + f" {spelled(cure)}"
    alone = cluster.head.here and len(cluster.nodes) == 1
    return next_step(*program(), "doctor", *([] if alone else ["--cluster"]))


def _node_table(rows: _Rows, head_word: str) -> Iterator[str]:
    """Yield a row for each node, the head's with its server's state."""
    names = [style(node.destination, bold=True) for node, _state in rows]
    cells = [
        _row(number, state, head_word) for number, (_node, state) in enumerate(rows)
    ]
    yield from table(
        [(name, *row) for name, row in zip(names, cells, strict=True)], heads=_HEADS
    )


@dataclass(frozen=True, slots=True)
class Trouble:
    """What keeps a model from being served; ``cure`` is "" where doctor has to find it."""

    line: str
    cure: str = ""


def _troubles(
    cluster: Cluster, head: NodeState | None, condition: ServerCondition, rows: _Rows
) -> Iterator[Trouble]:
    """Yield the faults; any of them makes the exit code 9."""
    if head:
        yield from _head_troubles(cluster, head)
    yield from _node_troubles(cluster, rows)
    yield from _source_troubles(rows)
    yield from _server_troubles(cluster, condition)


def _node_troubles(cluster: Cluster, rows: _Rows) -> Iterator[Trouble]:
    """Yield which nodes are silent, have changed places, or lost the address of their start."""
    states = [state for _node, state in rows if isinstance(state, NodeState)]
    model = next((state.model for state in states if state.model), "MODEL")
    again = quoted("patchkit", "up", model)
    names = [node.destination for node, _state in rows]
    starts = {state.members for state in states if state.serves}
    for members in starts - {tuple(names)}:
        # Other names may be those of another launcher.
        if sorted(members) == sorted(names):
            line = f"{members[0]} is the head of the running start"
            line += f", but cluster.toml lists {names[0]} first"
            yield Trouble(style("head", fg="red") + f" {line}", again)

    for member, (node, state) in zip(cluster.file.node, rows, strict=True):
        if isinstance(state, PatchkitError):
            yield Trouble(style("silent", fg="red") + f" {state.what}", state.hint)
        elif lost := state.troubles.lost:
            addresses = " and ".join(state.troubles.addresses)
            line = f"{node.destination} no longer has {lost}, the address it was started with"
            cure = f"correct `address` of {node.destination} in cluster.toml; then `{again}`"
            is_in_file = member.address == lost
            text = style("address", fg="red") + f" {line}; it has {addresses}"
            yield Trouble(text, cure if is_in_file else again)


def _source_troubles(rows: _Rows) -> Iterator[Trouble]:
    """Yield what is wrong with the engine or the image that a node serves from, and its cure."""
    for node, state in rows:
        if (
            isinstance(state, NodeState)
            and state.image
            and state.units[0].active != "inactive"
        ):
            trouble = image_finding(node.destination, state.image)
            word = style("next start", fg="red")
            yield Trouble(f"{word} {node.destination}: {trouble.what}", trouble.hint)


def _successors(rows: _Rows) -> Iterator[str]:
    """Yield what was installed on a node since its start."""
    for node, state in rows:
        if isinstance(state, NodeState) and state.successor and state.serves:
            yield (
                style("installed", fg="yellow")
                + f" {node.destination}: {state.successor}"
            )


def _notes(cluster: Cluster, condition: ServerCondition, rows: _Rows) -> Iterator[str]:
    """Yield what is worth knowing, and no fault: the watch, its last restart, other clusters."""
    if condition.watch:
        yield (
            style("watch", dim=True)
            + f" {cluster.head.destination}: {condition.watch.text}"
        )
    states = [(node, state) for node, state in rows if isinstance(state, NodeState)]
    for node, state in states:
        if state.frozen:
            yield style("restarted", fg="yellow") + f" {state.frozen}"
        # A cluster that was renamed serves on under its former name; two of them may be meant.
        if any(state.others.values()):
            yield f"{node.destination}: {_other_clusters(node, state)}"
        for disk in state.troubles.disks:
            if trouble := disk_trouble(disk):
                full = f"{node.destination}: {disk.folder}: {trouble}; a rank that ends may not"
                yield style("full", fg="yellow") + f" {full} start again"
        for kill in state.troubles.killed:
            yield style("killed", fg="yellow") + f" {launch.kill_sentence(node, kill)}"
    yield from _successors(rows)


@dataclass(frozen=True, slots=True)
class LastError:
    """The first error since the last answer; ``time`` is in microseconds since 1970."""

    node: str
    text: str
    time: int


def _last_error(cluster: Cluster, unit: UnitState) -> LastError | None:
    """Return the error for which a unit is not active; what healed since then is none."""
    if unit.active != "failed" and unit.sub != "auto-restart":
        return None
    entries = list(read_group_journal(cluster, lines=400).lines)
    answers = [
        number
        for number, (node, line) in enumerate(entries)
        if node == cluster.head.destination and line.text.startswith(ANSWERED)
    ]
    entries = entries[answers[-1] + 1 :] if answers else entries
    log, _nodes = read_journals(entries, {})
    if not log.lead:
        return None
    node, line = entries[log.lead.number - 1]
    return LastError(node, log.lead.text.strip(), line.time)


def _head_troubles(cluster: Cluster, head: NodeState) -> Iterator[Trouble]:
    """Yield what keeps the head from serving, or serves beside it."""
    unit = head.units[0]
    for watch in head.units:
        if watch.text and watch.unit != cluster.file.guard_unit:
            yield Trouble(watch.text)
    for stranger in head.strangers:
        yield Trouble(style("not the model", fg="red") + f" answers at {stranger}")
    if unit.active == "failed":
        tries = f"{head.starts} starts in an hour ({unit.result}, status {unit.status})"
        since = unit.since.partition(" ")[2]
        again = "`patchkit up` starts it again"
        yield Trouble(f"systemd gave up {since}, after {tries}; {again}")


def _server_troubles(cluster: Cluster, condition: ServerCondition) -> Iterator[Trouble]:
    """Yield what is wrong with a server whose unit is active, and with what watches it."""
    name, life = cluster.head.destination, condition.life
    if condition.unasked:
        yield Trouble(style("not asked", fg="red") + f" {name}: {condition.unasked}")
    word, colour = _LIVES.get(life.state if life else ANSWERS, ("", ""))
    if life and word and life.state != BLIND:  # else the head names who listens
        ends = (
            "; systemd starts it anew when its unit ends" if life.state == ENDED else ""
        )
        yield Trouble(style(word, fg=colour) + f" {name}: {life.text}{ends}")
    if condition.unwatched:
        line = f" {name}: {cluster.file.guard_unit} is {condition.unwatched}"
        what = "nothing restarts a server that hangs"
        cure = quoted("patchkit", "up", condition.model) if condition.model else ""
        yield Trouble(style("not watched", fg="red") + f"{line}: {what}", cure)


def _condition_word(condition: ServerCondition) -> str:
    """Return the word for the head's state, "" for what its unit says."""
    if condition.unasked:
        return "not asked"
    return _LIVES.get(condition.life.state, ("", ""))[0] if condition.life else ""


def _row(
    number: int, state: NodeState | PatchkitError, head_word: str
) -> tuple[str, ...]:
    if isinstance(state, PatchkitError):
        return str(number), style("silent", fg="red"), "", "", "", ""
    unit = state.units[0]
    word, colour = _STATES.get(unit.sub) or _STATES.get(
        unit.active, (unit.active, None)
    )
    if number == 0 and head_word:
        word = head_word
        colour = dict(_LIVES.values()).get(head_word, "red")
    elif number and unit.active == "active":
        word = "runs"  # that it answers the head alone knows
    return (
        str(number),
        style(word, fg=colour) if colour else word,
        unit.since.partition(" ")[2] if unit.active != "inactive" else "",
        f"{state.starts} in 1 h" if number == 0 else "",
        _free_memory(state.memory),
        _heat(state),
    )


def _free_memory(memory: Memory | None) -> str:
    if memory is None:
        return "?"
    total = memory.total / KIB_PER_GIB
    return f"{memory.available / KIB_PER_GIB:.0f} of {total:.0f} GiB free"


def _heat(state: NodeState) -> str:
    heat = [f"{state.celsius} °C"] if state.celsius is not None else []
    heat += [f"{state.watts:.0f} W"] if state.watts is not None else []
    return " ".join(heat)


@click.command("logs")
@cluster_option
@click.option("-f", "--follow", is_flag=True, help="Go on as lines come, until Ctrl-C.")
@click.option(
    "--node", "nodes", multiple=True, metavar="N", help="This node's alone; repeat."
)
@click.option(
    "--since", default="", metavar="WHEN", help="As journalctl takes it: '10 min ago'."
)
@click.option("-n", "--lines", type=click.IntRange(1), default=100, show_default=True)
@rendered
def logs_command(
    *, cluster: Cluster, follow: bool, nodes: tuple[str, ...], since: str, lines: int
) -> Iterator[Block]:
    """Show what all ranks wrote, merged by time, by this machine's clock.

    Each node's journal keeps it; --json prints a line of JSON for each. --since is by each node's
    own clock. The exit code is 9 if a node is silent.
    """
    known = [node.destination for node in cluster.nodes]
    if strange := [node for node in nodes if node not in known]:
        raise UsageError(
            f"--node {strange[0]}: no such node", hint=f"one of {', '.join(known)}"
        )
    width = max(map(len, known))
    newest = 0 if since else lines
    journal = read_group_journal(
        cluster, since=since, lines=newest, nodes=nodes, follow=follow
    )
    if follow:
        # The error at the end is never reached by somebody who follows until Ctrl-C.
        for error in tuple(journal.silent.values()):
            yield style("silent", fg="red") + f" {error.what}"
            yield style("next:", bold=True) + f" {spelled(error.hint)}"

    for node, raw in journal.lines:
        line = replace(raw, text=mask_secrets(raw.text))
        yield Record({"node": node, **record_fields(line)}, line=True)
        clock = time.strftime("%H:%M:%S", time.localtime(line.time / 1e6))
        head = style(f"{clock} {node.ljust(width)} ", dim=True)
        yield LaidOut(head + line.text)
    all_of(list(journal.silent.values()))
