"""The LAN and the QSFP cable of nodes with systemd: bridges in the switch's network namespace.

The laptop is on the LAN only. A node's interfaces are named as on a Spark: neighbours are cabled
at different ports, and one cable is two interfaces with subnets of their own.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from e2e.emulation.nodes import Node, NodeError

Net = Literal["lan", "qsfp"]
LAN = "lan0"
MTU = 9000
BRIDGES = ("lan", "qsfp0", "qsfp1")
LAPTOP = 100  # the last number of its address
LINK_SECONDS = 10


def halves(number: int) -> tuple[str, str]:
    """Return the two interfaces of a node's cable."""
    port = (number + 1) % 2
    return f"enp1s0f{port}np{port}", f"enP2p1s0f{port}np{port}"


def lan_ip(number: int) -> str:
    return f"10.77.0.{number}"


def qsfp_ip(number: int, half: int = 0) -> str:
    return f"192.168.{177 + half}.{number}"


def names(name: str, number: int) -> tuple[str, ...]:
    """Return all that a node may be called by: its name, its addresses."""
    return (name, lan_ip(number), qsfp_ip(number, 0), qsfp_ip(number, 1))


def hosts(numbers: Mapping[str, int]) -> str:
    """Return an /etc/hosts that knows the nodes at their LAN addresses."""
    lines = ("127.0.0.1 localhost", *(f"{lan_ip(n)} {name}" for name, n in numbers.items()))
    return "".join(f"{line}\n" for line in lines)


def network_files(number: int) -> dict[str, str]:
    """Return a node's network configuration, by path: addresses come back with it after a boot."""
    lan = f"[Network]\nAddress={lan_ip(number)}/24\nGateway={lan_ip(254)}\n"
    files = {LAN: lan}
    for half, name in enumerate(halves(number)):
        address = f"[Network]\nAddress={qsfp_ip(number, half)}/24\n"
        files[name] = f"[Link]\nMTUBytes={MTU}\n{address}"
    return {
        f"/etc/systemd/network/{name}.network": f"[Match]\nName={name}\n{text}"
        for name, text in files.items()
    }


@dataclass(frozen=True)
class Wiring:
    """Cables of nodes by name; ``out`` are those that are pulled, which they stay over a boot."""

    switch: Node
    out: set[tuple[Net, str]] = field(default_factory=set)

    def bridges(self) -> None:
        for name in BRIDGES:
            self._ip(f"link add {name} type bridge", f"link set {name} up")

    def laptop(self, laptop: Node) -> None:
        """Plug the laptop into the LAN."""
        self._ip(f"link add laptop type veth peer {LAN} netns {laptop.pid}")
        self._ip("link set laptop master lan up")
        own = f"{lan_ip(LAPTOP)}/24"
        for command in ("link set lo up", f"address add {own} dev {LAN}", f"link set {LAN} up"):
            _ip(laptop, command)

    def ends(self, name: str, number: int) -> dict[str, str]:
        """Return the interfaces of a node, by the name of their other end here."""
        here = [f"{name}-{bridge}" for bridge in BRIDGES]
        return dict(zip(here, (LAN, *halves(number)), strict=True))

    def attach(self, name: str) -> None:
        """Plug a node in that has just been started; what was pulled stays pulled."""
        deadline = time.monotonic() + LINK_SECONDS
        for bridge in BRIDGES:
            end, state = f"{name}-{bridge}", "up" if self._plugged(name, bridge) else "down"
            while _failed(self.switch, f"link set {end} mtu {MTU} master {bridge} {state}"):
                if time.monotonic() > deadline:
                    raise NodeError(f"{name}: {end} does not come")
                time.sleep(0.05)

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
        self._ip(*(f"link set {name}-{bridge} down" for bridge in BRIDGES))

    def _plugged(self, name: str, bridge: str) -> bool:
        return not any(name == cut and bridge.startswith(net) for net, cut in self.out)

    def _set(self, name: str) -> None:
        for bridge in BRIDGES:
            self._ip(f"link set {name}-{bridge} {'up' if self._plugged(name, bridge) else 'down'}")

    def _ip(self, *commands: str) -> None:
        for command in commands:
            _ip(self.switch, command)


def _ip(node: Node, command: str) -> None:
    if trouble := _failed(node, command):
        raise NodeError(f"{node.name}: ip {command}: {trouble}")


def _failed(node: Node, command: str) -> str:
    words = ("nsenter", f"--target={node.pid}", "--net", "ip", *command.split())
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    return done.stderr.strip() or "failed" if done.returncode else ""
