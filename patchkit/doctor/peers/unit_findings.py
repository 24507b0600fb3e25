"""Judge the files, units and processes that `up` left on nodes, and the ports it needs. Pure."""

from collections.abc import (
    Mapping,
    Sequence,
)

from patchkit.cluster.agent.node_state import UnitState
from patchkit.cluster.agent.processes import Listener
from patchkit.cluster.launch.cluster_file import ClusterFile
from patchkit.cluster.launch.units import head_ports
from patchkit.doctor.peers.node_report import (
    NodeReport,
    NotCheckedError,
    Outcome,
    Reports,
    check,
    require,
)
from patchkit.finding import Finding, Findings
from patchkit.quoting import quoted

_ON = (
    "active",
    "activating",
    "reloading",
    "deactivating",
)
_NOTHING = "nothing was started here yet: `patchkit up`"
_STATES = {"active": "runs", "activating": "is loading"}
_STOPPED = ("T", "t")  # by SIGSTOP, by a debugger


@check("start")
def check_start(
    node: NodeReport,
    nodes: Reports,
    again: str,
) -> Outcome:
    node.part("facts")
    if not any(other.placed for other in nodes):
        raise NotCheckedError(_NOTHING)

    head = require(nodes[0].placed, "the head's files are not known")
    fault = "it has no files of the start that other nodes have"
    if node.placed:
        if node.placed.id == head.id:
            return {}
        start = node.placed.id or "nobody knows"
        fault = f"its files are of the start {start}, the head's of {head.id}"
    return node.find("start", what=fault, command=again)


@check("edited")
def check_edited(node: NodeReport, again: str) -> Outcome:
    node.part("facts")

    edited = require(node.placed, _NOTHING).edited
    if not edited:
        return {}

    return node.find(
        "edited",
        files=", ".join(edited),
        command=again,
    )


@check("env-address")
def check_env_address(node: NodeReport, again: str) -> Outcome:
    """Find out whether a node lacks the address in its node.env and has another one."""
    host = node.host
    env = require(node.env, _NOTHING)

    address = env.variables.get("VLLM_HOST_IP", "")
    if not address:
        raise NotCheckedError("node.env names no address")

    if host.has_address(address):
        return {}

    if env.edited:
        raise NotCheckedError("node.env was edited")

    if not host.has_address(node.address):  # a finding of the check "address"
        raise NotCheckedError(f"it has lost {address}")

    return node.find("env-address", command=again)


def unit_findings(
    file: ClusterFile,
    nodes: Reports,
) -> Findings:
    """Yield findings about files, units, ports that others have, and stopped or left processes."""
    models = [node.placed.model for node in nodes if node.placed]
    again = quoted("patchkit", "up", next(filter(None, models[:1]), "MODEL"))
    units: dict[str, UnitState | None] = {}
    for node in nodes:
        yield from check_start(node, nodes, again)
        yield from check_edited(node, again)
        yield from check_env_address(node, again)
        units[node.node] = node.state.unit(file.unit) if node.state else None

    running = _running_nodes(units)
    head = nodes[0]
    yield from check_ports_taken(head, file, units[head.node])
    for node in nodes:
        unit = units[node.node]
        yield from check_halted(node)
        yield from check_left_over(node, unit)
        yield from check_unit_file(node, unit)
        yield from check_unit(node, unit, running)

    yield from check_restarts(head, units[head.node])


def _running_nodes(units: Mapping[str, UnitState | None]) -> list[str]:
    """Return the nodes whose units run; none while any unit is being started or stopped."""
    # Then a difference is no fault: ranks start one by one.
    changing = _ON[1:]
    if any(unit and unit.active in changing for unit in units.values()):
        return []

    return [name for name, unit in units.items() if _is_on(unit)]


def _is_on(unit: UnitState | None) -> bool:
    return unit is not None and unit.active in _ON


@check("port")
def check_ports_taken(
    node: NodeReport,
    file: ClusterFile,
    unit: UnitState | None,
) -> Outcome:
    """Find processes that have a port which the head's rank needs.

    The rank of a worker needs no fixed port.
    """
    node.part("listeners")

    needs = {file.serve.port: "the server", **head_ports(file.serve)}
    # A rank that runs has its ports; another process is a fault only if it shares the server's.
    is_running = _is_on(unit) and node.state is not None
    sharers = " ".join(node.state.strangers) if node.state else ""

    ranks = {process.pid for process in node.processes or ()}
    strangers = {}
    for listener in node.listeners or ():
        if listener.port in needs and listener.pid not in ranks:
            strangers[listener.port] = listener

    findings = [
        _describe_taken(node, listener, needs, file.serve.port)
        for listener in strangers.values()
        if not is_running or f"(process {listener.pid})" in sharers
    ]
    shown = ", ".join(map(str, sorted(needs)))
    return findings or {"ports": shown}


def _describe_taken(
    node: NodeReport,
    listener: Listener,
    needs: Mapping[int, str],
    server_port: int,
) -> Finding:
    """Return the finding about a process that has a port, with a command and a free port.

    The finding of a server that answers requests is another one: somebody may use that server.
    """
    port = listener.port
    command = node.command(
        "sudo",
        "ss",
        "-ltnp",
        "sport",
        "=",
        f":{port}",
    )
    if listener.pid:
        command = node.command("kill", str(listener.pid))

    free = port + 1
    while free in needs:
        free += 1

    serves = port == server_port and node.serving
    return node.find(
        "port-serves" if serves else "port",
        listener=listener,
        what=needs[port],
        command=command,
        free=free,
    )


@check("rank-stopped")
def check_halted(node: NodeReport) -> Outcome:
    processes = node.part("processes")
    stopped = [
        node.find("rank-stopped", process=process)
        for process in processes
        if process.state in _STOPPED
    ]
    return stopped or {"count": len(processes)}


@check("left-over")
def check_left_over(node: NodeReport, unit: UnitState | None) -> Outcome:
    processes = [process for process in node.part("processes") if process.state != "Z"]

    if _is_on(require(unit, node.why_not("state"))) or not processes:
        return {}

    pids = [str(process.pid) for process in processes]
    return node.find(
        "left-over",
        count=len(processes),
        what=", ".join(f"{process.pid} ({process.name})" for process in processes),
        command=node.command("kill", "-KILL", *pids),
    )


@check("unit-file")
def check_unit_file(node: NodeReport, unit: UnitState | None) -> Outcome:
    unit = require(unit, node.why_not("state"))
    if unit.changed:
        fault = "the unit's file was changed, and systemd has not read it since"
        command = node.command("systemctl", "--user", "daemon-reload")
    elif unit.drop_ins:
        fault = f"drop-ins change the unit: {', '.join(unit.drop_ins)}"
        command = node.command("systemctl", "--user", "cat", "patchkit-*")
    else:
        return {}

    return node.find(
        "unit-file",
        what=fault,
        command=command,
    )


@check("unit")
def check_unit(
    node: NodeReport,
    unit: UnitState | None,
    running: Sequence[str],
) -> Outcome:
    """Find a unit that failed, waits for a restart, or is off while others run.

    ``running`` are the nodes whose units run.
    """
    unit = require(unit, node.why_not("state"))
    ended = f"{unit.result}, status {unit.status}"

    reason = "its journal says why"
    if unit.active == "failed":
        text = f"failed: {ended}"
    elif unit.sub == "auto-restart":
        text = f"waits for its next start: {ended}"
    elif not _is_on(unit) and running:
        text = f"is {unit.active}, and runs on {', '.join(running)}"
        reason = "one rank waits for the other"
    else:
        return {"state": _STATES.get(unit.active, "nothing is started")}

    return node.find(
        "unit",
        what=f"{unit.unit} {text}",
        why=reason,
    )


@check("restarts")
def check_restarts(head: NodeReport, unit: UnitState | None) -> Outcome:
    unit = require(unit, head.why_not("state"))
    return head.find("restarts", unit=unit) if unit.restarts else {}
