"""Read netdevs and RDMA devices of sysfs, with addresses and cages of each."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from patchkit.foreign import read_json
from patchkit.process import attempt
from patchkit.runtime.host.host import Address, Gid, Netdev, Rdma
from patchkit.runtime.host.machine_root import Reader, ToolUnavailable, printable
from patchkit.runtime.rules.releases import read_env_data

Device = TypeVar("Device", Netdev, Rdma)
_NET, _RDMA = "sys/class/net", "sys/class/infiniband"
_LOOPBACK = 772  # ARPHRD_LOOPBACK of linux/if_arp.h
_SECONDS = 10.0  # for ip to answer


def read_links(reader: Reader) -> tuple[tuple[Netdev, ...], tuple[Rdma, ...]]:
    """Return the interfaces and the RDMA devices, each with its cage and the name of its twin."""
    links = _read_addresses(reader)
    names = reader.folders(_NET, needed=True)
    if names and links and (strange := sorted(set(links) ^ set(names))):
        # sysfs shows the namespace in which it was mounted, the kernel the one that asks.
        reader.notes.append(
            f"/{_NET} is of another network namespace: only one has {', '.join(strange)}"
        )
    netdevs = [_read_netdev(reader, name, *links.get(name, ("", ()))) for name in names]
    # The parts of a VRF keep their addresses.
    kinds_apart = read_env_data("hardware")["masters"]["parts_with_addresses"]
    apart = {name for name, (kind, _) in links.items() if kind in kinds_apart}
    netdevs = [replace(it, master="") if it.master in apart else it for it in netdevs]

    # p0 may be the port of a cage, pf0vf1 may not.
    uplinks = {
        netdev.name for netdev in netdevs if re.fullmatch(r"(p\d)?", netdev.port)
    }
    devices = [_read_rdma(reader, name, uplinks) for name in reader.folders(_RDMA)]
    driver = read_env_data("hardware")["connectx"]["driver"]
    cards = [
        each for each in netdevs if each.name in uplinks and each.driver in ("", driver)
    ]
    return (
        tuple(
            _with_cage(netdev, cards) if netdev in cards else netdev
            for netdev in netdevs
        ),
        tuple(_with_cage(device, devices) for device in devices),
    )


def _read_rdma(reader: Reader, name: str, uplinks: Collection[str]) -> Rdma:
    """Return an RDMA device, without its cage; beside its netdev may be virtual functions'."""
    netdevs = reader.folders(f"{_RDMA}/{name}/device/net")
    port = f"{_RDMA}/{name}/ports/1"
    return Rdma(
        name=name,
        state=reader.line(f"{port}/state", needed=True).rpartition(": ")[
            2
        ],  # of "4: ACTIVE"
        netdev=next((netdev for netdev in netdevs if netdev in uplinks), ""),
        pci=reader.device(f"{_RDMA}/{name}/device")[0],
        gids=tuple(_read_gids(reader, port)),
    )


def _read_gids(reader: Reader, port: str) -> Iterator[Gid]:
    """Yield the entries of a port's GID table; sysfs has EINVAL for the type of an empty one."""
    types = f"{port}/gid_attrs/types"
    for index in sorted(
        int(entry) for entry in reader.names(types) if entry.isdecimal()
    ):
        kind = reader.line(f"{types}/{index}")
        if not kind:
            continue
        try:
            # 0000:…:ffff:c0a8:640a has 192.168.100.10 mapped in.
            gid = ipaddress.IPv6Address(reader.line(f"{port}/gids/{index}"))
        except ValueError:
            gid = ipaddress.IPv6Address(0)
        yield Gid(index=index, kind=kind, address=str(gid.ipv4_mapped or ""))


def _with_cage(device: Device, others: Iterable[Device]) -> Device:
    """Return a device with its cage and twin, which its PCI address tells: names depend on udev."""
    for number, cage in enumerate(read_env_data("hardware")["connectx"]["cages"]):
        if device.pci in cage["functions"]:
            halves = (other for other in others if other.pci in cage["functions"])
            twin = next((other.name for other in halves if other.pci != device.pci), "")
            return replace(device, cage=number, twin=twin)
    return device


def _read_netdev(
    reader: Reader, name: str, virtual_kind: str, addresses: tuple[Address, ...]
) -> Netdev:
    home = f"{_NET}/{name}"
    pci, driver = reader.device(f"{home}/device")
    inside = reader.folders(home)
    master = _read_master(reader, home) if "master" in inside else ""
    if reader.line(f"{home}/type") == str(_LOOPBACK):
        kind = "loopback"
    # Every cfg80211 driver has phy80211; wireless comes from the older interface.
    elif "wireless" in inside or "phy80211" in inside:
        kind = "wifi"
    else:
        kind = (
            "virtual" if "/devices/virtual/" in f"/{reader.real(home)}" else "ethernet"
        )
    return Netdev(
        name=name,
        state=reader.line(f"{home}/operstate", needed=True) or "unknown",
        carrier=reader.line(f"{home}/carrier") == "1",
        mtu=reader.number(f"{home}/mtu", needed=True) or 0,
        speed=reader.number(f"{home}/speed"),
        mac=reader.line(f"{home}/address"),
        driver=driver or virtual_kind,
        pci=pci,
        port=reader.line(f"{home}/phys_port_name"),
        kind=kind,
        addresses=addresses,
        lanes=reader.number(f"{home}/device/current_link_width"),
        master=master,
    )


def _read_master(reader: Reader, home: str) -> str:
    """Return what a netdev is a part of: the target of a link, which a recording keeps."""
    reader.line(f"{home}/master/address")
    return printable(Path(reader.real(f"{home}/master")).name)


def _read_addresses(reader: Reader) -> dict[str, tuple[str, tuple[Address, ...]]]:
    """Return netdev → its kind if it is virtual (``bridge``, ``veth``), and its addresses."""
    try:
        text = reader.answer("ip-address.json", ask_addresses)
    except ToolUnavailable as silent:
        reader.notes.append(f"no addresses: {silent}")
        return {}
    found = {}
    try:
        for link in read_json(text):
            addresses = []
            for entry in (entry for entry in link["addr_info"] if entry.get("local")):
                own = ipaddress.ip_interface(f"{entry['local']}/{entry['prefixlen']}")
                addresses.append(
                    Address(
                        address=str(own.ip),
                        prefix=own.network.prefixlen,
                        family="inet" if own.version == 4 else "inet6",
                        link_local=own.ip.is_link_local,
                    )
                )
            kind = printable(link.get("linkinfo", {}).get("info_kind", ""))
            found[printable(link["ifname"])] = kind, tuple(addresses)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reader.notes.append(
            f"no addresses: /commands/ip-address.json is not understood: {error}"
        )
        return {}
    return found


def ask_addresses() -> str:
    """Return what `ip -json -details address` prints. Raises ToolUnavailable."""
    done = attempt("ip", "-json", "-details", "address", timeout=_SECONDS)
    if done.trouble:
        raise ToolUnavailable(
            f"ip: {printable(done.trouble)[:200]} (sudo apt install iproute2)"
        )
    return done.output
