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
    halves = (each for each in host.netdevs if each.cage is not None)
    for netdev in sorted(halves, key=lambda each: (each.cage, each.pci, each.name)):
        found[netdev.cage] = (*found.get(netdev.cage, ()), netdev)
    return found


def cabled(host: Host) -> Cages:
    """Return the cages with a link on at least one of their twins."""
    return {cage: twins for cage, twins in cages(host).items() if cage in host.cabled}


def named(host: Host, names: Sequence[str]) -> Cages:
    """Return netdevs that the user named, as one cage. Raises UsageError for a missing one."""
    for name in names:
        if host.netdev(name) is None:
            there = ", ".join(each.name for each in host.netdevs) or "none"
            raise UsageError(f"no network interface is called {name!r}", hint=f"there are: {there}")
    once = dict.fromkeys(names)
    return {None: tuple(netdev for name in once if (netdev := host.netdev(name)))}


def listing(known: Cages) -> str:
    """Return ``cage 0: enp1s0f0np0, enP2p1s0f0np0; cage 1: …``."""
    return "; ".join(
        f"cage {cage}: {', '.join(twin.name for twin in twins)}" for cage, twins in known.items()
    )


def letter(twin: int) -> str:
    """Return A for the first half of a cage, B for the second."""
    return chr(ord("A") + twin)


def no_card(host: Host) -> HostError:
    """Return the error for a machine on which no function of the ConnectX-7 is to be seen."""
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
        f"no QSFP cage is cabled: {listing(known)}",
        why="no cable, the other end is off, or the interfaces are down administratively, "
        "which hides the link",
        hint="plug the cable in at both ends and reboot both; if it is in: "
        f"{quoted('sudo', 'ip', 'link', 'set', first, 'up')}; to plan all the same: --cage 0",
    )
