"""Judge what `up` left on the nodes of a cluster: files, units, processes and ports. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count

from patchkit.cluster.agent.processes import Listener
from patchkit.cluster.agent.unit_state import UnitState
from patchkit.cluster.launch.cluster_file import ClusterFile
from patchkit.cluster.launch.units import head_ports
from patchkit.cluster.ssh.ssh import ssh_command
from patchkit.doctor.peers.node_report import (
    NodeReport,
    NotCheckedError,
    Outcome,
    check,
    require,
)
from patchkit.finding import Finding
from patchkit.quoting import quoted

_ON = ("active", "activating", "reloading", "deactivating")
_NOTHING = "nothing was started here yet: `patchkit up`"
_STARTS = 4  # in an hour: head.service


@check("start")
def check_start(node: NodeReport, nodes: Sequence[NodeReport], again: str) -> Outcome:
    node.part("facts")
    if not any(other.placed for other in nodes):
        raise NotCheckedError(_NOTHING)
    head = require(nodes[0].placed, "the head's files are not known")
    if node.placed is None:
        what = "it has no files of the start that other nodes have"
    elif node.placed.id != head.id:
        own = node.placed.id or "nobody knows"
        what = f"its files are of the start {own}, the head's of {head.id}"
    else:
        return {}
    return node.find("start", what=what, command=again)


@check("edited")
def check_edited(node: NodeReport, again: str) -> Outcome:
    node.part("facts")
    edited = require(node.placed, _NOTHING).edited
    return node.find("edited", files=", ".join(edited), command=again) if edited else {}


@check("env-address")
def check_env_address(node: NodeReport, again: str) -> Outcome:
    """Return whether the node has another address than its node.env says."""
    host, env = node.host, require(node.env, _NOTHING)
    own = env.variables.get("VLLM_HOST_IP", "")
    if own and host.has_address(own):
        return {"address": own}
    if env.edited or not own:
        raise NotCheckedError(
            "node.env was edited" if own else "node.env names no address"
        )
    if not host.has_address(node.address):  # which is said
        raise NotCheckedError(f"it has lost {own}")
    return node.find("env-address", address=own, command=again)


def unit_findings(file: ClusterFile, nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield how files and units are, ports that are taken, processes that are stopped or left."""
    model = next((each.placed.model for each in nodes if each.placed), "")
    again = quoted("patchkit", "up", model or "MODEL")
    for node in nodes:
        yield from check_start(node, nodes, again)
        yield from check_edited(node, again)
        yield from check_env_address(node, again)
    head = nodes[0]
    units = {
        node.node: node.state.unit(file.unit) if node.state else None for node in nodes
    }
    on = [node for node, unit in units.items() if _is_on(unit)]
    # While the head's rank is started the others are started one by one, by its units.
    loading = any(unit and unit.active in _ON[1:] for unit in units.values())
    yield from check_ports_taken(head, file, units[head.node])
    for node in nodes:
        yield from check_halted(node)
        yield from check_left_over(node, units[node.node])
        yield from check_unit_file(node, units[node.node])
        yield from check_unit(node, units[node.node], [] if loading else on)
    yield from check_restarts(head, units[head.node])


def _is_on(unit: UnitState | None) -> bool:
    return unit is not None and unit.active in _ON


@check("port")
def check_ports_taken(
    node: NodeReport, file: ClusterFile, unit: UnitState | None
) -> Outcome:
    """Return who has a port that the head's rank needs; of a worker no certain port is needed."""
    listeners = node.part("listeners")
    executor = node.env.facts.get("executor", "mp") if node.env else "mp"
    needs = {file.serve.port: "the server", **head_ports(file.serve).get(executor, {})}
    own = {process.pid for process in node.processes or ()}
    taken = {
        its.port: its for its in listeners if its.port in needs and its.pid not in own
    }
    # A rank that runs has its ports: what else listens does so elsewhere, or shares the server's.
    if _is_on(unit) and node.state:
        shared = " ".join(node.state.strangers)
        taken = {
            p: its
            for p, its in taken.items()
            if its.pid and f"(process {its.pid})" in shared
        }
    findings = [
        _describe_taken(node, listener, needs, serves=port == file.serve.port)
        for port, listener in taken.items()
    ]
    return findings or {"ports": ", ".join(map(str, sorted(needs)))}


def _describe_taken(
    node: NodeReport, listener: Listener, needs: Mapping[int, str], *, serves: bool
) -> Finding:
    """Return who has a port; what answers requests there may be in use, and is not to be killed."""
    port = listener.port
    look = ssh_command(node.node, "sudo", "ss", "-ltnp", "sport", "=", f":{port}")
    return node.find(
        "port-serves" if serves and node.serving else "port",
        port=port,
        address=listener.address,
        what=needs[port],
        holder=listener.holder,
        serving=node.serving,
        command=ssh_command(node.node, "kill", str(listener.pid))
        if listener.pid
        else look,
        free=next(free for free in count(port + 1) if free not in needs),
    )


@check("rank-stopped")
def check_halted(node: NodeReport) -> Outcome:
    processes = node.part("processes")
    stopped = [
        its for its in processes if its.state in ("T", "t")
    ]  # by SIGSTOP, by a debugger
    found = [
        node.find("rank-stopped", pid=str(its.pid), name=its.name) for its in stopped
    ]
    return found or {"count": len(processes)}


@check("left-over")
def check_left_over(node: NodeReport, unit: UnitState | None) -> Outcome:
    left = [process for process in node.part("processes") if process.state != "Z"]
    if _is_on(require(unit, node.why_not("state"))) or not left:
        return {}
    what = ", ".join(f"{process.pid} ({process.name})" for process in left)
    command = ssh_command(
        node.node, "kill", "-KILL", *(str(process.pid) for process in left)
    )
    return node.find("left-over", count=len(left), what=what, command=command)


@check("unit-file")
def check_unit_file(node: NodeReport, unit: UnitState | None) -> Outcome:
    read = require(unit, node.why_not("state"))
    if read.changed:
        what = "the unit's file was changed, and systemd has not read it since"
        words: tuple[str, ...] = ("daemon-reload",)
    elif read.drop_ins:
        what = f"drop-ins change the unit: {', '.join(read.drop_ins)}"
        words = ("cat", "patchkit-*")
    else:
        return {}
    command = ssh_command(node.node, "systemctl", "--user", *words)
    return node.find("unit-file", what=what, command=command)


@check("unit")
def check_unit(node: NodeReport, unit: UnitState | None, on: Sequence[str]) -> Outcome:
    """Return whether a rank runs as the others do; ``on`` are the nodes where one runs."""
    unit = require(unit, node.why_not("state"))
    ended = f"{unit.result}, status {unit.status}"
    why = "its journal says why"
    if unit.active == "failed":
        what = f"failed: {ended}"
    elif unit.sub == "auto-restart":
        what = f"waits for its next start: {ended}"
    elif not _is_on(unit) and on:
        what = f"is {unit.active}, and runs on {', '.join(on)}"
        why = "one rank waits for the other"
    else:
        states = {"active": "runs", "activating": "is loading"}
        return {"state": states.get(unit.active, "nothing is started")}
    return node.find("unit", what=f"{unit.unit} {what}", why=why)


@check("restarts")
def check_restarts(head: NodeReport, unit: UnitState | None) -> Outcome:
    if unit is None or head.state is None:
        raise NotCheckedError(head.why_not("state"))
    starts = head.state.starts
    if not unit.restarts:
        return {"starts": starts}
    return head.find("restarts", starts=starts, restarts=unit.restarts, limit=_STARTS)
