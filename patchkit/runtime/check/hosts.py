"""Compare what a file says with the host that is to use it: addresses, devices, cages."""

from __future__ import annotations

import re
from collections.abc import Iterator

from patchkit.finding import Finding, Level
from patchkit.runtime.check.content import Assignment, build_finding
from patchkit.runtime.check.situation import CheckedText
from patchkit.runtime.host.host import Host, Rdma
from patchkit.runtime.host.networks import twin_state
from patchkit.runtime.rules.variable_values import value_tables

_OWN_ADDRESS = ("VLLM_HOST_IP", "RAY_NODE_IP_ADDRESS", "RAY_OVERRIDE_NODE_IP_ADDRESS")
_PREFIXES = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")  # lists of prefixes, or of whole names behind =
_DEVICES = ("NCCL_IB_HCA", "UCX_NET_DEVICES")
_NETDEVS = (
    *("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"),
    *("UCX_NET_DEVICES", "OMPI_MCA_btl_tcp_if_include"),
)


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
        yield build_finding("host-lacks", assignment, what=what, has=has or "none at all")
    by_prefix = name in _PREFIXES and not value.startswith("=")
    names = value.lstrip("=").split(",") if name in (*_NETDEVS, *_DEVICES) else []
    for plain, colon, _port in (part.partition(":") for part in names if part != "all"):
        # UCX names an RDMA device with its port (mlx5_0:1), and an interface as it is.
        is_device = name not in _NETDEVS or bool(colon)
        known = {
            device.name: device.active if isinstance(device, Rdma) else device.up
            for device in (host.rdma if is_device else host.netdevs)
        }
        fits = [
            device
            for device in known
            if device == plain or (by_prefix and device.startswith(plain))
        ]
        if not fits:
            what = f"no {'RDMA device' if is_device else 'interface'} {plain}"
            has = ", ".join(device for device in known if device != "lo") or "none at all"
            yield build_finding("host-lacks", assignment, level, what=what, has=has)
        elif not any(known[device] for device in fits):
            yield build_finding("host-down", assignment, what=f"{plain} is down")


def find_half_cages(assignment: Assignment, host: Host | None) -> Iterator[Finding]:
    """Yield that NCCL_IB_HCA names one half of a cage: by this host, else by a Spark's names."""
    names = [part.partition(":")[0] for part in assignment.value.lstrip("=").split(",")]
    (row,) = value_tables()["twins"]
    one, other = map(str, row["half"])
    missing = []
    for name in names:
        twin = ""
        device = next((found for found in host.rdma if found.name == name), None) if host else None
        if device and host:
            netdev = host.netdev(device.netdev)
            half = next((found for found in host.rdma if found.name == device.twin), None)
            # `patchkit env` leaves these out as well.
            left_out = netdev and twin_state(host, netdev) in ("down", "random", "bare-first")
            twin = half.name if half and half.active and not left_out else ""
        elif re.fullmatch(row["pattern"], name):
            twin = other + name[len(one) :] if name.startswith(one) else one + name[len(other) :]
        if twin and twin not in names:
            missing.append(twin)
    if missing:
        words = {"twin": ",".join(missing), "complete": ",".join((*names, *missing))}
        words |= {"why": row["why"], "source": row["source"]}
        yield build_finding("half-cage", assignment, None, **words)
