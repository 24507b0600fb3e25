"""What connects the nodes: a LAN, and QSFP cables whose two halves are subnets of their own.

Each node is cabled at its own port, so that neighbours' interfaces have different names: port 0 is
enp1s0f0np0 with its twin enP2p1s0f0np0, port 1 is enp1s0f1np1 with enP2p1s0f1np1. Bridges in the
network of a node that is called the switch join them.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from e2e.emulation.nodes import Node, NodeError

Net = Literal["lan", "qsfp"]
BRIDGES = ("lan", "qsfp0", "qsfp1")
LAN = "lan0"
MTU = 9000
LINK_SECONDS = 10


def halves(number: int) -> tuple[str, str]:
    """Return the two interfaces of a node's cable: one cage, two PCIe roots."""
    port = (number + 1) % 2
    return f"enp1s0f{port}np{port}", f"enP2p1s0f{port}np{port}"


def lan_ip(number: int) -> str:
    return f"10.77.0.{number}"


def qsfp_ip(number: int, half: int = 0) -> str:
    return f"192.168.{177 + half}.{number}"


def hosts(names: Sequence[str], own: str = "") -> str:
    """Return an /etc/hosts that knows them at their LAN addresses, as a name service would.

    ``own`` is what Debian and Ubuntu write on that node: its name at 127.0.1.1.
    """
    lines = ["127.0.0.1 localhost", *([f"127.0.1.1 {own}"] if own else [])]
    lines += [
        f"{lan_ip(number)} {name}"
        for number, name in enumerate(names, 1)
        if name != own
    ]
    return "\n".join([*lines, ""])


def connect(nodes: Sequence[Node], switch: Node) -> None:
    """Connect all to a LAN and, if there are others, to a QSFP switch with both halves."""
    make_bridges(switch)
    for node in nodes:
        plug(node, LAN, switch, "lan")
        own = f"address add {lan_ip(node.number)}/24 dev {LAN}"
        ip(node, "link set lo up", own, f"link set {LAN} up")
        # Nobody answers there. Programs that ask for the way out find the LAN's, as on a Spark.
        ip(node, f"route add default via {lan_ip(254)} dev {LAN}")
        for half, name in enumerate(halves(node.number) if len(nodes) > 1 else ()):
            plug(node, name, switch, f"qsfp{half}")
            address = f"address add {qsfp_ip(node.number, half)}/24 dev {name}"
            ip(node, f"link set {name} mtu {MTU}", address, f"link set {name} up")
    deadline = (
        time.monotonic() + LINK_SECONDS
    )  # the kernel tells of a link up to a second later
    for node in nodes:
        while "DOWN" in ip(node, "-brief link show"):
            if time.monotonic() > deadline:
                raise NodeError(
                    f"{node.name}: a link stays down:\n{ip(node, 'link show')}"
                )
            time.sleep(0.1)


def make_bridges(switch: Node) -> None:
    for name in BRIDGES:
        ip(switch, f"link add {name} type bridge", f"link set {name} up")


def plug(node: Node, name: str, switch: Node, bridge: str) -> None:
    """Give a node an interface of this name, whose other end is in a bridge."""
    end = f"{node.name}-{bridge}"
    ip(node, f"link add {name} type veth peer {end} netns {switch.pid}")
    ip(switch, f"link set {end} mtu {MTU} master {bridge} up")


def bytes_moved(node: Node) -> tuple[int, int]:
    """Return the bytes that crossed its LAN interface, and both halves of its QSFP cable."""
    moved = {}
    for line in Path(f"/proc/{node.pid}/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        moved[name.strip()] = int(numbers.split()[0]) + int(numbers.split()[8])
    return moved[LAN], sum(moved.get(name, 0) for name in halves(node.number))


def network_files(number: int) -> dict[str, str]:
    """Return a node's network configuration, by path: addresses come back with it after a boot."""
    files = {LAN: f"[Network]\nAddress={lan_ip(number)}/24\nGateway={lan_ip(254)}\n"}
    for half, name in enumerate(halves(number)):
        address = f"[Network]\nAddress={qsfp_ip(number, half)}/24\n"
        files[name] = f"[Link]\nMTUBytes={MTU}\n{address}"
    return {
        f"/etc/systemd/network/{name}.network": f"[Match]\nName={name}\n{text}"
        for name, text in files.items()
    }


@dataclass(frozen=True)
class Wiring:
    """Cables of nodes that boot; ``out`` are those that are pulled, which they stay over a boot."""

    switch: Node
    out: set[tuple[Net, str]] = field(default_factory=set)

    def attach(self, name: str) -> None:
        """Plug a node in that has just been started; what was pulled stays pulled."""
        deadline = time.monotonic() + LINK_SECONDS
        for bridge in BRIDGES:
            while True:
                try:
                    ip(
                        self.switch,
                        f"link set {name}-{bridge} mtu {MTU} master {bridge}",
                    )
                    break
                except NodeError:
                    if time.monotonic() > deadline:
                        raise
                time.sleep(0.05)
        self._set(name)

    def cut(self, net: Net, name: str) -> None:
        """Pull a node's cable: both ends lose the carrier."""
        self.out.add((net, name))
        self._set(name)

    def join(self, net: Net, name: str) -> None:
        """Put a node's cable back."""
        self.out.discard((net, name))
        self._set(name)

    def silence(self, name: str) -> None:
        """Let a node's interfaces say nothing more, not even that its connections ended."""
        ip(self.switch, *(f"link set {name}-{bridge} down" for bridge in BRIDGES))

    def _set(self, name: str) -> None:
        for bridge in BRIDGES:
            pulled = (bridge.rstrip("01"), name) in self.out
            ip(self.switch, f"link set {name}-{bridge} {'down' if pulled else 'up'}")


def ip(node: Node, *commands: str) -> str:
    """Run `ip` in a node's network, all else being this machine's; return what it says."""
    said = ""
    for command in commands:
        words = ("nsenter", f"--target={node.pid}", "--net", "ip", *command.split())
        done = subprocess.run(words, capture_output=True, text=True, timeout=20)
        if done.returncode:
            raise NodeError(f"{node.name}: ip {command}: {done.stderr.strip()}")
        said += done.stdout
    return said
