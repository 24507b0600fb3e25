"""Show the state of every node, and of the server: `patchkit status`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click

from patchkit.cli.cluster.cluster_options import cluster_option, node_fields
from patchkit.cli.cluster.serve import other_clusters
from patchkit.cli.out import (
    bold,
    dim,
    next_hint,
    next_verb,
    record_fields,
    style,
    table,
)
from patchkit.cli.render import (
    Blocks,
    ExitCode,
    Lines,
    Record,
    Row,
    lead_word,
    rendered,
)
from patchkit.cluster.agent.group_script import ANSWERED
from patchkit.cluster.agent.judge import (
    BLIND,
    DOUBT,
    ENDED,
    LIVES,
    REFUSES,
    WORKS,
)
from patchkit.cluster.agent.node_state import NodeState
from patchkit.cluster.agent.unit_state import UnitState
from patchkit.cluster.launch.cluster import Cluster, read_group_journal
from patchkit.cluster.launch.cluster_file import ClusterNode
from patchkit.cluster.launch.condition import ServerCondition, server_condition
from patchkit.cluster.launch.survey import image_finding
from patchkit.cluster.ssh.node import Remote
from patchkit.doctor.machine import disk_trouble
from patchkit.doctor.symptoms.findings import read_journals
from patchkit.errors import HostError, PatchkitError
from patchkit.quoting import quoted
from patchkit.runtime.host.host import Memory
from patchkit.units import KIB_PER_GIB

_HEADS = ("node", "rank", "state", "since", "starts", "memory", "GPU")
# Word and colour by a unit's sub-state, or else by its state.
_STATES: dict[str, tuple[str, str | None]] = {
    "auto-restart": ("waits to restart", "yellow"),
    "waiting": ("waits", "yellow"),
    "active": ("answers", "green"),
    "activating": ("loading", "yellow"),
    "failed": ("failed", "red"),
    "inactive": ("stopped", None),
    "deactivating": ("stopping", "yellow"),
}
# Word and colour by the state of a server whose unit is active, but from which no token came.
_LIVES = {
    LIVES: ("busy", "yellow"),
    WORKS: ("works", "yellow"),
    BLIND: ("not the model", "red"),
    REFUSES: ("refuses", "red"),
    ENDED: ("ended", "red"),
    DOUBT: ("hangs", "red"),
}
_Row = tuple[Remote, NodeState | PatchkitError]
_Word = tuple[str, str | None]


@dataclass(frozen=True, slots=True)
class Trouble:
    """A fault that keeps a model from being served; ``cure`` is "" if doctor has to find it."""

    line: str
    cure: str = ""


@dataclass(frozen=True, slots=True)
class LastError:
    """The first error since the last answer; ``time`` is in microseconds since 1970."""

    node: str
    text: str
    time: int


@click.command
@cluster_option
@rendered
def status_command(*, cluster: Cluster) -> Blocks:
    """Show the state of every node: what systemd says, memory, temperature, the last error.

    The exit code is 0 while the model answers and is watched, 9 if not, or if a node is silent.
    """
    rows = list(zip(cluster.nodes, cluster.states(), strict=True))
    head = _head_state(rows)
    condition = server_condition(cluster, head)
    error = _last_error(cluster, head.units[0]) if head else None
    troubles = list(_troubles(cluster, head, condition, rows))
    is_well = condition.answers and not troubles
    description = head.units[0].description if head else None

    yield Record(
        {
            "answers": is_well,
            "hangs": condition.hangs or None,
            "server": record_fields(condition),
            "serves": description,
            "nodes": [node_fields(node.destination, state) for node, state in rows],
            "error": record_fields(error) if error else None,
        }
    )
    if description:
        yield bold(description)
    yield from _node_table(rows, _condition_word(condition))
    yield from (trouble.line for trouble in troubles)
    yield from _notes(cluster, condition, rows)

    if error:
        yield _error_line(error)
    if error or troubles:
        yield _next_of(cluster, troubles)

    if not is_well:
        yield ExitCode(HostError.exit_code)


def _head_state(rows: Sequence[_Row]) -> NodeState | None:
    _node, state = rows[0]
    return state if isinstance(state, NodeState) else None


def _last_error(cluster: Cluster, unit: UnitState) -> LastError | None:
    """Return the error that keeps a unit from being active; None for an error that healed."""
    if unit.active != "failed" and unit.sub != "auto-restart":
        return None

    entries = list(read_group_journal(cluster, lines=400).lines)
    begin = 0
    for number, (node, line) in enumerate(entries, 1):
        if node == cluster.head.destination and line.text.startswith(ANSWERED):
            begin = number
    entries = entries[begin:]

    log, _nodes = read_journals(entries, {})
    if not log.lead:
        return None

    node, line = entries[log.lead.number - 1]
    return LastError(node, log.lead.text.strip(), line.time)


def _error_line(error: LastError) -> str:
    clock = time.strftime("%F %T", time.localtime(error.time / 1e6))
    return lead_word("last error", "red") + f"{clock} {error.node}: {error.text}"


def _next_of(cluster: Cluster, troubles: Sequence[Trouble]) -> str:
    """Return the first known cure, or else the command that finds one."""
    for trouble in troubles:
        if trouble.cure:
            return next_hint(trouble.cure)

    is_alone = cluster.head.here and len(cluster.nodes) == 1
    return next_verb("doctor") if is_alone else next_verb("doctor", "--cluster")


def _answered(rows: Sequence[_Row]) -> Iterator[tuple[Remote, NodeState]]:
    """Yield the nodes that are not silent."""
    for node, state in rows:
        if isinstance(state, NodeState):
            yield node, state


# Troubles: any of them makes the exit code 9


def _troubles(
    cluster: Cluster,
    head: NodeState | None,
    condition: ServerCondition,
    rows: Sequence[_Row],
) -> Iterator[Trouble]:
    if head:
        yield from _head_troubles(cluster, head)
    yield from _node_troubles(cluster, rows)
    yield from _source_troubles(rows)
    yield from _server_troubles(cluster, condition)


def _trouble(word: str, text: str, cure: str = "") -> Trouble:
    return Trouble(lead_word(word, "red") + text, cure)


def _head_troubles(cluster: Cluster, head: NodeState) -> Iterator[Trouble]:
    """Yield the faults of the head's units, and servers that are not the model."""
    for unit in head.units:
        if unit.text and unit.unit != cluster.file.guard_unit:
            yield Trouble(unit.text)

    for stranger in head.strangers:
        yield _trouble("not the model", f"answers at {stranger}")

    server = head.units[0]
    if server.active == "failed":
        result = f"{server.result}, status {server.status}"
        starts = f"{head.starts} starts in an hour ({result})"
        again = "`patchkit up` starts it again"
        yield Trouble(f"systemd gave up {_since(server)}, after {starts}; {again}")


def _node_troubles(cluster: Cluster, rows: Sequence[_Row]) -> Iterator[Trouble]:
    """Yield which nodes are silent, have changed places, or lost the address of their start."""
    states = [state for _node, state in _answered(rows)]
    names = [node.destination for node, _state in rows]
    models = filter(None, (state.model for state in states))
    again = quoted("patchkit", "up", next(models, "MODEL"))
    yield from _swapped_heads(names, states, again)

    for member, (node, state) in zip(cluster.file.node, rows, strict=True):
        if isinstance(state, PatchkitError):
            yield _trouble("silent", state.what, state.hint)
        elif state.troubles.lost:
            yield _lost_address(member, node, state, again)


def _swapped_heads(
    names: Sequence[str], states: Sequence[NodeState], again: str
) -> Iterator[Trouble]:
    starts = {state.members for state in states if state.serves}
    for members in starts - {tuple(names)}:
        # Other names may be those of another launcher.
        if sorted(members) == sorted(names):
            line = f"{members[0]} is the head of the running start"
            line += f", but cluster.toml lists {names[0]} first"
            yield _trouble("head", line, again)


def _lost_address(
    member: ClusterNode, node: Remote, state: NodeState, again: str
) -> Trouble:
    lost = state.troubles.lost
    addresses = " and ".join(state.troubles.addresses)
    line = f"{node.destination} no longer has {lost}, the address it was started with"

    cure = again
    if member.address == lost:
        field = f"`address` of {node.destination} in cluster.toml"
        cure = f"correct {field}; then `{again}`"
    return _trouble("address", f"{line}; it has {addresses}", cure)


def _source_troubles(rows: Sequence[_Row]) -> Iterator[Trouble]:
    """Yield faults of the engine or the image that a node serves from, with their cures."""
    for node, state in _answered(rows):
        if state.image and state.units[0].active != "inactive":
            fault = image_finding(node.destination, state.image)
            text = f"{node.destination}: {fault.what}"
            yield _trouble("next start", text, fault.hint)


def _server_troubles(cluster: Cluster, condition: ServerCondition) -> Iterator[Trouble]:
    """Yield faults of a server whose unit is active, and of its watch."""
    name = cluster.head.destination
    life = condition.life
    if condition.unasked:
        yield _trouble("not asked", f"{name}: {condition.unasked}")

    # Of a blind server, the head's troubles name the program that listens.
    if life and life.state in _LIVES and life.state != BLIND:
        word, colour = _LIVES[life.state]
        text = f"{name}: {life.text}"
        if life.state == ENDED:
            text += "; systemd starts it anew when its unit ends"
        yield Trouble(lead_word(word, colour) + text)

    if condition.unwatched:
        unit = f"{cluster.file.guard_unit} is {condition.unwatched}"
        cure = quoted("patchkit", "up", condition.model) if condition.model else ""
        text = f"{name}: {unit}: nothing restarts a server that hangs"
        yield _trouble("not watched", text, cure)


# Notes: worth knowing, and no fault


def _notes(cluster: Cluster, condition: ServerCondition, rows: Sequence[_Row]) -> Lines:
    """Yield the watch, its last restart, other clusters, full disks, kills, installations."""
    if condition.watch:
        text = f" {cluster.head.destination}: {condition.watch.text}"
        yield dim("watch") + text
    for node, state in _answered(rows):
        yield from _node_notes(node, state)

    for node, state in _answered(rows):
        if state.successor and state.serves:
            yield lead_word("installed") + f"{node.destination}: {state.successor}"


def _node_notes(node: Remote, state: NodeState) -> Lines:
    name = node.destination
    if state.frozen:
        yield lead_word("restarted") + state.frozen

    # A cluster that was renamed serves on under its former name; two of them may be meant.
    if any(state.others.values()):
        yield f"{name}: {other_clusters(node, state)}"

    for disk in state.troubles.disks:
        if trouble := disk_trouble(disk):
            text = f"{name}: {disk.folder}: {trouble}; a rank that ends may not start again"
            yield lead_word("full") + text

    for kill in state.troubles.killed:
        text = f"on {node.destination} the kernel killed {kill}, for memory"
        yield lead_word("killed") + text


# The table of nodes


def _node_table(rows: Sequence[_Row], head_word: _Word | None) -> Lines:
    """Yield a row for each node; the head's has the state of its server."""
    cells: list[Row] = []
    row: Row
    for number, (node, state) in enumerate(rows):
        if isinstance(state, PatchkitError):
            row = (style("silent", fg="red"), "", "", "", "")
        elif number == 0:
            row = _state_cells(state, head_word or _unit_word(state.units[0]))
        else:
            row = _state_cells(state, _rank_word(state.units[0]), starts=False)
        cells.append((bold(node.destination), str(number), *row))

    yield from table(cells, heads=_HEADS)


def _state_cells(state: NodeState, word: _Word, *, starts: bool = True) -> Row:
    unit = state.units[0]
    title, colour = word
    return (
        style(title, fg=colour) if colour else title,
        _since(unit) if unit.active != "inactive" else "",
        f"{state.starts} in 1 h" if starts else "",
        _free_memory(state.memory),
        _heat(state),
    )


def _rank_word(unit: UnitState) -> _Word:
    """Return the word for a worker: only the head knows whether the model answers."""
    word, colour = _unit_word(unit)
    return ("runs", colour) if unit.active == "active" else (word, colour)


def _unit_word(unit: UnitState) -> _Word:
    fallback = _STATES.get(unit.active, (unit.active, None))
    return _STATES.get(unit.sub, fallback)


def _condition_word(condition: ServerCondition) -> _Word | None:
    """Return the word for the head's state; None where the word for its unit is right."""
    if condition.unasked:
        return "not asked", "red"
    return _LIVES.get(condition.life.state) if condition.life else None


def _since(unit: UnitState) -> str:
    """Return the time when a unit entered its state, without the day of the week."""
    return unit.since.partition(" ")[2]


def _free_memory(memory: Memory | None) -> str:
    if memory is None:
        return "?"
    total = memory.total / KIB_PER_GIB
    return f"{memory.available / KIB_PER_GIB:.0f} of {total:.0f} GiB free"


def _heat(state: NodeState) -> str:
    parts = []
    if state.celsius is not None:
        parts.append(f"{state.celsius} °C")
    if state.watts is not None:
        parts.append(f"{state.watts:.0f} W")
    return " ".join(parts)
