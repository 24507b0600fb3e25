"""Judge units, processes and ports of a cluster: started everywhere, or nowhere and gone. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from patchkit.cluster.agent.unit_state import Listener, UnitState
from patchkit.cluster.launch import ports
from patchkit.cluster.launch.cluster_file import ClusterFile
from patchkit.cluster.ssh.ssh import there
from patchkit.doctor.peers.check import check, fine, require, unknown, wrong
from patchkit.doctor.peers.report import NodeReport
from patchkit.finding import Finding, Level
from patchkit.quoting import quoted

_ON = ("active", "activating", "reloading", "deactivating")
_STARTS = 4  # in an hour: units.py
_STATES = {
    "T": ("stopped", "somebody sent it SIGSTOP: the other ranks wait for it, for ever"),
    "t": ("stopped by a debugger", "the other ranks wait for it, for ever"),
    "Z": ("dead, and not reaped", "its parent hangs: the rank does not go on"),
}


def unit_findings(file: ClusterFile, nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield ports that are taken, processes that are stopped or left, and how the units are."""
    units = {each.node: unit for each in nodes if (unit := _rank_unit(file, each))}
    taken = False
    for number, node in enumerate(nodes):
        unit = units.get(node.node)
        if number == 0:
            found = list(check_ports_taken(node, file, unit))
            taken = any(each.level is Level.ERROR for each in found)
            yield from found
        yield from check_halted(node)
        yield from check_left_over(node, unit)
        yield from check_unit_file(node)
    if len(nodes) > 1:
        yield _check_ports_between(nodes, taken=taken, runs=any(map(_is_unit_on, units.values())))
    yield from _check_units_together(file, nodes, units)


def _check_ports_between(nodes: Sequence[NodeReport], *, taken: bool, runs: bool) -> Finding:
    """Return whether the ports between the nodes are open, both ways."""
    head, names = nodes[0], ", ".join(each.node for each in nodes)
    if runs:
        return unknown("ports-between", names, "a rank runs, and has the ports that it needs")
    if not head.ports_tried:
        return unknown("ports-between", names, "not every node has an address and said its state")
    if head.blocked and taken:
        return unknown("ports-between", names, "a port of the head is taken")
    if error := head.blocked:
        return wrong("ports-between", names, what=error.what, why=error.why, hint=error.hint)
    return fine("ports-between", names)


def _rank_unit(file: ClusterFile, node: NodeReport) -> UnitState | None:
    return node.state.unit(file.unit) if node.state else None


def _is_unit_on(unit: UnitState | None) -> bool:
    return unit is not None and unit.active in _ON


@check("port")
def check_ports_taken(
    node: NodeReport, file: ClusterFile, unit: UnitState | None
) -> Iterator[Finding]:
    """Yield who has a port that the head's rank needs; of a worker no certain port is needed."""
    listeners = require(node.listeners, node.why_not("listeners"))
    executor = "mp"
    if node.placed and node.placed.env:
        executor = node.placed.env.facts.get("executor", executor)
    needs = {file.serve.port: "the server"}
    needs |= {each.port: each.what for each in ports.needs(executor) if each.port}
    own = {each.pid for each in node.processes or ()}
    taken = [each for each in listeners if each.port in needs and each.pid not in own]
    # A rank that runs has its ports: what else listens does so elsewhere, or shares the server's.
    if _is_unit_on(unit) and node.state:
        shared = " ".join(node.state.strangers)
        taken = [each for each in taken if each.pid and f"(process {each.pid})" in shared]
    for each in {found.port: found for found in taken}.values():
        yield wrong(
            "port",
            node.node,
            port=each.port,
            address=each.address,
            holder=f"{each.name} (process {each.pid})" if each.pid else "another user's process",
            what=needs[each.port],
            command=_free_port_command(node.node, each),
        )
    if not taken:
        yield fine("port", node.node, ports=", ".join(map(str, sorted(needs))))


def _free_port_command(name: str, listener: Listener) -> str:
    if listener.pid:
        return there(name, "kill", str(listener.pid))
    return there(name, "sudo", "ss", "-ltnp", "sport", "=", f":{listener.port}")


@check("rank-stopped")
def check_halted(node: NodeReport) -> Iterator[Finding]:
    processes = require(node.processes, node.why_not("processes"))
    halted = [process for process in processes if process.state in _STATES]
    for each in halted:
        state, why = _STATES[each.state]
        words = ("kill", "-CONT", str(each.pid))
        command = there(node.node, *words) if each.state == "T" else "patchkit down"
        fields = {"pid": each.pid, "name": each.name, "state": state}
        yield wrong("rank-stopped", node.node, **fields, why=why, command=command)
    if not halted:
        yield fine("rank-stopped", node.node, count=len(processes))


@check("left-over")
def check_left_over(node: NodeReport, unit: UnitState | None) -> Iterator[Finding]:
    processes = require(node.processes, node.why_not("processes"))
    left = [process for process in processes if process.state != "Z"]
    unit = require(unit, node.why_not("state"))
    if _is_unit_on(unit) or not left:
        yield fine("left-over", node.node)
    else:
        pids = [str(each.pid) for each in left]
        yield wrong(
            "left-over",
            node.node,
            count=len(left),
            what=", ".join(f"{each.pid} ({each.name})" for each in left),
            command=there(node.node, "kill", "-KILL", *pids),
        )


@check("unit-file")
def check_unit_file(node: NodeReport) -> Iterator[Finding]:
    read = require(node.unit_file, node.why_not("unit_file"))
    if read.changed:
        command = there(node.node, "systemctl", "--user", "daemon-reload")
        what = "the unit's file was changed, and systemd has not read it since"
        yield wrong("unit-file", node.node, what=what, command=command)
    elif read.drop_ins:
        what = f"drop-ins change the unit: {', '.join(read.drop_ins)}"
        command = there(node.node, "systemctl", "--user", "cat", "patchkit-*")
        yield wrong("unit-file", node.node, what=what, command=command)
    else:
        yield fine("unit-file", node.node)


def _check_units_together(
    file: ClusterFile, nodes: Sequence[NodeReport], units: dict[str, UnitState]
) -> Iterator[Finding]:
    """Yield whether the ranks run on all nodes or on none, and how often they were started."""
    on = [each.node for each in nodes if _is_unit_on(units.get(each.node))]
    # While the head's rank is started the others are started one by one, by its units.
    loading = any(each.active != "active" and _is_unit_on(each) for each in units.values())
    for node in nodes:
        unit = units.get(node.node)
        if unit is None:
            yield unknown("unit", node.node, node.why_not("state"))
        else:
            yield _check_unit_state(node, unit, on, file.unit, loading=loading)
    head, unit = nodes[0], units.get(nodes[0].node)
    if unit is None or head.state is None:
        yield unknown("restarts", head.node, head.why_not("state"))
    elif unit.restarts:
        fields = {"starts": head.state.starts, "restarts": unit.restarts, "limit": _STARTS}
        yield wrong("restarts", head.node, **fields, command="patchkit logs")
    else:
        yield fine("restarts", head.node, starts=head.state.starts)


def _check_unit_state(
    node: NodeReport, unit: UnitState, on: Sequence[str], name: str, *, loading: bool
) -> Finding:
    logs = quoted("patchkit", "logs", "--node", node.node)
    if unit.active == "failed":
        what = f"{name} failed: {unit.result}, status {unit.status}"
        return wrong("unit", node.node, what=what, why="its journal says why", command=logs)
    if unit.sub == "auto-restart":
        what = f"{name} waits for its next start: {unit.result}, status {unit.status}"
        return wrong("unit", node.node, what=what, why="its journal says why", command=logs)
    if not _is_unit_on(unit) and on and not loading:
        what = f"{name} is {unit.active}, and runs on {', '.join(on)}"
        why = "one rank waits for the other"
        return wrong("unit", node.node, what=what, why=why, command=logs)
    if unit.active == "active":
        return fine("unit", node.node, state="runs")
    state = "is loading" if loading else "nothing is started"
    level = Level.NOTE if loading else Level.OK
    return Finding(level=level, where=node.node, about="unit", what=state)
