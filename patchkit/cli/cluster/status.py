"""Show what a cluster serves, and how its nodes are: `patchkit status`."""

from __future__ import annotations

from collections.abc import Iterator

import click

from patchkit.cli.cluster.cluster_options import cluster_option, format_clock, node_fields
from patchkit.cli.next_step import next_step, program
from patchkit.cli.out import style, table
from patchkit.cli.render import Block, ExitCode, Record, rendered
from patchkit.cluster.agent.unit_state import NodeState, UnitState
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.journals import read_group_journal
from patchkit.cluster.launch.start import token_silence
from patchkit.doctor.symptoms.findings import first_error
from patchkit.errors import HostError, PatchkitError
from patchkit.units import KIB_PER_GIB

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


@click.command("status")
@cluster_option
@rendered
def command(*, cluster: Cluster) -> Iterator[Block]:
    """Show the state of every node: what systemd says, memory, temperature, the last error.

    The exit code is 0 while the model answers, 9 if it does not or a node is silent.
    """
    states = cluster.states()
    silent = [state for state in states if isinstance(state, PatchkitError)]
    unit = states[0].unit(cluster.file.unit) if isinstance(states[0], NodeState) else None
    hangs = _hanging(cluster) if unit and unit.active == "active" else None
    notes = list(_head_notes(states[0], unit)) if isinstance(states[0], NodeState) else []
    well = bool(unit and unit.active == "active") and not (silent or hangs or notes)
    error = None
    if unit and (unit.active == "failed" or unit.sub == "auto-restart"):
        error = first_error(read_group_journal(cluster, lines=400).lines)
    rows = list(zip(cluster.nodes, states, strict=True))
    yield Record(
        {
            "answers": well,
            "hangs": hangs,
            "serves": unit.description if unit else None,
            "nodes": [node_fields(node.destination, state) for node, state in rows],
            "error": {"node": error[0], "text": error[1].text} if error else None,
        }
    )
    if unit:
        yield style(unit.description, bold=True)
    cells = [_row(cluster, number, state, hangs) for number, state in enumerate(states)]
    yield from table(cells, heads=_HEADS)
    yield from notes
    yield from (style("silent", fg="red") + f" {why.what}" for why in silent)
    if hangs:
        yield style("hangs", fg="red") + f" {cluster.head.destination}: {hangs}"
    if error:
        yield style("last error", fg="red") + f" {error[0]}: {error[1].text.strip()}"
    if error or silent or hangs:
        here = cluster.head.here and len(states) == 1
        yield next_step(*program(), "doctor", *([] if here else ["--cluster"]))
    if not well:
        yield ExitCode(HostError.exit_code)


def _head_notes(head: NodeState, unit: UnitState | None) -> Iterator[str]:
    """Yield what keeps the head from serving, or serves beside it."""
    for each in head.units:
        if each.text:
            yield each.text
    for stranger in head.strangers:
        yield style("not the model", fg="red") + f" answers at {stranger}"
    if unit and unit.active == "failed":
        yield (
            f"systemd gave up {unit.since.partition(' ')[2]}, after {head.starts} starts in an "
            f"hour ({unit.result}, status {unit.status}); `patchkit up` starts it again"
        )


def _hanging(cluster: Cluster) -> str | None:
    """Return since when the head's server gives no token, and why; None if it gives one."""
    try:
        if not (why := token_silence(cluster)):
            return None
    except PatchkitError as error:
        why = error.what
    written = read_group_journal(cluster, lines=200, nodes=[cluster.head.destination]).lines
    # What it wrote about being asked says nothing of the model.
    last = [line for _node, line in written if " HTTP/1." not in line.text]
    since = f"{format_clock(last[-1])}, when it wrote its last line" if last else "an unknown time"
    return f"since {since}: {why}"


def _row(
    cluster: Cluster, number: int, state: NodeState | PatchkitError, hangs: str | None
) -> tuple[str, ...]:
    name = style(cluster.nodes[number].destination, bold=True)
    if isinstance(state, PatchkitError):
        return name, str(number), style("silent", fg="red"), "", "", "", ""
    unit, memory = state.unit(cluster.file.unit), state.memory
    assert unit is not None
    word, colour = _STATES.get(unit.sub) or _STATES.get(unit.active, (unit.active, None))
    if hangs and number == 0:
        word, colour = "hangs", "red"
    elif number and unit.active == "active":
        word = "runs"  # that it answers the head alone knows
    heat = [f"{state.celsius} °C"] if state.celsius is not None else []
    heat += [f"{state.watts:.0f} W"] if state.watts is not None else []
    free = "?"
    if memory:
        total = memory.total / KIB_PER_GIB
        free = f"{memory.available / KIB_PER_GIB:.0f} of {total:.0f} GiB free"
    return (
        name,
        str(number),
        style(word, fg=colour) if colour else word,
        unit.since.partition(" ")[2] if unit.active != "inactive" else "",
        f"{state.starts} in 1 h" if number == 0 else "",
        free,
        " ".join(heat),
    )
