"""Machines as folders, for `probe --root`: ``build(folder, "cable_port0", node=1)``.

Written from documented facts (names, PCI addresses, twins, memory, drivers, the oddities of
nvidia-smi) and from what owners show of their machines (kernels, addresses);
none is a dump of a real GB10 or Thor.

Node 0 is the head. Its addresses end in 10, node 1's in 11, node 2's in 12: 10.0.0.x on the
management port, 192.168.100.x and 192.168.101.x on the two halves of the cabled cage. Hardware
addresses are of the block that RFC 7042 keeps for documents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from patchkit.runtime.host.host import Host
from support.machine_files import CMDLINE, LOOPBACK, Card, Machine, write

RATE = 200_000  # Mbit/s, what each half of a cabled cage says of itself
DOCKER = Card(name="docker0", addresses=("172.17.0.1/16",))


A0, B0 = "enp1s0f0np0", "enP2p1s0f0np0"  # the two halves of cage 0
A1, B1 = "enp1s0f1np1", "enP2p1s0f1np1"


def _functions() -> tuple[Card, ...]:
    """The four PCI functions of the one ConnectX-7, none of them cabled."""
    first, second = (
        "pci0000:00/0000:00:00.0/0000:01:00",
        "pci0002:00/0002:00:00.0/0002:01:00",
    )
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
        name="wlP9s9",
        at="pci0009:00/0009:00:00.0/0009:01:00.0",
        driver="mt7925e",
        wifi=True,
    )
    cards = (LOOPBACK, management, *_functions(), radio, DOCKER)
    machine = Machine(hostname=f"spark-{node + 1}", cards=cards)
    for name, addresses in cabled.items():
        own = (addresses,) if isinstance(addresses, str) else addresses
        machine = _with(machine, name, up=True, speed=RATE, mtu=9000, addresses=own)
    return machine


def _with(machine: Machine, *names: str, **changes: object) -> Machine:
    """The machine with other facts of these netdevs."""
    cards = (
        replace(card, **changes) if card.name in names else card
        for card in machine.cards
    )
    return replace(machine, cards=tuple(cards))


def _cabled(node: int, cage: int, third: int = 100) -> dict[str, str]:
    """Both halves of a cage, in two subnets as NVIDIA's playbook has them."""
    names = (f"enp1s0f{cage}np{cage}", f"enP2p1s0f{cage}np{cage}")
    return {name: f"192.168.{third + k}.{10 + node}/24" for k, name in enumerate(names)}


def cable_out(node: int) -> Machine:
    """The cable was pulled out since boot: all four functions are there, and down."""
    return _spark(node)


def cable_port0(node: int) -> Machine:
    return _spark(node, **_cabled(node, 0))


def single(node: int) -> Machine:
    """No cable was plugged in at boot: DGX OS took the ConnectX-7 off the PCI bus."""
    machine = _spark(node)
    return replace(
        machine, cards=tuple(card for card in machine.cards if not card.rdma)
    )


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


def link_local(node: int) -> Machine:
    """NVIDIA's former automatic netplan."""
    machine = cable_port0(node)
    for number, name in enumerate((A0, B0)):
        own = (f"169.254.{37 + 100 * number}.{80 + 7 * node}/16",)
        machine = _with(machine, name, addresses=own)
    return machine


def two_in_one_subnet(node: int) -> Machine:
    """The cable in cage 0; cage 1 and the LAN port are in one /24, by way of a switch."""
    cage1 = {A1: f"10.0.0.{110 + node}/24", B1: ()}
    machine = _spark(node, **{A0: f"192.168.100.{10 + node}/24", B0: ()}, **cage1)
    return _with(machine, A1, B1, mtu=1500)


def pair_and_switch(node: int) -> Machine:
    """One of sixteen: cage 0 is a cable to one neighbour, cage 1 a port of 100G at a switch."""
    cage0 = {A0: f"10.10.200.{node}/31", B0: f"10.10.201.{node}/31"}
    machine = _spark(node, **cage0, **{A1: f"10.10.100.{10 + node}/24"})
    return _with(machine, A1, speed=RATE // 2)


def wifi_managed(node: int) -> Machine:
    """A machine that is managed over Wi-Fi; nothing is plugged into its LAN port."""
    machine = _with(
        _spark(node, **_cabled(node, 1)), "enP7s7", up=False, speed=-1, addresses=()
    )
    return _with(machine, "wlP9s9", up=True, addresses=(f"192.168.1.{40 + node}/24",))


def tailscale(node: int) -> Machine:
    """Others reach it by an overlay network."""
    own = (f"100.101.102.{10 + node}/32",)
    overlay = Card(
        name="tailscale0",
        mtu=1280,
        up=True,
        operstate="unknown",
        addresses=own,
        kind="tun",
    )
    machine = cable_port0(node)
    return replace(machine, cards=(*machine.cards, overlay))


def joined(node: int, kind: str) -> Machine:
    """Both halves of the cabled cage are parts of one interface, which has the address."""
    own = (f"192.168.100.{10 + node}/24",)
    whole = Card(name=f"{kind}0", mtu=9000, up=True, addresses=own, kind=kind)
    machine = _with(cable_port0(node), A0, B0, addresses=(), master=whole.name)
    return replace(machine, cards=(*machine.cards, whole))


# As in a container that shows a part of sysfs, or while a driver is being reloaded.
_MISSING = (
    "sys/class/dmi",
    f"sys/class/net/{A0}/mtu",
    f"sys/class/net/{A1}/operstate",
    f"sys/class/net/{B0}/phys_port_name",
    f"sys/class/net/{B1}/device",
    "sys/class/infiniband/rocep1s0f0/ports/1/state",
    "sys/class/infiniband/roceP2p1s0f0/ports/1/gid_attrs",
    "sys/class/infiniband/rocep1s0f1/ports",
)
_KERNEL7 = "7.0.0-1019-nvidia"
_ALONE = (single, cable_out, cable_port0, renamed, thor, link_local, two_in_one_subnet)
_ALONE += (pair_and_switch, wifi_managed, tailscale)
MACHINES: dict[str, Callable[[int], Machine]] = {
    **{make.__name__: make for make in _ALONE},
    "cable_port1": lambda node: _spark(node, **_cabled(node, 1)),
    "bond": lambda node: joined(node, "bond"),
    "bridge": lambda node: joined(node, "bridge"),
    "both_cables": lambda node: _spark(
        node, **_cabled(node, 0), **_cabled(node, 1, third=102)
    ),
    # Cage 0 leads to the next node, cage 1 to the one before; each cable has two subnets.
    "ring": lambda node: _spark(
        node,
        **_cabled(node, 0, 100 + 2 * node),
        **_cabled(node, 1, 100 + 2 * ((node - 1) % 3)),
    ),
    # The RDMA modules are not loaded: there is no /sys/class/infiniband.
    "no_rdma": lambda node: _with(cable_port0(node), A0, B0, A1, B1, rdma=""),
    # Addresses are configured, but the cable is out or its other end is off.
    "link_down": lambda node: _with(cable_port0(node), A0, B0, up=False, speed=-1),
    "wrong_mtu": lambda node: _with(cable_port0(node), B0, mtu=1500),
    "two_addresses": lambda node: _with(
        cable_port0(node),
        A0,
        addresses=tuple(f"192.168.{n}.{10 + node}/24" for n in (100, 110)),
    ),
    "ipv6_only": lambda node: _spark(
        node, **{A0: f"fd00:100::{10 + node}/64", B0: f"fd00:101::{10 + node}/64"}
    ),
    "missing_files": lambda node: replace(cable_port0(node), without=_MISSING),
    "same_subnet": lambda node: _with(
        cable_port0(node), B0, addresses=(f"192.168.100.{110 + node}/24",)
    ),
    # Only one half of the cabled cage has an IPv4 address.
    "one_twin": lambda node: _with(cable_port0(node), B0, addresses=()),
    "second_half_only": lambda node: _with(cable_port0(node), A0, addresses=()),
    # NetworkManager gave the second half a random address, beside a static one on the first.
    "random_twin": lambda node: _with(
        cable_port0(node), B0, addresses=(f"169.254.{83 + 40 * node}.14/16",)
    ),
    # The LAN port and the only cable lead to one switch, in one /24.
    "switch_in_the_lan": lambda node: _spark(
        node, **{A0: f"10.0.0.{110 + node}/24", B0: ()}
    ),
    # One of eight, with both cages at switches: nothing says which one joins the nodes.
    "two_switches": lambda node: _spark(
        node,
        **{A0: f"10.1.0.{10 + node}/24", B0: ()},
        **{A1: f"10.2.0.{10 + node}/24", B1: ()},
    ),
    # A kernel that keeps a reserve for the next one: CmaFree of a CmaTotal of nothing.
    "kernel7": lambda node: replace(
        cable_port0(node), kernel=_KERNEL7, cma=(0, 940_604)
    ),
    "kernel7_mended": lambda node: replace(
        cable_port0(node), kernel=_KERNEL7, cma=(0, 0), cmdline=f"{CMDLINE} kho=off"
    ),
}
NAMES = tuple(MACHINES)


def with_netdev(host: Host, name: str, /, **changes: object) -> Host:
    """Return the facts of a machine with other ones of a netdev."""
    netdevs = (replace(it, **changes) if it.name == name else it for it in host.netdevs)
    return replace(host, netdevs=tuple(netdevs))


def build(folder: Path, name: str, *, node: int = 0) -> Path:
    """Write a machine below ``folder/name-node`` and return that root."""
    root = folder / f"{name}-{node}"
    write(root, MACHINES[name](node))
    return root
