"""Check names and addresses in a file against what this host has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from patchkit.finding import Finding
from patchkit.runtime.files.content import Assignment
from patchkit.runtime.host.host import Host, Netdev, Rdma

_PREFIXES = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")  # lists of prefixes, or of whole names behind =
_NETDEVS = (
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
    "UCX_NET_DEVICES",
    "OMPI_MCA_btl_tcp_if_include",
)
_OWN = ("VLLM_HOST_IP", "RAY_NODE_IP_ADDRESS", "RAY_OVERRIDE_NODE_IP_ADDRESS")


def check_host(assigned: Sequence[Assignment], host: Host) -> Iterator[Finding]:
    """Return names and addresses that this host does not have, or that are down.

    A file with several values of a variable is for several nodes: then one has to be this host's.
    """
    by_name: dict[str, list[Finding | None]] = {}
    for each in assigned:
        if each.is_given and not each.value.startswith("^"):
            by_name.setdefault(each.name, []).extend([*_troubles(each, host)] or [None])
    for findings in by_name.values():
        if None not in findings:
            yield from filter(None, findings)


def _troubles(assigned: Assignment, host: Host) -> Iterator[Finding]:
    whole = assigned.value.startswith("=") or assigned.name not in _PREFIXES
    names = assigned.value.lstrip("=").split(",")
    if assigned.name in _NETDEVS:
        for name in names:
            # UCX names an RDMA device with its port (mlx5_0:1), and an interface as it is.
            if ":" in name or (assigned.name == "UCX_NET_DEVICES" and name == "all"):
                yield from _device(assigned, name.partition(":")[0], host, whole=True)
            else:
                yield from _netdev(assigned, name, host, whole=whole)
    elif assigned.name == "NCCL_IB_HCA":
        for name in names:
            yield from _device(assigned, name.partition(":")[0], host, whole=whole)
    elif assigned.name in _OWN:
        own = [address.address for netdev in host.netdevs for address in netdev.addresses]
        if assigned.value not in own and not assigned.value.startswith("127."):
            shown = (address for address in own if not address.startswith(("127.", "::1")))
            yield _missing(assigned, f"no address {assigned.value}", shown)


def _netdev(assigned: Assignment, name: str, host: Host, *, whole: bool) -> Iterator[Finding]:
    fits = [netdev for netdev in host.netdevs if _fits(netdev, name, whole=whole)]
    if not fits:
        known = (netdev.name for netdev in host.netdevs if netdev.kind != "loopback")
        yield _missing(assigned, f"no interface {name}", known)
    elif not any(netdev.up for netdev in fits):
        yield _down(assigned, f"{name} is {fits[0].state}")


def _device(assigned: Assignment, name: str, host: Host, *, whole: bool) -> Iterator[Finding]:
    fits = [rdma for rdma in host.rdma if _fits(rdma, name, whole=whole)]
    if name == "all":
        return
    if not fits:
        yield _missing(assigned, f"no RDMA device {name}", (rdma.name for rdma in host.rdma))
    elif not any(rdma.active for rdma in fits):
        yield _down(assigned, f"{name} is {fits[0].state}")


def _fits(device: Netdev | Rdma, name: str, *, whole: bool) -> bool:
    return device.name == name or (not whole and device.name.startswith(name))


def _missing(assigned: Assignment, what: str, has: Iterable[str]) -> Finding:
    # NCCL passes over a device that is not there; nothing starts without an interface or address.
    say = (
        assigned.warning if assigned.name in ("NCCL_IB_HCA", "UCX_NET_DEVICES") else assigned.error
    )
    return say(
        f"{assigned.shown}: this host has {what}",
        why=f"It has {', '.join(has) or 'none at all'}.",
        hint="`patchkit env` writes what fits; for a file of another node: --elsewhere",
        source="patchkit probe",
    )


def _down(assigned: Assignment, what: str) -> Finding:
    return assigned.warning(
        f"{assigned.shown}: {what}",
        why="No cable, or the other end is off, or it is the other port that is cabled.",
        hint="`patchkit probe` shows what is cabled",
        source="patchkit probe",
    )
