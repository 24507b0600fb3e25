"""Start, stop and show a model: `patchkit up`, `down`, `logs`, `switch`, `status`."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import click

from patchkit.cli.cluster.cluster_options import cluster_option, node_fields
from patchkit.cli.out import (
    LaidOut,
    bold,
    dim,
    next_hint,
    next_step,
    next_verb,
    record_fields,
    style,
    table,
    tell,
)
from patchkit.cli.render import (
    GOOD,
    Blocks,
    ExitCode,
    Lines,
    Record,
    Row,
    finding_blocks,
    lead_word,
    note,
    options_of,
    rendered,
)
from patchkit.cli.runtime.node_options import memory_lines, note_lines
from patchkit.cluster.agent.group_script import ANSWERED
from patchkit.cluster.agent.judge import BLIND, ENDED
from patchkit.cluster.agent.memory_record import STAYS_DOWN
from patchkit.cluster.agent.node_state import OFF, NodeState, UnitState
from patchkit.cluster.launch import up as launch
from patchkit.cluster.launch.cluster import (
    Cluster,
    check_stopped,
    end_left_nodes,
    read_group_journal,
    stop_command,
    stop_group,
)
from patchkit.cluster.launch.survey import image_finding
from patchkit.cluster.launch.up import ServerCondition, server_condition
from patchkit.cluster.openai.server_answers import ServerSpeed
from patchkit.cluster.ssh.node import Remote, require_all
from patchkit.cluster.ssh.ssh import ssh_command
from patchkit.doctor.answer_check import again_command, check_answers
from patchkit.doctor.machine import disk_trouble
from patchkit.doctor.symptoms.findings import explain_failed_start, read_journals
from patchkit.durable.signals import Interrupted
from patchkit.errors import HostError, PatchkitError, UsageError
from patchkit.finding import Finding, Level, worst
from patchkit.foreign import clock_text
from patchkit.frozen import Fields, Texts
from patchkit.quoting import quoted
from patchkit.records import RECIPES, read_toml
from patchkit.runtime.host.host import Memory
from patchkit.runtime.rules.secret_texts import mask_secrets
from patchkit.units import KIB_PER_GIB

_MODEL = options_of("model")
_SPEAKING = ("waiting", "busy")  # sub-states in which a unit has a text of its own
_HEADS = ("node", "rank", "state", "since", "starts", "memory", "GPU")
_Word = tuple[str, str]  # with its colour, "" for none
_FEW_ACCEPTED = 0.2  # of drafted tokens: fewer rarely pay for the drafting
_WORDS = RECIPES / "units/words.toml"
_UNIT_WORDS = read_toml(dict[str, str], _WORDS, key="step")
_STATES = read_toml(dict[str, _Word], _WORDS, key="state")
_LIVES = read_toml(dict[str, _Word], _WORDS, key="life")
# The line of a fault that keeps a model from being served, and its cure: "" leaves it to doctor.
_Trouble = tuple[str, str]
_Rows = Sequence[tuple[Remote, NodeState | PatchkitError]]
_States = Sequence[tuple[Remote, NodeState]]  # without nodes that gave an error


@click.command
@_MODEL
@cluster_option
@rendered
def up_command(model: str, cluster: Cluster) -> Blocks:
    """Start a model, here or on the nodes of cluster.toml; return when it has answered.

    \b
      patchkit up openai/gpt-oss-20b

    Writes env files and units on each node, as `patchkit env` and `patchkit serve-args` would say
    there, and starts the head. If the same model already runs with the same files, nothing changes.
    systemd keeps it running after the terminal closes, after a crash and after a reboot. Ctrl-C
    only detaches; `patchkit down` stops the model.
    """
    watcher = _watch_start(cluster)
    units, since = launch.bring_up(cluster, model, watcher)
    nodes = ", ".join(node.destination for node in cluster.nodes)
    what = "is started" if since else "runs with these files already"
    yield GOOD + f"{units.model.name} {what} on {nodes}"

    command = units.ranks[0].command
    if since:
        notes = note_lines(command.limits, command.advice)
        for line in [*memory_lines(command.plan), *notes]:
            tell(line)

    _wait_attached(lambda: launch.wait_until_answered(cluster, since, watcher))
    yield from _answered_blocks(cluster, units.model.name, units.url, since)


@click.command
@_MODEL
@cluster_option
@rendered
def switch_command(model: str, cluster: Cluster) -> Blocks:
    """Serve another model; if it does not answer, serve the former one again.

    The former model is stopped first, and its memory is freed. vLLM's sleep mode is not used.
    """
    watcher = _watch_start(cluster)
    since = _wait_attached(lambda: launch.switch_model(cluster, model, watcher))
    yield from _answered_blocks(cluster, model, "", since)


def _wait_attached(wait: Callable[[], object]) -> object:
    """Wait. If Ctrl-C interrupts, the head's systemd goes on; print how to watch it again."""
    try:
        return wait()
    except Interrupted:
        tell("")
        tell(next_verb("status"))
        raise


def _watch_start(cluster: Cluster) -> launch.StartWatcher:
    """Return a watcher that tells each change of a starting unit, and why a start failed."""
    last_line: str | None = None

    def tell_unit(unit: UnitState, seconds: float) -> None:
        nonlocal last_line
        line = _UNIT_WORDS.get(unit.sub, unit.sub)
        if unit.sub in _SPEAKING and unit.text:
            line = unit.text
        if line != last_line:
            last_line = line
            head = cluster.head.destination
            tell(dim(f"  {seconds:5.0f} s  {head}: {line}"))

    return launch.StartWatcher(
        tell=tell_unit,
        explain=explain_failed_start,
        note=lambda text: tell(note(text)),
    )


def _answered_blocks(cluster: Cluster, model: str, url: str, since: object) -> Blocks:
    """Report that a model answers, and name the command that asks its server.

    A model that served before, without ``since``, is left to its users.
    """
    yield {
        "model": model,
        "url": url,
        "answered": True,
    }
    yield GOOD + f"{model} answers"
    findings: Sequence[Finding] = []
    if since:
        tell(dim("  asking it what it should know, for 90 s at most"))
        findings = check_answers(cluster)
    else:
        yield f"answers: not asked again; to ask: {again_command(cluster)}"
    yield {"answers": findings}
    for finding in findings:
        if finding.level is Level.OK:
            yield f"answers: {finding.what}"
        else:
            yield from finding_blocks([finding])

    if url:
        where = "" if cluster.head.here else f"on {cluster.head.destination}"
        yield next_step("curl", f"{url}/v1/models", where=where)
    yield ExitCode(worst(findings))


@click.command
@cluster_option
@rendered
def down_command(cluster: Cluster) -> Blocks:
    """Stop the model on every node, and check: no unit, no process, the memory back.

    It stays down, even after a reboot, until you run `up`. A node that did not answer is named.
    """
    with contextlib.ExitStack() as stack:
        # Go on without the lock if the head is off.
        with contextlib.suppress(HostError):
            stack.enter_context(cluster.alone())
        results = stop_group(cluster)
        remains = end_left_nodes(cluster, results)

    nodes = []
    for node, result in zip(cluster.nodes, results, strict=True):
        nodes.append(node_fields(node.destination, result))
        # A node that is silent, or where something is left, is an error at the end.
        if isinstance(result, NodeState) and not result.left:
            text = "stopped, no process left"
            if result.others:
                text = f"stopped; {other_clusters(node, result)}"
            yield GOOD + f"{node.destination}: {text}"

    yield {"nodes": nodes}
    check_stopped(cluster, results, remains)


def other_clusters(node: Remote, state: NodeState) -> str:
    """Return which other clusters run on a node, and the command that stops one on its head."""
    names = []
    for name, is_head in state.others.items():
        stop = f" (stop: `{stop_command(node, name)}`)" if is_head else ""
        names.append(name + stop)
    return f"other clusters run here: {', '.join(names)}"


@click.command
@cluster_option
@options_of("logs")
@rendered
def logs_command(
    cluster: Cluster, follow: bool, nodes: Texts, since: str, lines: int
) -> Blocks:
    """Show the output of all ranks, merged by time, by this machine's clock.

    Each node's journal keeps it; --json prints a line of JSON for each. --since is by each node's
    own clock. The exit code is 9 if a node gives none.
    """
    names = [node.destination for node in cluster.nodes]
    for node in nodes:
        if node not in names:
            hint = f"one of {', '.join(names)}"
            raise UsageError(f"--node {node}: no such node", hint=hint)

    newest = 0 if since else lines
    journal = read_group_journal(
        cluster, since=since, lines=newest, nodes=nodes, follow=follow
    )

    if follow:
        # A user who follows until Ctrl-C never sees an error that comes at the end.
        for error in journal.silent.values():
            yield lead_word("no journal", "red") + error.what
            yield next_hint(error.hint)

    width = max(map(len, names))
    for node, raw in journal.lines:
        line = replace(raw, text=mask_secrets(raw.text))
        yield Record({"node": node, **record_fields(line)}, line=True)

        clock = time.strftime("%H:%M:%S", time.localtime(line.time / 1e6))
        head = dim(f"{clock} {node.ljust(width)} ")
        yield LaidOut(head + line.text)

    require_all(list(journal.silent.values()))


@click.command
@cluster_option
@rendered
def status_command(cluster: Cluster) -> Blocks:
    """Show the state of every node: what systemd says, memory, temperature, the last error.

    The exit code is 0 while the model answers and is watched, 9 if not, or if a node has no state.
    """
    rows = list(zip(cluster.nodes, cluster.states(), strict=True))
    states = [(node, state) for node, state in rows if isinstance(state, NodeState)]
    first = rows[0][1]
    head = first if isinstance(first, NodeState) else None
    server = head.units[0] if head else None

    condition = server_condition(cluster, head)
    error = _last_error(cluster, server) if server else None
    troubles = [
        *_head_troubles(cluster, head),
        *_node_troubles(cluster, rows),
        *_source_troubles(states),
        *_server_troubles(cluster, condition),
    ]
    is_well = condition.answers and not troubles
    description = getattr(server, "description", None)

    yield {
        "answers": is_well,
        "hangs": condition.hangs or None,
        "server": condition,
        "serves": description,
        "nodes": [node_fields(node.destination, state) for node, state in rows],
        "error": error,
    }

    if description:
        yield bold(description)

    yield from _node_table(rows, condition)
    yield from (line for line, _cure in troubles)
    yield from _notes(cluster, condition, states)

    if error:
        text = f"{clock_text(error['time'] / 1e6)} {error['node']}: {error['text']}"
        yield lead_word("last error", "red") + text

    if error or troubles:
        yield _next_of(cluster, troubles)

    if not is_well:
        yield ExitCode(HostError.exit_code)


def _last_error(cluster: Cluster, unit: UnitState) -> Fields | None:
    """Return the first error in the journal of a unit that failed or is about to be restarted.

    Only lines after the last time that the model answered count. Returns None for a unit in another
    state. ``time`` is in microseconds since 1970.
    """
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
    return {"node": node, "text": log.lead.text.strip(), "time": line.time}


def _next_of(cluster: Cluster, troubles: Sequence[_Trouble]) -> str:
    """Return the first known cure, or else the command that finds one."""
    for _line, cure in troubles:
        if cure:
            return next_hint(cure)

    return next_verb("doctor", *cluster.doctor_options)


# Troubles: any of them makes the exit code 9


def _trouble(word: str, text: str, cure: str = "") -> _Trouble:
    return lead_word(word, "red") + text, cure


def _head_troubles(cluster: Cluster, head: NodeState | None) -> Iterator[_Trouble]:
    """Yield the faults of the head's units, and servers that are not the model."""
    if head is None:
        return

    for unit in head.units:
        if unit.text and unit.unit not in (cluster.guard_unit, cluster.memory_unit):
            yield unit.text, ""

    for stranger in head.strangers:
        yield _trouble("not the model", f"answers at {stranger}")

    server = head.units[0]
    if server.active == "failed":
        result = f"{server.result}, status {server.status}"
        starts = f"{head.starts} starts in an hour ({result})"
        again = "`patchkit up` starts it again"
        end = f"systemd gave up {_since(server)}, after {starts}"
        if head.memory_stop and STAYS_DOWN in head.memory_stop.after:
            end = f"stopped {_since(server)}, after {head.starts} starts, for memory"
        yield f"{end}; {again}", ""


def _node_troubles(cluster: Cluster, rows: _Rows) -> Iterator[_Trouble]:
    """Yield faults of nodes: no state, in another order than at the start, without its address."""
    states = [state for _node, state in rows if isinstance(state, NodeState)]
    names = [node.destination for node, _state in rows]
    models = filter(None, (state.model for state in states))
    again = quoted("patchkit", "up", next(models, "MODEL"))

    starts = {state.members for state in states if state.serves}
    for members in starts - {tuple(names)}:
        # Only the same names in another order are a fault: others may be another launcher's.
        if sorted(members) == sorted(names):
            line = f"{members[0]} is the head of the running start"
            line += f", but cluster.toml lists {names[0]} first"
            yield _trouble("head", line, again)

    for member, (node, state) in zip(cluster.members, rows, strict=True):
        if isinstance(state, PatchkitError):
            yield _trouble("no state", state.what, state.hint)
            continue

        guard = state.unit(cluster.memory_unit)
        if guard and guard.active in OFF and state.serves and state.memory_floor:
            text = f"{node.destination}: {guard.unit} is {guard.active}"
            text += ": nothing ends the rank before memory is used up"
            words = ("systemctl", "--user", "restart", guard.unit)
            yield _trouble("not watched", text, ssh_command(node.destination, *words))

        if lost := state.troubles.lost:
            name = node.destination
            line = f"{name} no longer has {lost}, the address it was started with"
            line += f"; it has {' and '.join(state.troubles.addresses)}"
            cure = again
            if member.address == lost:
                cure = f"correct `address` of {name} in cluster.toml; then `{again}`"
            yield _trouble("address", line, cure)


def _source_troubles(states: _States) -> Iterator[_Trouble]:
    """Yield faults of the engine or the image that a node serves from, with their cures."""
    for node, state in states:
        if state.image and state.units[0].active != "inactive":
            fault = image_finding(node.destination, state.image)
            text = f"{node.destination}: {fault.what}"
            yield _trouble("next start", text, fault.hint)


def _server_troubles(
    cluster: Cluster, condition: ServerCondition
) -> Iterator[_Trouble]:
    """Yield faults of a server whose unit is active, and a missing watch."""
    name = cluster.head.destination
    life = condition.life
    if condition.unasked:
        yield _trouble("not asked", condition.unasked)  # names the node

    # BLIND is left out: _head_troubles() names the program that listens in the model's place.
    if life and life.state in _LIVES and life.state != BLIND:
        word, colour = _LIVES[life.state]
        text = f"{name}: {life.text}"
        if life.state == ENDED:
            text += "; systemd starts it anew when its unit ends"
        yield lead_word(word, colour) + text, ""

    if condition.unwatched:
        unit = f"{cluster.guard_unit} is {condition.unwatched}"
        cure = quoted("patchkit", "up", condition.model) if condition.model else ""
        text = f"{name}: {unit}: nothing restarts a server that hangs"
        yield _trouble("not watched", text, cure)


# Notes: worth knowing, and no fault


def _notes(cluster: Cluster, condition: ServerCondition, states: _States) -> Lines:
    """Yield the watch, the notes of each node, and what was installed while the model runs."""
    if condition.watch:
        text = f" {cluster.head.destination}: {condition.watch.text}"
        yield dim("watch") + text

    if condition.speed:
        yield from _speed_notes(condition.speed)

    stops = [state.memory_stop.text for _node, state in states if state.memory_stop]
    for node, state in states:
        yield from _node_notes(node, state)
        yield from _memory_notes(node, state, cluster.memory_unit, stops)

    for node, state in states:
        if state.successor and state.serves:
            yield lead_word("installed") + f"{node.destination}: {state.successor}"


def _speed_notes(speed: ServerSpeed) -> Lines:
    """Yield the speed beside what the memory allows, and what drafts bring if few are accepted."""
    text = f" {speed.now:.3g} tok/s now"
    if speed.most:
        text += f"; at most {speed.most:.3g} for {speed.requests:.3g} at once"
        text += ", by the memory's bandwidth"

    accepted = speed.accepted
    if accepted is not None:
        text += f"; {100 * accepted:.3g} % of drafted tokens accepted"
    yield dim("speed") + text

    if accepted is not None and accepted < _FEW_ACCEPTED:
        yield note(
            f"a step drafts and checks {speed.drafted:.3g} tokens and keeps "
            f"{speed.drafted * accepted:.2g}: it may be faster without drafts"
        )


def _node_notes(node: Remote, state: NodeState) -> Lines:
    name = node.destination
    if state.frozen:
        yield lead_word("restarted") + state.frozen
    if state.answers and state.serves:
        yield dim("answers") + f" {state.answers}"

    # A renamed cluster goes on serving under its former name; but two clusters may be intended.
    if any(state.others.values()):
        yield f"{name}: {other_clusters(node, state)}"

    for disk in state.troubles.disks:
        if trouble := disk_trouble(disk):
            text = f"{name}: {disk.folder}: {trouble}; a rank that ends may not start again"
            yield lead_word("full") + text

    for kill in state.troubles.killed:
        yield lead_word("killed") + f"{name}: {kill}, for memory"


def _memory_notes(
    node: Remote, state: NodeState, guard: str, stops: Sequence[str]
) -> Lines:
    """Yield what the memory guard of a node says: now, and when it last ended the rank.

    A worker's kill is among the ``stops`` a second time, with its name: as the head was told of it.
    """
    name = node.destination
    unit = state.unit(guard)
    if unit and unit.text:
        yield lead_word("memory") + f"{name}: {unit.text}"

    stop = state.memory_stop
    if stop and f"{name}: {stop.text}" not in stops:
        text = "; ".join(filter(None, (stop.text, stop.after)))
        yield lead_word("memory") + f"{clock_text(stop.time)} {name}: {text}"


# The table of nodes


def _node_table(rows: _Rows, condition: ServerCondition) -> Lines:
    """Yield a row for each node; the head's has the state of its server."""
    cells: list[Row] = []
    for number, (node, state) in enumerate(rows):
        row: Row = (style("no state", fg="red"), "", "", "", "")
        if isinstance(state, NodeState):
            row = _state_cells(state, None if number else condition)
        cells.append((bold(node.destination), str(number), *row))

    yield from table(cells, heads=_HEADS)


def _state_cells(state: NodeState, condition: ServerCondition | None) -> Row:
    """Return the cells of a node; a worker has no ``condition``."""
    unit = state.units[0]
    title, colour = _state_word(unit, condition)
    return (
        style(title, fg=colour) if colour else title,
        _since(unit) if unit.active != "inactive" else "",
        f"{state.starts} in 1 h" if condition else "",
        _free_memory(state.memory),
        _heat(state),
    )


def _state_word(unit: UnitState, condition: ServerCondition | None) -> _Word:
    """Return the word for a node's state: only the head knows whether the model answers."""
    fallback = _STATES.get(unit.active, (unit.active, ""))
    word = _STATES.get(unit.sub, fallback)
    if condition is None:
        return ("runs", word[1]) if unit.active == "active" else word
    if condition.unasked:
        return "not asked", "red"
    return _LIVES.get(condition.life.state, word) if condition.life else word


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
