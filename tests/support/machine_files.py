"""Write a machine as files: what `probe --root` reads, with the oddities of sysfs and nvidia-smi.

The layout is that of `patchkit probe --save`: sysfs and procfs with their symbolic links, and what
tools answered below commands/.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_interface
from pathlib import Path

CMDLINE = "BOOT_IMAGE=/vmlinuz root=/dev/nvme0n1p2 ro quiet splash"


@dataclass(frozen=True, kw_only=True)
class Card:
    """A netdev, and the RDMA device that comes with it. ``at`` is its folder in /sys/devices."""

    name: str
    at: str = ""
    driver: str = ""
    port: str = ""
    rdma: str = ""
    up: bool = False
    speed: int = -1
    mtu: int = 1500
    addresses: tuple[str, ...] = ()
    wifi: bool = False
    type: int = 1
    operstate: str = ""
    kind: str = "bridge"  # of a virtual one, as `ip` calls it
    master: str = ""  # the virtual one that it is a part of

    @property
    def link_local(self) -> str:
        return f"fe80::200:5eff:fe00:53{_number(self.name):02x}"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """``cma`` are CmaTotal and CmaFree of /proc/meminfo in KiB; None for no such lines."""

    hostname: str
    cards: tuple[Card, ...]
    kernel: str = "6.17.0-1029-nvidia"
    os: str = "Ubuntu 24.04.5 LTS"
    gpu: str = "NVIDIA GB10, 12.1, 580.173.02, [N/A], 0000000F:01:00.0"
    memory: int = 127_600_748  # KiB
    parts: tuple[str, ...] = ("0xd87",) * 10 + ("0xd85",) * 10
    cma: tuple[int, int] | None = None
    cmdline: str = CMDLINE
    model: str = ""  # of the device tree, on machines without DMI
    without: tuple[str, ...] = ()  # files and folders that are missing


# The figures of NVIDIA's own Spark.
DMI = {
    "sys_vendor": "NVIDIA",
    "product_name": "NVIDIA_DGX_Spark",
    "bios_version": "5.36_0ACUM018",
    "bios_date": "08/06/2025",
}
LOOPBACK = Card(
    name="lo",
    mtu=65536,
    operstate="unknown",
    up=True,
    addresses=("127.0.0.1/8", "::1/128"),
    type=772,
)


def write(root: Path, machine: Machine) -> None:
    for path, text in _texts(machine):
        _file(root / path, text)
    for card in machine.cards:
        _netdev(root, card)
        if card.rdma:
            _rdma(root, card)
    for place in (root / path for path in machine.without):
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink()


def _texts(machine: Machine) -> Iterator[tuple[str, str]]:
    """Everything that is no device: path and content."""
    yield "proc/sys/kernel/hostname", machine.hostname
    yield "proc/sys/kernel/osrelease", machine.kernel
    yield "proc/sys/kernel/arch", "aarch64"
    yield "proc/cmdline", machine.cmdline
    sizes = {
        "MemTotal": machine.memory,
        "MemFree": 2_904_556,
        "MemAvailable": 121_000_000,
    }
    sizes |= {"SwapTotal": 16_777_212, "SwapFree": 16_777_212}
    if machine.cma:
        sizes["CmaTotal"], sizes["CmaFree"] = machine.cma
    rows = (f"{key + ':':<16}{size:>12} kB" for key, size in sizes.items())
    yield "proc/meminfo", "\n".join(rows)
    # arm64 names no model: an implementer and a part.
    cpu = (
        "processor\t: {}\nCPU implementer\t: 0x41\nCPU part\t: {}\nCPU revision\t: 1\n"
    )
    yield (
        "proc/cpuinfo",
        "\n".join(cpu.format(*each) for each in enumerate(machine.parts)),
    )
    yield "etc/os-release", f'NAME="Ubuntu"\nPRETTY_NAME="{machine.os}"\nID=ubuntu'
    yield "commands/ip-address.json", json.dumps(list(map(_addressed, machine.cards)))
    yield "commands/nvidia-smi.csv", machine.gpu
    if machine.model:
        yield "proc/device-tree/model", f"{machine.model}\0"
        return
    for key, value in DMI.items():
        yield f"sys/class/dmi/id/{key}", value


def _addressed(card: Card) -> dict[str, object]:
    """What `ip -json -details address` says of a netdev, as far as it matters."""
    kind = {} if card.at or card is LOOPBACK else {"linkinfo": {"info_kind": card.kind}}
    own = [*card.addresses, *([f"{card.link_local}/64"] if card.up and card.at else [])]
    addresses = [
        {
            "family": "inet" if found.version == 4 else "inet6",
            "local": str(found.ip),
            "prefixlen": found.network.prefixlen,
            "scope": "host"
            if found.is_loopback
            else "link"
            if found.is_link_local
            else "global",
        }
        for found in map(ip_interface, own)
    ]
    return {"ifname": card.name, "mtu": card.mtu, **kind, "addr_info": addresses}


def _netdev(root: Path, card: Card) -> None:
    """The folder of a netdev in /sys/devices, and the links that lead to it and back."""
    device = f"sys/devices/{card.at or 'virtual'}"
    home = root / device / "net" / card.name
    facts = {
        "operstate": card.operstate or ("up" if card.up else "down"),
        "mtu": str(card.mtu),
        "address": f"00:00:5e:00:53:{_number(card.name):02x}",
        "type": str(card.type),
        "phys_port_name": card.port,
    }
    if card.up:  # of a netdev that is down, the kernel refuses to tell
        facts["carrier"] = "1"
    if card.at:
        facts["speed"] = str(card.speed)
    for key, value in facts.items():
        if value:
            _file(home / key, value)
    _link(root / "sys/class/net" / card.name, home)
    if card.at:
        _link(home / "device", root / device)
        last = card.at.rpartition("/")[2]
        slot = f"\nPCI_SLOT_NAME={last}" if last.count(":") == 2 else ""
        _file(root / device / "uevent", f"DRIVER={card.driver}{slot}")
    if card.master:
        _link(home / "master", root / "sys/devices/virtual/net" / card.master)
    if card.driver == "mlx5_core":
        _file(root / device / "current_link_width", "4")
    if card.wifi:
        (home / "wireless").mkdir()


def _rdma(root: Path, card: Card) -> None:
    device = root / "sys/devices" / card.at
    home = device / "infiniband" / card.rdma
    _link(root / "sys/class/infiniband" / card.rdma, home)
    _link(home / "device", device)
    _file(home / "ports/1/state", "4: ACTIVE" if card.up else "1: DOWN")
    _file(home / "ports/1/link_layer", "Ethernet")
    # The default GIDs, then each address; every one as RoCE v1 and as RoCE v2.
    own = (ip_interface(each).ip for each in card.addresses if card.up)
    gids = [
        card.link_local,
        *(f"::ffff:{it}" if it.version == 4 else str(it) for it in own),
    ]
    kinds = ("IB/RoCE v1", "RoCE v2")
    for index, (gid, kind) in enumerate(itertools.product(gids, kinds)):
        _file(home / f"ports/1/gids/{index}", IPv6Address(gid).exploded)
        _file(home / f"ports/1/gid_attrs/types/{index}", kind)
    _file(home / "ports/1/gids/9", IPv6Address(0).exploded)  # an empty entry


def _number(name: str) -> int:
    """A number of one byte that differs between the netdevs of a machine."""
    return sum(name.encode()) % 256


def _file(place: Path, text: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(f"{text}\n", encoding="utf-8")


def _link(place: Path, target: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(os.path.relpath(target, place.parent))
