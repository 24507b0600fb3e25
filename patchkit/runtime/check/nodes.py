"""Check what nodes need and have: addresses, devices, container options, a sound NCCL."""

from __future__ import annotations

from collections.abc import Iterator

from patchkit.finding import Finding, Level
from patchkit.runtime.check.content import Assignment, Container, make_finding, rule_finding
from patchkit.runtime.check.situation import CheckedText
from patchkit.runtime.host.host import Host, Rdma
from patchkit.runtime.rules.rule import holding
from patchkit.runtime.rules.variable_rules import load_variable_rules

_OWN_ADDRESS = ("VLLM_HOST_IP", "RAY_NODE_IP_ADDRESS", "RAY_OVERRIDE_NODE_IP_ADDRESS")
# Nobody sets these for a node alone; still they are no proof of others.
_BETWEEN_NODES = {"NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "UCX_NET_DEVICES"}
_RDMA = "/dev/infiniband"
_PREFIXES = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")  # lists of prefixes, or of whole names behind =
_DEVICES = ("NCCL_IB_HCA", "UCX_NET_DEVICES")
_NETDEVS = (
    *("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"),
    *("UCX_NET_DEVICES", "OMPI_MCA_btl_tcp_if_include"),
)


def check_ray(checked: CheckedText) -> Iterator[Finding]:
    """Yield `ray start` on one of several nodes without the address of this node."""
    names = {assignment.name for assignment in checked.content.assignments}
    known = any(name in checked.text or name in names for name in _OWN_ADDRESS)
    if known or checked.situation.get("role", "single") == "single":
        return
    for command in checked.content.commands:
        if command.program == "ray start":
            address = command.find_flag("--node-ip-address")
            if address:
                yield make_finding("address-for-ray-alone", address)
            elif not any("$" in word.text for word in command.words):
                yield make_finding("ray-without-address", command.line)


def check_advice(checked: CheckedText) -> Iterator[Finding]:
    """Yield what the rules know of these versions in a cluster, which no rule mends."""
    values = {found.name: found.value for found in checked.content.assignments}
    situation = checked.situation
    if not situation.get("role") and values.keys() & _BETWEEN_NODES:
        situation = {**situation, "role": "head"}
    for advice in holding(load_variable_rules().advice, situation):
        if not advice.solved(values):
            stated = (found.line for found in checked.versions if found.project in advice.when)
            facts = " and ".join(f"{name} {situation[name]}" for name in advice.when)
            yield rule_finding(advice, next(stated, 1), advice.says, f"Known of {facts}.")


def check_containers(checked: CheckedText) -> Iterator[Finding]:
    """Yield what a container of vLLM lacks; nothing of one whose options are not all known."""
    content = checked.content
    servers = {command.block: command for command in content.commands}
    for box in content.containers:
        server = servers.get(box.block)
        if not (server and box.is_whole and box.program):
            continue
        if box.program == "podman" and not box.has_option("--pids-limit"):
            yield make_finding("container-few-threads", box.block)
        off = content.find_variable("NCCL_IB_DISABLE", server)
        hca = content.find_variable("NCCL_IB_HCA", server)
        means_rdma = (hca and hca.is_given) or box.has_option("--device", _RDMA)
        if means_rdma and not (off and off.value != "0"):
            for key in _find_lacks(box):
                yield make_finding(f"container-without-{key}", box.block)


def _find_lacks(box: Container) -> Iterator[str]:
    privileged = any(
        name == "--privileged" and value.lower() not in ("false", "no")
        for name, value in box.options
    )
    mounted = any(box.has_option(name, _RDMA) for name in ("-v", "--volume", "--mount"))
    may_lock = any(box.has_option("--cap-add", name) for name in ("IPC_LOCK", "ALL", "all"))
    if not (privileged or mounted or box.has_option("--device", _RDMA)):
        yield "device"
    if not (privileged or may_lock or box.has_option("--ulimit", "memlock")):
        yield "memlock"
    if not any(box.has_option(name, "host") for name in ("--network", "--net")):
        yield "network"


def check_host(checked: CheckedText) -> Iterator[Finding]:
    """Yield names and addresses that this host does not have, or that are down.

    A file with several values of a variable is for several nodes: then one has to be this host's.
    """
    by_name: dict[str, list[list[Finding]]] = {}
    for assignment in checked.content.assignments if checked.host else ():
        if checked.host and assignment.is_given and not assignment.value.startswith("^"):
            found = [*_compare_host(assignment, checked.host)]
            by_name.setdefault(assignment.name, []).append(found)
    for found_by_value in by_name.values():
        if all(found_by_value):
            yield from (finding for found in found_by_value for finding in found)


def _compare_host(assignment: Assignment, host: Host) -> Iterator[Finding]:
    name, value = assignment.name, assignment.value
    # NCCL passes over a device that is not there; nothing starts without interface or address.
    level = Level.WARNING if name in _DEVICES else None
    own = [address.address for netdev in host.netdevs for address in netdev.addresses]
    if name in _OWN_ADDRESS and value not in own and not value.startswith("127."):
        has = ", ".join(address for address in own if not address.startswith(("127.", "::1")))
        what = f"no address {value}"
        yield make_finding("host-lacks", assignment, what=what, has=has or "none at all")
    whole = value.startswith("=") or name not in _PREFIXES
    for part in value.lstrip("=").split(",") if name in (*_NETDEVS, *_DEVICES) else ():
        plain, colon, _port = part.partition(":")
        # UCX names an RDMA device with its port (mlx5_0:1), and an interface as it is.
        is_device = name not in _NETDEVS or bool(colon)
        known = host.rdma if is_device else host.netdevs
        fits = [
            device
            for device in known
            if device.name == plain or (not whole and device.name.startswith(plain))
        ]
        works = [device.active if isinstance(device, Rdma) else device.up for device in fits]
        if plain == "all" and name in _DEVICES:
            continue
        if not fits:
            what = f"no {'RDMA device' if is_device else 'interface'} {plain}"
            has = ", ".join(device.name for device in known if device.name != "lo")
            yield make_finding("host-lacks", assignment, level, what=what, has=has or "none at all")
        elif not any(works):
            yield make_finding("host-down", assignment, what=f"{plain} is {fits[0].state}")
