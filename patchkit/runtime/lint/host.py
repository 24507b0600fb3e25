"""Names and addresses in a file that this host does not have."""

from __future__ import annotations

from collections.abc import Iterator

from patchkit.finding import Finding, Level
from patchkit.runtime.host.host import Host
from patchkit.runtime.lint.scan import Assignment
from patchkit.runtime.lint.values import is_open

_PREFIXES = "NCCL_SOCKET_IFNAME"  # a list of prefixes, the others are of whole names
_NETDEVS = (
    _PREFIXES,
    "GLOO_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
    "UCX_NET_DEVICES",
    "OMPI_MCA_btl_tcp_if_include",
)
_OWN = ("VLLM_HOST_IP", "RAY_NODE_IP_ADDRESS", "RAY_OVERRIDE_NODE_IP_ADDRESS")


def check_host(found: Assignment, host: Host) -> Iterator[Finding]:
    if not found.literal or not found.value or found.value.startswith("^") or is_open(found.value):
        return
    if found.name in _NETDEVS:
        yield from _netdevs(found, host)
    elif found.name == "NCCL_IB_HCA":
        yield from _devices(found, host)
    elif found.name in _OWN:
        yield from _address(found, host)


def _netdevs(found: Assignment, host: Host) -> Iterator[Finding]:
    whole = found.value.startswith("=") or found.name != _PREFIXES
    for name in found.value.lstrip("=").split(","):
        if ":" in name or (found.name == "UCX_NET_DEVICES" and name == "all"):
            yield from _device(found, name.partition(":")[0], host, whole=True)
            continue
        fits = [
            each
            for each in host.netdevs
            if each.name == name or (not whole and each.name.startswith(name))
        ]
        if not fits:
            names = ", ".join(each.name for each in host.netdevs if each.kind != "loopback")
            yield _missing(found, f"no interface {name}", names)
        elif not any(each.up for each in fits):
            yield _down(found, f"{name} is {fits[0].state}")


def _devices(found: Assignment, host: Host) -> Iterator[Finding]:
    whole = found.value.startswith("=")
    for entry in found.value.lstrip("=").split(","):
        yield from _device(found, entry.partition(":")[0], host, whole=whole)


def _device(found: Assignment, name: str, host: Host, *, whole: bool) -> Iterator[Finding]:
    if name == "all":
        return
    fits = [
        each
        for each in host.rdma
        if each.name == name or (not whole and each.name.startswith(name))
    ]
    if not fits:
        names = ", ".join(each.name for each in host.rdma)
        yield _missing(found, f"no RDMA device {name}", names)
    elif not any(each.active for each in fits):
        yield _down(found, f"{name} is {fits[0].state}")


def _address(found: Assignment, host: Host) -> Iterator[Finding]:
    own = [each.address for netdev in host.netdevs for each in netdev.addresses]
    if found.value not in own and not found.value.startswith("127."):
        shown = ", ".join(address for address in own if not address.startswith(("127.", "::1")))
        yield _missing(found, f"no address {found.value}", shown)


def _missing(found: Assignment, what: str, has: str) -> Finding:
    return Finding(
        line=found.line,
        about=found.name,
        level=Level.ERROR,
        what=f"{found.shown}: this host has {what}",
        why=f"It has {has or 'none at all'}.",
        hint="`patchkit env` writes what fits; for a file of another node: --no-host",
        source="patchkit probe",
    )


def _down(found: Assignment, what: str) -> Finding:
    return Finding(
        line=found.line,
        about=found.name,
        level=Level.WARNING,
        what=f"{found.shown}: {what}",
        why="No cable, or the other end is off, or it is the other port that is cabled.",
        hint="`patchkit probe` shows what is cabled",
        source="patchkit probe",
    )
