"""Show and stop what a cluster serves: `patchkit cluster status`, `logs` and `down`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, replace

import click

from patchkit.cli.alive import unwatched
from patchkit.cli.cluster.cluster_options import BREAK_LOCK, cluster_or_here
from patchkit.cli.next_step import next_step, program
from patchkit.cli.out import LaidOut, as_json, echo, print_json, say, shown, style, table
from patchkit.cluster.agent.journal import JournalLine
from patchkit.cluster.agent.unit_state import NodeState, UnitState
from patchkit.cluster.launch import start, stop
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.ssh.everywhere import all_of
from patchkit.doctor.symptoms.journals import first_error
from patchkit.errors import HostError, PatchkitError, UsageError
from patchkit.runtime.rules.secret_texts import mask_secrets
from patchkit.units import KIB_PER_GIB

_HEADS = ("node", "rank", "state", "since", "starts", "memory", "GPU")
_EMPTY = ("",) * (len(_HEADS) - 3)  # of a node that says nothing
_STATES = {
    "active": ("answers", "green"),
    "activating": ("loading", "yellow"),
    "failed": ("failed", "red"),
    "inactive": ("stopped", None),
    "deactivating": ("stopping", "yellow"),
}


@click.command()
@cluster_or_here
@as_json
def status(*, cluster: Cluster, as_json: bool) -> None:
    """Show the state of every node: what systemd says, memory, temperature, the last error.

    The exit code is 0 while the model answers, 9 if it does not or a node is silent.
    """
    states = cluster.states()
    silent = [each for each in states if isinstance(each, PatchkitError)]
    unit = states[0].unit(cluster.file.unit) if isinstance(states[0], NodeState) else None
    hangs = _hanging(cluster) if unit and unit.active == "active" else None
    notes = list(_notes(states[0], unit)) if isinstance(states[0], NodeState) else []
    well = bool(unit and unit.active == "active") and not (silent or hangs or notes)
    error = None
    if unit and (unit.active == "failed" or unit.sub == "auto-restart"):
        error = first_error(start.journals(cluster, lines=400).lines)
    if as_json:
        print_json(
            {
                "answers": well,
                "hangs": hangs,
                "serves": unit.description if unit else None,
                "nodes": [_fields(*each) for each in zip(cluster.nodes, states, strict=True)],
                "error": {"node": error[0], "text": error[1].text} if error else None,
            }
        )
    else:
        if unit:
            say(style(unit.description, bold=True))
        rows = [_row(cluster, number, state, hangs) for number, state in enumerate(states)]
        echo(table(rows, heads=_HEADS))
        for note in notes:
            say(note)
        for why in silent:
            say(style("silent", fg="red") + f" {why.what}")
        if hangs:
            say(style("hangs", fg="red") + f" {cluster.head.destination}: {hangs}")
        if error:
            say(style("last error", fg="red") + f" {error[0]}: {error[1].text.strip()}")
        if error or silent or hangs:
            here = cluster.head.here and len(states) == 1
            echo([next_step(*program(), "doctor", *([] if here else ["--cluster"]))])
    if not well:
        raise click.exceptions.Exit(HostError.exit_code)


def _notes(head: NodeState, unit: UnitState | None) -> Iterator[str]:
    """Yield what keeps the head from serving, or serves beside it."""
    for each in head.units:
        if each.text:
            yield each.text
    for stranger in head.strangers:
        yield style("not the model", fg="red") + f" answers at {stranger}"
    if unit and unit.active == "failed":
        yield (
            f"systemd gave up {unit.since.partition(' ')[2]}, after {head.starts} starts in an "
            f"hour ({unit.result}, status {unit.status}); `patchkit cluster up` starts it again"
        )


def _hanging(cluster: Cluster) -> str | None:
    """Return since when the head's server gives no token, and why; None if it gives one."""
    try:
        if not (why := start.token_silence(cluster)):
            return None
    except PatchkitError as error:
        why = error.what
    written = start.journals(cluster, lines=200, nodes=[cluster.head.destination]).lines
    # What it wrote about being asked says nothing of the model.
    last = [line for _node, line in written if " HTTP/1." not in line.text]
    since = f"{_clock(last[-1])}, when it wrote its last line" if last else "an unknown time"
    return f"since {since}: {why}"


def _fields(node: object, state: NodeState | PatchkitError) -> dict[str, object]:
    destination = getattr(node, "destination", "")
    if isinstance(state, PatchkitError):
        return {"node": destination, "error": state.what}
    return {"node": destination, **asdict(state)}


def _row(
    cluster: Cluster, number: int, state: NodeState | PatchkitError, hangs: str | None
) -> tuple[str, ...]:
    name = cluster.nodes[number].destination
    if isinstance(state, PatchkitError):
        return style(name, bold=True), str(number), style("silent", fg="red"), *_EMPTY
    unit = state.unit(cluster.file.unit)
    assert unit is not None
    word, colour = ("hangs", "red") if hangs and not number else _word(unit, number)
    heat = [f"{state.celsius} °C"] if state.celsius is not None else []
    heat += [f"{state.watts:.0f} W"] if state.watts is not None else []
    memory = state.memory
    free = (
        f"{memory.available / KIB_PER_GIB:.0f} of {memory.total / KIB_PER_GIB:.0f} GiB free"
        if memory
        else "?"
    )
    return (
        style(name, bold=True),
        str(number),
        style(word, fg=colour) if colour else word,
        unit.since.partition(" ")[2] if unit.active != "inactive" else "",
        f"{state.starts} in 1 h" if number == 0 else "",
        free,
        " ".join(heat),
    )


def _word(unit: UnitState, number: int) -> tuple[str, str | None]:
    word, colour = _STATES.get(unit.active, (unit.active, None))
    if number and unit.active == "active":
        return "runs", colour  # that it answers the head alone knows
    waits = {"auto-restart": "waits to restart", "waiting": "waits"}
    return (waits[unit.sub], "yellow") if unit.sub in waits else (word, colour)


@click.command()
@cluster_or_here
@click.option("-f", "--follow", is_flag=True, help="Go on as lines come, until Ctrl-C.")
@click.option("--node", "nodes", multiple=True, metavar="N", help="This node's alone; repeat.")
@click.option("--since", default="", metavar="WHEN", help="As journalctl takes it: '10 min ago'.")
@click.option("-n", "--lines", type=click.IntRange(1), default=100, show_default=True)
@as_json
def logs(
    *,
    cluster: Cluster,
    follow: bool,
    nodes: tuple[str, ...],
    since: str,
    lines: int,
    as_json: bool,
) -> None:
    """Show what all ranks wrote, merged by time, by this machine's clock.

    Each node's journal keeps it; --json prints a line of JSON for each. --since is by each node's
    own clock. The exit code is 9 if a node is silent.
    """
    known = [each.destination for each in cluster.nodes]
    if strange := [each for each in nodes if each not in known]:
        raise UsageError(f"--node {strange[0]}: no such node", hint=f"one of {', '.join(known)}")
    width = max(map(len, known))
    found = start.journals(
        cluster, since=since, lines=0 if since else lines, nodes=nodes, follow=follow
    )
    with unwatched():
        for node, raw in found.lines:
            line = replace(raw, text=mask_secrets(raw.text))
            if as_json:
                print_json({"node": node, **asdict(line)})
            else:
                say(_line(node.ljust(width), line))
    if found.skew:
        say(f"{found.skew}: these lines are in order", err=True)
    all_of(list(found.silent.values()))


def _line(node: str, line: JournalLine) -> LaidOut:
    return LaidOut(style(f"{_clock(line)} {node} ", dim=True) + shown(line.text))


def _clock(line: JournalLine) -> str:
    return time.strftime("%H:%M:%S", time.localtime(line.time / 1e6))


@click.command()
@cluster_or_here
@BREAK_LOCK
@click.option("--dry-run", is_flag=True, help="Show what would be stopped.")
@as_json
def down(*, cluster: Cluster, break_lock: bool, dry_run: bool, as_json: bool) -> None:
    """Stop the model on every node, and check: no unit, no process, the memory back.

    It does not come back after a reboot until the next `up`. A node that did not answer is named.
    """
    if dry_run:
        echo(_would_stop(cluster))
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(HostError):  # a head that is off keeps nobody out
            stack.enter_context(replace(cluster, break_lock=break_lock).alone())
        results = stop.stopped(cluster)
    if as_json:
        nodes = zip(cluster.nodes, results, strict=True)
        print_json({"nodes": [_down_fields(node.destination, each) for node, each in nodes]})
    else:
        for node, result in zip(cluster.nodes, results, strict=True):
            echo(_down_lines(node.destination, result))
    stop.check_stopped(cluster, results)


def _would_stop(cluster: Cluster) -> Iterator[str]:
    for node in cluster.nodes:
        units = cluster.units if node == cluster.head else [cluster.file.unit]
        yield f"{node.destination}: systemctl --user disable --now {' '.join(units)}"


def _down_fields(node: str, result: stop.StoppedNode | PatchkitError) -> dict[str, object]:
    if isinstance(result, PatchkitError):
        return {"node": node, "error": result.what}
    return {"node": node, "problem": result.problem, **asdict(result)}


def _down_lines(node: str, result: stop.StoppedNode | PatchkitError) -> Iterator[str]:
    if isinstance(result, PatchkitError):
        yield style("✗", fg="red") + f" {result.what}"
        return
    after = result.state.memory
    memory = ""
    if after and result.before is not None:
        before, now = result.before / KIB_PER_GIB, after.available / KIB_PER_GIB
        memory = f", memory {before:.1f} → {now:.1f} GiB free"
    bad = result.problem
    mark = style("✗", fg="red") if bad else style("✓", fg="green")
    yield mark + f" {node}: {bad or 'stopped, no process left'}{memory}"
