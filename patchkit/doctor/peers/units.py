"""Judge units, processes and ports of a cluster: started everywhere, or nowhere and gone. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from patchkit.cluster.agent.unit_state import UnitState
from patchkit.cluster.launch import ports
from patchkit.cluster.launch.cluster_file import ClusterFile
from patchkit.cluster.ssh.ssh import there
from patchkit.doctor.peers.check import (
    NotCheckedError,
    Outcome,
    check,
    make_finding,
    make_fine,
    require,
    unchecked,
)
from patchkit.doctor.peers.node_report import NodeReport
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
    head, name = nodes[0], file.unit
    units = {node.node: node.state.unit(name) if node.state else None for node in nodes}
    on = [node for node, unit in units.items() if _is_on(unit)]
    # While the head's rank is started the others are started one by one, by its units.
    loading = any(unit and unit.active in _ON[1:] for unit in units.values())
    found = check_ports_taken(head, file, units[head.node])
    yield from found
    if len(nodes) > 1:
        taken = any(finding.level is Level.ERROR for finding in found)
        yield _check_ports_between(nodes, taken=taken, runs=bool(on))
    for node in nodes:
        yield from check_halted(node)
        yield from check_left_over(node, units[node.node])
        yield from check_unit_file(node)
        yield from check_unit(node, units[node.node], name, [] if loading else on)
    yield from check_restarts(head, units[head.node])


def _is_on(unit: UnitState | None) -> bool:
    return unit is not None and unit.active in _ON


def _check_ports_between(nodes: Sequence[NodeReport], *, taken: bool, runs: bool) -> Finding:
    """Return whether the ports between the nodes are open, both ways."""
    head, names = nodes[0], ", ".join(node.node for node in nodes)
    reasons = {
        "a rank runs, and has the ports that it needs": runs,
        "not every node has an address and said its state": not head.ports_tried,
        "a port of the head is taken": bool(head.blocked) and taken,
    }
    for reason, holds in reasons.items():
        if holds:
            return unchecked("ports-between", names, reason)
    if error := head.blocked:
        fields = {"what": error.what, "why": error.why, "hint": error.hint}
        return make_finding("ports-between", names, **fields)
    return make_fine("ports-between", names)


@check("port")
def check_ports_taken(node: NodeReport, file: ClusterFile, unit: UnitState | None) -> Outcome:
    """Return who has a port that the head's rank needs; of a worker no certain port is needed."""
    listeners = require(node.listeners, node.why_not("listeners"))
    executor = node.env.facts.get("executor", "mp") if node.env else "mp"
    needs = {file.serve.port: "the server"}
    needs |= {need.port: need.what for need in ports.needs(executor) if need.port}
    own = {process.pid for process in node.processes or ()}
    taken = {its.port: its for its in listeners if its.port in needs and its.pid not in own}
    # A rank that runs has its ports: what else listens does so elsewhere, or shares the server's.
    if _is_on(unit) and node.state:
        shared = " ".join(node.state.strangers)
        taken = {p: its for p, its in taken.items() if its.pid and f"(process {its.pid})" in shared}
    found = []
    for port, its in taken.items():
        fields = {"port": port, "address": its.address, "what": needs[port]}
        holder = f"{its.name} (process {its.pid})" if its.pid else "another user's process"
        who = there(node.node, "sudo", "ss", "-ltnp", "sport", "=", f":{port}")
        command = there(node.node, "kill", str(its.pid)) if its.pid else who
        found.append(make_finding("port", node.node, holder=holder, command=command, **fields))
    return found or {"ports": ", ".join(map(str, sorted(needs)))}


@check("rank-stopped")
def check_halted(node: NodeReport) -> Outcome:
    processes = require(node.processes, node.why_not("processes"))
    found = []
    for process in processes:
        if process.state in _STATES:
            state, why = _STATES[process.state]
            go_on = there(node.node, "kill", "-CONT", str(process.pid))
            command = go_on if process.state == "T" else "patchkit down"
            fields = {"pid": process.pid, "name": process.name, "state": state}
            fields |= {"why": why, "command": command}
            found.append(make_finding("rank-stopped", node.node, **fields))
    return found or {"count": len(processes)}


@check("left-over")
def check_left_over(node: NodeReport, unit: UnitState | None) -> Outcome:
    processes = require(node.processes, node.why_not("processes"))
    left = [process for process in processes if process.state != "Z"]
    if _is_on(require(unit, node.why_not("state"))) or not left:
        return {}
    return make_finding(
        "left-over",
        node.node,
        count=len(left),
        what=", ".join(f"{process.pid} ({process.name})" for process in left),
        command=there(node.node, "kill", "-KILL", *(str(process.pid) for process in left)),
    )


@check("unit-file")
def check_unit_file(node: NodeReport) -> Outcome:
    read = require(node.unit_file, node.why_not("unit_file"))
    if read.changed:
        what = "the unit's file was changed, and systemd has not read it since"
        command = there(node.node, "systemctl", "--user", "daemon-reload")
    elif read.drop_ins:
        what = f"drop-ins change the unit: {', '.join(read.drop_ins)}"
        command = there(node.node, "systemctl", "--user", "cat", "patchkit-*")
    else:
        return {}
    return make_finding("unit-file", node.node, what=what, command=command)


@check("unit")
def check_unit(node: NodeReport, unit: UnitState | None, name: str, on: Sequence[str]) -> Outcome:
    """Return whether a rank runs as the others do; ``on`` are the nodes where one runs."""
    unit = require(unit, node.why_not("state"))
    logs = quoted("patchkit", "logs", "--node", node.node)
    ended = f"{unit.result}, status {unit.status}"
    why = "its journal says why"
    if unit.active == "failed":
        what = f"{name} failed: {ended}"
    elif unit.sub == "auto-restart":
        what = f"{name} waits for its next start: {ended}"
    elif not _is_on(unit) and on:
        what = f"{name} is {unit.active}, and runs on {', '.join(on)}"
        why = "one rank waits for the other"
    else:
        states = {"active": "runs", "activating": "is loading"}
        return {"state": states.get(unit.active, "nothing is started")}
    return make_finding("unit", node.node, what=what, why=why, command=logs)


@check("restarts")
def check_restarts(head: NodeReport, unit: UnitState | None) -> Outcome:
    if unit is None or head.state is None:
        raise NotCheckedError(head.why_not("state"))
    starts = head.state.starts
    if not unit.restarts:
        return {"starts": starts}
    fields = {"starts": starts, "restarts": unit.restarts, "limit": _STARTS}
    return make_finding("restarts", head.node, command="patchkit logs", **fields)
