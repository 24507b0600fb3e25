"""Machines as folders, for `probe --root`: ``build(folder, "cable_port0", node=1)``.

Written from documented facts (names, PCI addresses, twins, memory, drivers, the oddities of
nvidia-smi); none is a dump of a real GB10 or Thor. They have the layout of `patchkit probe --save`:
sysfs and procfs with their symbolic links, and what tools answered below commands/.

Node 0 is the head. Its addresses end in 10, node 1's in 11, node 2's in 12: 10.0.0.x on the
management port, 192.168.100.x and 192.168.101.x on the two halves of the cabled cage. Hardware
addresses are of the block that RFC 7042 keeps for documents.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from ipaddress import IPv6Address, ip_interface
from pathlib import Path

RATE = 200_000  # Mbit/s, what each half of a cabled cage says of itself


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

    @property
    def state(self) -> str:
        return self.operstate or ("up" if self.up else "down")

    @property
    def pci(self) -> str:
        last = self.at.rpartition("/")[2]
        return last if last.count(":") == 2 else ""

    @property
    def link_local(self) -> str:
        return f"fe80::200:5eff:fe00:53{_number(self.name):02x}"


@dataclass(frozen=True, kw_only=True)
class Machine:
    hostname: str
    cards: tuple[Card, ...]
    kernel: str = "6.17.0-1029-nvidia"
    os: str = "Ubuntu 24.04.5 LTS"
    gpu: str = "NVIDIA GB10, 12.1, 580.173.02, [N/A], 0000000F:01:00.0"
    memory: int = 127_600_748  # KiB
    parts: tuple[str, ...] = ("0xd87",) * 10 + ("0xd85",) * 10
    model: str = ""  # of the device tree, on machines without DMI
    without: tuple[str, ...] = ()  # files and folders that are missing


LOOPBACK = Card(
    name="lo",
    mtu=65536,
    operstate="unknown",
    up=True,
    addresses=("127.0.0.1/8", "::1/128"),
    type=772,
)
DOCKER = Card(name="docker0", addresses=("172.17.0.1/16",))


def _functions() -> tuple[Card, ...]:
    """The four PCI functions of the one ConnectX-7, none of them cabled."""
    first, second = "pci0000:00/0000:00:00.0/0000:01:00", "pci0002:00/0002:00:00.0/0002:01:00"
    named = (
        ("enp1s0f0np0", f"{first}.0", "p0", "rocep1s0f0"),
        ("enp1s0f1np1", f"{first}.1", "p1", "rocep1s0f1"),
        ("enP2p1s0f0np0", f"{second}.0", "p0", "roceP2p1s0f0"),
        ("enP2p1s0f1np1", f"{second}.1", "p1", "roceP2p1s0f1"),
    )
    return tuple(
        Card(name=name, at=at, driver="mlx5_core", port=port, rdma=rdma)
        for name, at, port, rdma in named
    )


def _spark(node: int, **cabled: str | tuple[str, ...]) -> Machine:
    """A Spark whose named netdevs are cabled: ``_spark(0, enp1s0f0np0="192.168.100.10/24")``."""
    management = Card(
        name="enP7s7",
        at="pci0007:00/0007:00:00.0/0007:01:00.0",
        driver="r8127",
        up=True,
        speed=10_000,
        addresses=(f"10.0.0.{10 + node}/24",),
    )
    radio = Card(
        name="wlP9s9", at="pci0009:00/0009:00:00.0/0009:01:00.0", driver="mt7925e", wifi=True
    )
    cards = (LOOPBACK, management, *_functions(), radio, DOCKER)
    machine = Machine(hostname=f"spark-{node + 1}", cards=cards)
    for name, addresses in cabled.items():
        own = (addresses,) if isinstance(addresses, str) else addresses
        machine = _with(machine, name, up=True, speed=RATE, mtu=9000, addresses=own)
    return machine


def _with(machine: Machine, name: str, **changes: object) -> Machine:
    cards = (replace(card, **changes) if card.name == name else card for card in machine.cards)
    return replace(machine, cards=tuple(cards))


def _cabled(node: int, cage: int, third: int = 100) -> dict[str, str]:
    """Both halves of a cage, in two subnets as NVIDIA's playbook has them."""
    names = (f"enp1s0f{cage}np{cage}", f"enP2p1s0f{cage}np{cage}")
    return {name: f"192.168.{third + k}.{10 + node}/24" for k, name in enumerate(names)}


def single(node: int) -> Machine:
    return _spark(node)


def cable_port0(node: int) -> Machine:
    return _spark(node, **_cabled(node, 0))


def cable_port1(node: int) -> Machine:
    return _spark(node, **_cabled(node, 1))


def both_cables(node: int) -> Machine:
    return _spark(node, **_cabled(node, 0), **_cabled(node, 1, third=102))


def ring(node: int) -> Machine:
    """Cage 0 leads to the next node, cage 1 to the one before; each cable has two subnets."""
    ahead, behind = 100 + 2 * node, 100 + 2 * ((node - 1) % 3)
    return _spark(node, **_cabled(node, 0, ahead), **_cabled(node, 1, behind))


def no_rdma(node: int) -> Machine:
    """The RDMA modules are not loaded: there is no /sys/class/infiniband."""
    machine = cable_port0(node)
    return replace(machine, cards=tuple(replace(card, rdma="") for card in machine.cards))


def renamed(node: int) -> Machine:
    """No udev rule named the RDMA devices: mlx5_N in the order of their PCI addresses."""
    machine = cable_port0(node)
    for number, card in enumerate(_functions()):
        machine = _with(machine, card.name, rdma=f"mlx5_{number}")
    return machine


def thor(node: int) -> Machine:
    """A Jetson Thor: no DMI, no RDMA, MGBE ports that are no PCI devices."""
    ports = tuple(
        Card(
            name=f"mgbe{number}_0",
            at=f"platform/bus@0/a8{8 + number:x}8a10000.ethernet",
            driver="nvethernet",
        )
        for number in range(4)
    )
    wired = Card(
        name="enP2p1s0",
        at="pci0002:00/0002:00:00.0/0002:01:00.0",
        driver="r8126",
        up=True,
        speed=5_000,
        addresses=(f"10.0.0.{10 + node}/24",),
    )
    machine = Machine(
        hostname=f"thor-{node + 1}",
        cards=(LOOPBACK, wired, *ports, Card(name="l4tbr0"), DOCKER),
        kernel="6.8.12-tegra",
        os="Ubuntu 24.04.3 LTS",
        gpu="NVIDIA Thor, 11.0, 580.00, [N/A], 00000000:01:00.0",
        memory=128_823_624,
        parts=("0xd83",) * 14,
        model="NVIDIA Jetson AGX Thor Developer Kit",
    )
    own = (f"192.168.100.{10 + node}/24",)
    return _with(machine, "mgbe0_0", up=True, speed=25_000, mtu=9000, addresses=own)


def link_down(node: int) -> Machine:
    """Addresses are configured, but the cable is out or its other end is off."""
    machine = cable_port0(node)
    for name in _cabled(node, 0):
        machine = _with(machine, name, up=False, speed=-1)
    return machine


def wrong_mtu(node: int) -> Machine:
    return _with(cable_port0(node), "enP2p1s0f0np0", mtu=1500)


def two_addresses(node: int) -> Machine:
    own = (f"192.168.100.{10 + node}/24", f"192.168.110.{10 + node}/24")
    return _with(cable_port0(node), "enp1s0f0np0", addresses=own)


def ipv6_only(node: int) -> Machine:
    machine = cable_port0(node)
    for number, name in enumerate(_cabled(node, 0)):
        machine = _with(machine, name, addresses=(f"fd00:{100 + number}::{10 + node}/64",))
    return machine


def missing_files(node: int) -> Machine:
    """As in a container that shows a part of sysfs, or while a driver is being reloaded."""
    missing = (
        "sys/class/dmi",
        "sys/class/net/enp1s0f0np0/mtu",
        "sys/class/net/enp1s0f1np1/operstate",
        "sys/class/net/enP2p1s0f0np0/phys_port_name",
        "sys/class/net/enP2p1s0f1np1/device",
        "sys/class/infiniband/rocep1s0f0/ports/1/state",
        "sys/class/infiniband/roceP2p1s0f0/ports/1/gid_attrs",
        "sys/class/infiniband/rocep1s0f1/ports",
    )
    return replace(cable_port0(node), without=missing)


def same_subnet(node: int) -> Machine:
    own = (f"192.168.100.{110 + node}/24",)
    return _with(cable_port0(node), "enP2p1s0f0np0", addresses=own)


def link_local(node: int) -> Machine:
    """NVIDIA's former automatic netplan."""
    machine = cable_port0(node)
    for number, name in enumerate(_cabled(node, 0)):
        own = (f"169.254.{37 + 100 * number}.{80 + 7 * node}/16",)
        machine = _with(machine, name, addresses=own)
    return machine


def one_twin(node: int) -> Machine:
    """Only the first half of the cabled cage has an IPv4 address."""
    return _with(cable_port0(node), "enP2p1s0f0np0", addresses=())


_MACHINES: tuple[Callable[[int], Machine], ...] = (
    single,
    cable_port0,
    cable_port1,
    both_cables,
    ring,
    no_rdma,
    renamed,
    thor,
    link_down,
    wrong_mtu,
    two_addresses,
    ipv6_only,
    missing_files,
    same_subnet,
    link_local,
    one_twin,
)
MACHINES = {make.__name__: make for make in _MACHINES}
NAMES = tuple(MACHINES)


def build(folder: Path, name: str, *, node: int = 0) -> Path:
    """Write a machine below ``folder/name-node`` and return that root."""
    root = folder / f"{name}-{node}"
    write(root, MACHINES[name](node))
    return root


def write(root: Path, machine: Machine) -> None:
    for path, text in _texts(machine):
        _file(root / path, text)
    for card in machine.cards:
        _netdev(root, card)
        if card.rdma:
            _rdma(root, card)
    for path in machine.without:
        _remove(root / path)


def _texts(machine: Machine) -> Iterator[tuple[str, str]]:
    """Everything that is no device: path and content."""
    yield "proc/sys/kernel/hostname", machine.hostname
    yield "proc/sys/kernel/osrelease", machine.kernel
    yield "proc/sys/kernel/arch", "aarch64"
    yield "proc/meminfo", _meminfo(machine.memory)
    yield "proc/cpuinfo", "\n".join(_processor(*each) for each in enumerate(machine.parts))
    yield "etc/os-release", f'NAME="Ubuntu"\nPRETTY_NAME="{machine.os}"\nID=ubuntu'
    yield "commands/ip-address.json", json.dumps(list(map(_addressed, machine.cards)))
    yield "commands/nvidia-smi.csv", machine.gpu
    if machine.model:
        yield "proc/device-tree/model", f"{machine.model}\0"
        return
    dmi = {
        "sys_vendor": "NVIDIA",
        "product_name": "NVIDIA_DGX_Spark",
        "bios_version": "5.36",
        "bios_date": "08/06/2025",
    }
    for key, value in dmi.items():
        yield f"sys/class/dmi/id/{key}", value


def _meminfo(total: int) -> str:
    sizes = {
        "MemTotal": total,
        "MemFree": 2_904_556,
        "MemAvailable": 121_000_000,
        "SwapTotal": 16_777_212,
        "SwapFree": 16_777_212,
    }
    return "\n".join(f"{key + ':':<16}{size:>12} kB" for key, size in sizes.items())


def _processor(number: int, part: str) -> str:
    """arm64 names no model: an implementer and a part."""
    return (
        f"processor\t: {number}\nCPU implementer\t: 0x41\nCPU part\t: {part}\nCPU revision\t: 1\n"
    )


def _addressed(card: Card) -> dict[str, object]:
    """What `ip -json -details address` says of a netdev, as far as it matters."""
    kind = {} if card.at or card is LOOPBACK else {"linkinfo": {"info_kind": "bridge"}}
    own = [*card.addresses, *([f"{card.link_local}/64"] if card.up and card.at else [])]
    return {"ifname": card.name, "mtu": card.mtu, **kind, "addr_info": list(map(_address, own))}


def _address(text: str) -> dict[str, object]:
    found = ip_interface(text)
    scope = "host" if found.is_loopback else "link" if found.is_link_local else "global"
    return {
        "family": "inet" if found.version == 4 else "inet6",
        "local": str(found.ip),
        "prefixlen": found.network.prefixlen,
        "scope": scope,
    }


def _netdev(root: Path, card: Card) -> None:
    """The folder of a netdev in /sys/devices, and the links that lead to it and back."""
    device = f"sys/devices/{card.at or 'virtual'}"
    home = root / device / "net" / card.name
    facts = {
        "operstate": card.state,
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
        slot = f"\nPCI_SLOT_NAME={card.pci}" if card.pci else ""
        _file(root / device / "uevent", f"DRIVER={card.driver}{slot}")
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
    for index, (kind, gid) in enumerate(_gids(card)):
        _file(home / f"ports/1/gids/{index}", IPv6Address(gid).exploded)
        _file(home / f"ports/1/gid_attrs/types/{index}", kind)
    _file(home / "ports/1/gids/9", IPv6Address(0).exploded)  # an empty entry


def _gids(card: Card) -> Iterator[tuple[str, str]]:
    """The default GIDs, then each address; every one as RoCE v1 and as RoCE v2."""
    own = (ip_interface(each).ip for each in card.addresses if card.up)
    mapped = (f"::ffff:{each}" if each.version == 4 else str(each) for each in own)
    for gid in (card.link_local, *mapped):
        yield "IB/RoCE v1", gid
        yield "RoCE v2", gid


def _number(name: str) -> int:
    """A number of one byte that differs between the netdevs of a machine."""
    return sum(name.encode()) % 256


def _file(place: Path, text: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(f"{text}\n", encoding="utf-8")


def _link(place: Path, target: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(os.path.relpath(target, place.parent))


def _remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink()
