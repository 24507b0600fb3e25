"""Show what a cluster serves, and how its nodes are: `patchkit status`."""

from __future__ import annotations

from collections.abc import Iterator

import click

from patchkit.cli.cluster.cluster_options import cluster_option, node_fields
from patchkit.cli.next_step import next_step, program
from patchkit.cli.out import style, table
from patchkit.cli.render import Block, ExitCode, Record, rendered
from patchkit.cluster.agent.unit_state import NodeState, UnitState
from patchkit.cluster.launch.cluster import Cluster, read_group_journal
from patchkit.cluster.launch.up import token_silence
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
    rows = list(zip(cluster.nodes, cluster.states(), strict=True))
    head = rows[0][1] if isinstance(rows[0][1], NodeState) else None
    unit = head.units[0] if head else None
    hangs, error = "", None
    if unit and unit.active == "active":
        try:
            hangs = token_silence(cluster)
        except PatchkitError as silence:
            hangs = silence.what
    elif unit and (unit.active == "failed" or unit.sub == "auto-restart"):
        error = first_error(read_group_journal(cluster, lines=400).lines)
    wrong = list(_head_notes(head, unit)) if head and unit else []
    wrong += [
        style("silent", fg="red") + f" {state.what}"
        for _node, state in rows
        if isinstance(state, PatchkitError)
    ]
    wrong += [style("hangs", fg="red") + f" {cluster.head.destination}: {hangs}"] if hangs else []
    well = bool(unit and unit.active == "active") and not wrong
    yield Record(
        {
            "answers": well,
            "hangs": hangs or None,
            "serves": unit.description if unit else None,
            "nodes": [node_fields(node.destination, state) for node, state in rows],
            "error": {"node": error[0], "text": error[1]} if error else None,
        }
    )
    if unit:
        yield style(unit.description, bold=True)
    cells = (_row(number, state, hangs) for number, (_node, state) in enumerate(rows))
    names = (style(node.destination, bold=True) for node, _state in rows)
    yield from table([(name, *row) for name, row in zip(names, cells, strict=True)], heads=_HEADS)
    yield from wrong
    if error:
        yield style("last error", fg="red") + f" {error[0]}: {error[1]}"
    if error or wrong:
        alone = cluster.head.here and len(rows) == 1
        yield next_step(*program(), "doctor", *([] if alone else ["--cluster"]))
    if not well:
        yield ExitCode(HostError.exit_code)


def _head_notes(head: NodeState, unit: UnitState) -> Iterator[str]:
    """Yield what keeps the head from serving, or serves beside it."""
    yield from (each.text for each in head.units if each.text)
    for stranger in head.strangers:
        yield style("not the model", fg="red") + f" answers at {stranger}"
    if unit.active == "failed":
        yield (
            f"systemd gave up {unit.since.partition(' ')[2]}, after {head.starts} starts in an "
            f"hour ({unit.result}, status {unit.status}); `patchkit up` starts it again"
        )


def _row(number: int, state: NodeState | PatchkitError, hangs: str) -> tuple[str, ...]:
    if isinstance(state, PatchkitError):
        return str(number), style("silent", fg="red"), "", "", "", ""
    unit, memory = state.units[0], state.memory
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
        str(number),
        style(word, fg=colour) if colour else word,
        unit.since.partition(" ")[2] if unit.active != "inactive" else "",
        f"{state.starts} in 1 h" if number == 0 else "",
        free,
        " ".join(heat),
    )
