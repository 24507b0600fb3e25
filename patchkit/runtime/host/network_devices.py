"""Read netdevs and RDMA devices of sysfs, with the addresses and the cage of each."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from patchkit.foreign import read_json
from patchkit.process import attempt
from patchkit.runtime.host.host import Address, Gid, Netdev, Rdma
from patchkit.runtime.host.machine_root import Reader, ToolUnavailable, printable
from patchkit.runtime.rules.releases import read_env_data

Device = TypeVar("Device", Netdev, Rdma)
_NET, _RDMA = "sys/class/net", "sys/class/infiniband"
_LOOPBACK = 772  # ARPHRD_LOOPBACK of linux/if_arp.h
_SECONDS = 10.0  # for ip to answer


def read_network_devices(
    reader: Reader,
) -> tuple[tuple[Netdev, ...], tuple[Rdma, ...]]:
    """Return the interfaces and the RDMA devices, each with its cage and the name of its twin."""
    links = _read_addresses(reader)
    names = reader.folders(_NET, needed=True)
    if names and links and (strange := sorted(links.keys() ^ set(names))):
        # sysfs shows the namespace in which it was mounted, `ip` that of this process.
        reader.notes.append(
            f"/{_NET} is of another network namespace: only one has {', '.join(strange)}"
        )

    netdevs = [
        _read_netdev(reader, name, links.get(name, _KernelLink())) for name in names
    ]

    # p0 may be the port of a cage, pf0vf1 may not.
    uplinks = [netdev for netdev in netdevs if re.fullmatch(r"(p\d)?", netdev.port)]
    uplink_names = {netdev.name for netdev in uplinks}

    devices = [_read_rdma(reader, name, uplink_names) for name in reader.folders(_RDMA)]
    drivers = ("", read_env_data("hardware")["connectx"]["driver"])
    cards = [netdev for netdev in uplinks if netdev.driver in drivers]
    placed = {card.name: _with_cage(card, cards) for card in cards}

    return (
        tuple(placed.get(netdev.name, netdev) for netdev in netdevs),
        tuple(_with_cage(device, devices) for device in devices),
    )


def _read_rdma(reader: Reader, name: str, uplinks: Collection[str]) -> Rdma:
    """Return an RDMA device, without cage and twin; its netdev is one of ``uplinks``."""
    device = f"{_RDMA}/{name}/device"
    port = f"{_RDMA}/{name}/ports/1"
    netdevs = reader.folders(f"{device}/net")
    state = reader.line(f"{port}/state", needed=True)

    return Rdma(
        name=name,
        state=state.rpartition(": ")[2],  # of "4: ACTIVE"
        netdev=next((netdev for netdev in netdevs if netdev in uplinks), ""),
        pci=reader.device(device)[0],
        gids=tuple(_read_gids(reader, port)),
    )


def _read_gids(reader: Reader, port: str) -> Iterator[Gid]:
    """Yield the entries of a port's GID table; sysfs has EINVAL for the type of an empty one."""
    types = f"{port}/gid_attrs/types"
    indices = [int(entry) for entry in reader.names(types) if entry.isdecimal()]
    for index in sorted(indices):
        kind = reader.line(f"{types}/{index}")
        if not kind:
            continue

        try:
            # 0000:…:ffff:c0a8:640a has 192.168.100.10 mapped in.
            gid = ipaddress.IPv6Address(reader.line(f"{port}/gids/{index}"))
        except ValueError:
            gid = ipaddress.IPv6Address(0)
        yield Gid(index=index, kind=kind, address=str(gid.ipv4_mapped or ""))


def _with_cage(device: Device, devices: Iterable[Device]) -> Device:
    """Return a device with its cage and twin, by PCI address, since names depend on udev."""
    for number, cage in enumerate(read_env_data("hardware")["connectx"]["cages"]):
        functions = set(cage["functions"])
        if device.pci in functions:
            functions.remove(device.pci)
            twins = (twin.name for twin in devices if twin.pci in functions)
            return replace(device, cage=number, twin=next(twins, ""))
    return device


def _read_netdev(reader: Reader, name: str, link: _KernelLink) -> Netdev:
    home = f"{_NET}/{name}"
    pci, driver = reader.device(f"{home}/device")
    parts = reader.folders(home)
    return Netdev(
        name=name,
        state=reader.line(f"{home}/operstate", needed=True) or "unknown",
        carrier=reader.line(f"{home}/carrier") == "1",
        mtu=reader.number(f"{home}/mtu", needed=True) or 0,
        speed=reader.number(f"{home}/speed"),
        mac=reader.line(f"{home}/address"),
        driver=driver or link.kind,
        pci=pci,
        port=reader.line(f"{home}/phys_port_name"),
        kind=_read_kind(reader, home, parts),
        addresses=link.addresses,
        lanes=reader.number(f"{home}/device/current_link_width"),
        master=_read_master(reader, home) if "master" in parts else "",
    )


def _read_kind(reader: Reader, home: str, parts: Collection[str]) -> str:
    if reader.line(f"{home}/type") == str(_LOOPBACK):
        return "loopback"
    # Every cfg80211 driver has phy80211; wireless comes from the older interface.
    if "wireless" in parts or "phy80211" in parts:
        return "wifi"
    is_virtual = "/devices/virtual/" in f"/{reader.real(home)}"
    return "virtual" if is_virtual else "ethernet"


def _read_master(reader: Reader, home: str) -> str:
    """Return the bond or bridge of a netdev: the target of a link, which a recording keeps."""
    reader.line(f"{home}/master/address")
    return printable(Path(reader.real(f"{home}/master")).name)


@dataclass(frozen=True, slots=True)
class _KernelLink:
    """The kind of a virtual netdev as `ip` calls it (``bridge``, ``veth``), and its addresses."""

    kind: str = ""
    addresses: tuple[Address, ...] = ()


def _read_addresses(reader: Reader) -> dict[str, _KernelLink]:
    """Return the kind and the addresses of each netdev by its name."""
    try:
        text = reader.answer("ip-address.json", ask_addresses)
    except ToolUnavailable as error:
        reader.notes.append(f"no addresses: {error}")
        return {}

    try:
        links = {}
        for entry in read_json(text):
            kind = entry.get("linkinfo", {}).get("info_kind", "")
            rows = (row for row in entry["addr_info"] if row.get("local"))
            addresses = tuple(_read_address(row) for row in rows)
            links[printable(entry["ifname"])] = _KernelLink(printable(kind), addresses)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reader.notes.append(
            f"no addresses: /commands/ip-address.json is not understood: {error}"
        )
        return {}
    return links


def _read_address(row: dict[str, Any]) -> Address:
    interface = ipaddress.ip_interface(f"{row['local']}/{row['prefixlen']}")
    return Address(
        address=str(interface.ip),
        prefix=interface.network.prefixlen,
        family="inet" if interface.version == 4 else "inet6",
        link_local=interface.ip.is_link_local,
    )


def ask_addresses() -> str:
    """Return the output of `ip -json -details address`. Raises ToolUnavailable."""
    done = attempt("ip", "-json", "-details", "address", timeout=_SECONDS)
    if done.trouble:
        raise ToolUnavailable(
            f"ip: {printable(done.trouble)[:200]} (sudo apt install iproute2)"
        )
    return done.output
