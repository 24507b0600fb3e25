"""Read network interfaces: /sys/class/net, and addresses from the kernel."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from patchkit.runtime.host.host import Address, Netdev
from patchkit.runtime.host.machine_root import Reader, ToolUnavailable, device, printable

_CLASS = "sys/class/net"
_LOOPBACK = 772  # ARPHRD_LOOPBACK of linux/if_arp.h
_UNKNOWN = (0xFFFF, 0xFFFFFFFF)  # -1 as 16 and as 32 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The facts beside sysfs of a netdev; ``kind`` of a virtual one: ``bridge``, ``veth``."""

    kind: str
    addresses: tuple[Address, ...]


def netdevs(reader: Reader) -> tuple[Netdev, ...]:
    """Return the interfaces, without cages and twins: ``rdma.paired`` finds those."""
    links = _read_links(reader)
    names = reader.folders(_CLASS, needed=True)
    if names and links and (strange := sorted(set(links) ^ set(names))):
        # sysfs shows the namespace in which it was mounted, the kernel the one that asks.
        reader.note(f"/{_CLASS} is of another network namespace: only one has {', '.join(strange)}")
    return tuple(_read_netdev(reader, name, links.get(name)) for name in names)


def _read_netdev(reader: Reader, name: str, link: Link | None) -> Netdev:
    home = f"{_CLASS}/{name}"
    pci, driver = device(reader, f"{home}/device")
    return Netdev(
        name=name,
        state=reader.line(f"{home}/operstate", needed=True) or "unknown",
        carrier=reader.line(f"{home}/carrier") == "1",
        mtu=max(reader.number(f"{home}/mtu", needed=True) or 0, 0),
        speed=_known_number(reader.number(f"{home}/speed")),
        mac=reader.line(f"{home}/address"),
        driver=driver or (link.kind if link else ""),
        pci=pci,
        port=reader.line(f"{home}/phys_port_name"),
        kind=_netdev_kind(reader, home),
        addresses=link.addresses if link else (),
        lanes=_known_number(reader.number(f"{home}/device/current_link_width")),
    )


def _netdev_kind(reader: Reader, home: str) -> str:
    inside = reader.folders(home)
    if reader.line(f"{home}/type") == str(_LOOPBACK):
        return "loopback"
    # Every cfg80211 driver has phy80211; wireless comes from the older interface.
    if "wireless" in inside or "phy80211" in inside:
        return "wifi"
    return "virtual" if "/devices/virtual/" in f"/{reader.real(home)}" else "ethernet"


def _known_number(found: int | None) -> int | None:
    """Return None for -1, signed or not: the driver does not know."""
    return found if found is not None and found > 0 and found not in _UNKNOWN else None


def _read_links(reader: Reader) -> dict[str, Link]:
    try:
        text = reader.answer("ip-address.json", _ask_kernel)
    except ToolUnavailable as silent:
        reader.note(f"no addresses: {silent}")
        return {}
    try:
        return {printable(each["ifname"]): _link_of(each) for each in json.loads(text)}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reader.note(f"no addresses: /commands/ip-address.json is not understood: {error}")
        return {}


def _ask_kernel() -> str:
    """Return what `ip -json address` would print. Raises ToolUnavailable."""
    from patchkit.runtime.host import netlink  # not for a recording

    try:
        return netlink.address_lines()
    except OSError as error:
        raise ToolUnavailable(f"netlink: {error.strerror}") from None


def _link_of(told: Mapping[str, Any]) -> Link:
    addresses = []
    for each in told["addr_info"]:
        if each.get("local"):
            found = ipaddress.ip_interface(f"{each['local']}/{each['prefixlen']}")
            addresses.append(
                Address(
                    address=str(found.ip),
                    prefix=found.network.prefixlen,
                    family="inet" if found.version == 4 else "inet6",
                    link_local=found.ip.is_link_local,
                )
            )
    kind = told.get("linkinfo", {}).get("info_kind", "")
    return Link(kind=printable(kind), addresses=tuple(addresses))
