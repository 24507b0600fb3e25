"""The LAN and the QSFP cable of nodes with systemd: bridges in the switch's network namespace.

The laptop is on the LAN only. A node's interfaces are named as on a Spark: neighbours are cabled
at different ports, and one cable is two interfaces with subnets of their own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from e2e.emulation.nodes import Node, NodeError
from e2e.emulation.wires import LAN, MTU, halves, ip, lan_ip, qsfp_ip

Net = Literal["lan", "qsfp"]
BRIDGES = ("lan", "qsfp0", "qsfp1")
LAPTOP = 100  # the last number of its address
LINK_SECONDS = 10


def names(name: str, number: int) -> tuple[str, ...]:
    """Return all that a node may be called by: its name, its addresses."""
    return (name, lan_ip(number), qsfp_ip(number, 0), qsfp_ip(number, 1))


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
        ip(laptop, "link set lo up", f"address add {own} dev {LAN}", f"link set {LAN} up")

    def ends(self, name: str, number: int) -> dict[str, str]:
        """Return the interfaces of a node, by the name of their other end here."""
        here = [f"{name}-{bridge}" for bridge in BRIDGES]
        return dict(zip(here, (LAN, *halves(number)), strict=True))

    def attach(self, name: str) -> None:
        """Plug a node in that has just been started; what was pulled stays pulled."""
        deadline = time.monotonic() + LINK_SECONDS
        for bridge in BRIDGES:
            end, state = f"{name}-{bridge}", "up" if self._plugged(name, bridge) else "down"
            while True:
                try:
                    self._ip(f"link set {end} mtu {MTU} master {bridge} {state}")
                    break
                except NodeError:
                    if time.monotonic() > deadline:
                        raise
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
        ip(self.switch, *commands)
