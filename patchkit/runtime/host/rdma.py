"""Read RDMA devices: /sys/class/infiniband, port 1 of each, and which of them share a cage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from ipaddress import IPv6Address
from typing import TypeVar

from patchkit.runtime.host import hardware
from patchkit.runtime.host.host import Gid, Netdev, Rdma
from patchkit.runtime.host.machine_root import Reader, device

Device = TypeVar("Device", Netdev, Rdma)
_CLASS = "sys/class/infiniband"


def rdma(reader: Reader, netdevs: Iterable[Netdev]) -> tuple[Rdma, ...]:
    """Return the devices, without cages and twins: ``paired`` finds those."""
    uplinks = frozenset(each.name for each in netdevs if hardware.is_uplink(each.port))
    return tuple(_read_rdma(reader, name, uplinks) for name in reader.folders(_CLASS))


def paired(
    netdevs: tuple[Netdev, ...], found: tuple[Rdma, ...]
) -> tuple[tuple[Netdev, ...], tuple[Rdma, ...]]:
    """Return netdevs and RDMA devices with their cage and the name of their twin."""
    driver = hardware.facts()["connectx"]["driver"]
    cards = [
        card for card in netdevs if hardware.is_uplink(card.port) and card.driver in ("", driver)
    ]
    return (
        tuple(_with_cage(card, cards) if card in cards else card for card in netdevs),
        tuple(_with_cage(device, found) for device in found),
    )


def _with_cage(device: Device, others: Iterable[Device]) -> Device:
    half = hardware.half_of(device.pci)
    if half is None:
        return device
    twin = next((other.name for other in others if other.pci == half.twin), "")
    return replace(device, cage=half.cage, twin=twin)


def _read_rdma(reader: Reader, name: str, uplinks: frozenset[str]) -> Rdma:
    home = f"{_CLASS}/{name}"
    port = f"{home}/ports/1"
    attached = reader.folders(f"{home}/device/net")
    # Beside a port's own netdev there may be those of virtual functions.
    netdev = next((each for each in attached if each in uplinks), "")
    return Rdma(
        name=name,
        # sysfs has "4: ACTIVE".
        state=reader.line(f"{port}/state", needed=True).rpartition(": ")[2],
        link_layer=reader.line(f"{port}/link_layer"),
        netdev=netdev,
        pci=device(reader, f"{home}/device")[0],
        gids=tuple(_read_gids(reader, port)),
    )


def _read_gids(reader: Reader, port: str) -> Iterable[Gid]:
    types = f"{port}/gid_attrs/types"
    for index in sorted(int(name) for name in reader.names(types) if name.isdecimal()):
        # sysfs has EINVAL for the type of an empty entry.
        if kind := reader.line(f"{types}/{index}"):
            yield Gid(
                index=index, kind=kind, address=_mapped_ipv4(reader.line(f"{port}/gids/{index}"))
            )


def _mapped_ipv4(gid: str) -> str:
    """Return ``192.168.100.10`` of ``0000:…:ffff:c0a8:640a``; "" if no IPv4 is mapped in."""
    try:
        mapped = IPv6Address(gid).ipv4_mapped
    except ValueError:
        return ""
    return str(mapped or "")
