"""Find the QSFP cages of a host, and say why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from patchkit.errors import HostError, UsageError
from patchkit.quoting import quoted
from patchkit.runtime.host.advice import remark
from patchkit.runtime.host.host import Host, Netdev

Cages = Mapping[int | None, tuple[Netdev, ...]]
"""Number of the cage, or None for netdevs that the user named → its halves, twin A first."""


def cages(host: Host) -> Cages:
    """Return the netdevs of each QSFP cage, twin A (the lower PCI domain) first."""
    found: dict[int | None, tuple[Netdev, ...]] = {}
    halves = (netdev for netdev in host.netdevs if netdev.cage is not None)
    for netdev in sorted(halves, key=lambda half: (half.cage, half.pci, half.name)):
        found[netdev.cage] = (*found.get(netdev.cage, ()), netdev)
    return found


def cabled(host: Host) -> Cages:
    """Return the cages with a link on at least one of their twins."""
    return {cage: twins for cage, twins in cages(host).items() if cage in host.cabled}


def find_asked_cages(host: Host, names: Sequence[str], cage: int | None) -> Cages | None:
    """Return the netdevs or the cage that the user named, None for neither.

    Raises UsageError for what is not there, HostError for a host without any cage.
    """
    if names:
        for name in names:
            if host.netdev(name) is None:
                there = ", ".join(netdev.name for netdev in host.netdevs) or "none"
                hint = f"there are: {there}"
                raise UsageError(f"no network interface is called {name!r}", hint=hint)
        return {None: tuple(found for name in dict.fromkeys(names) if (found := host.netdev(name)))}
    known = cages(host)
    if not known:
        raise _no_card(host)
    if cage is None:
        return None
    if cage not in known:
        raise UsageError(f"there is no cage {cage}", hint=list_cages(known))
    return {cage: known[cage]}


def list_cages(known: Cages) -> str:
    """Return ``cage 0: enp1s0f0np0, enP2p1s0f0np0; cage 1: …``."""
    return "; ".join(
        f"cage {cage}: {', '.join(twin.name for twin in twins)}" for cage, twins in known.items()
    )


def _no_card(host: Host) -> HostError:
    if off_bus := remark(host, "no-connectx"):
        return HostError(off_bus.what, why=off_bus.why, hint=off_bus.hint)
    return HostError(
        "this machine has no QSFP cage that patchkit could recognise",
        why="this is not a DGX Spark, or the ConnectX-7's driver mlx5_core is not loaded",
        hint="`patchkit probe` shows what there is; or name interfaces with --netdev",
    )


def no_link(known: Cages) -> HostError:
    """Return the error for a machine whose cages have no link."""
    first = next(iter(known.values()))[0].name
    return HostError(
        f"no QSFP cage is cabled: {list_cages(known)}",
        why="no cable, the other end is off, or the interfaces are down administratively, "
        "which hides the link",
        hint="plug the cable in at both ends and reboot both; if it is in: "
        f"{quoted('sudo', 'ip', 'link', 'set', first, 'up')}; to plan all the same: --cage 0",
    )
