"""What connects the nodes: a LAN, and QSFP cables whose two halves are subnets of their own.

Each node is cabled at its own port, so that neighbours' interfaces have different names: port 0 is
enp1s0f0np0 with its twin enP2p1s0f0np0, port 1 is enp1s0f1np1 with enP2p1s0f1np1.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence

from e2e.emulation.nodes import Node, NodeError

LAN = "lan0"
MTU = 9000
LINK_SECONDS = 5


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
    lines += [f"{lan_ip(number)} {name}" for number, name in enumerate(names, 1) if name != own]
    return "\n".join([*lines, ""])


def connect(nodes: Sequence[Node], switch: Node) -> None:
    """Connect all to a LAN and, if there are others, to a QSFP switch with both halves."""
    _bridge(switch, "lan", dict.fromkeys(nodes, LAN))
    cabled = len(nodes) > 1
    for half in range(2 if cabled else 0):
        _bridge(switch, f"qsfp{half}", {node: halves(node.number)[half] for node in nodes})
    for node in nodes:
        own = f"address add {lan_ip(node.number)}/24 dev {LAN}"
        ip(node, "link set lo up", own, f"link set {LAN} up")
        # Nobody answers there. Programs that ask for the way out find the LAN's, as on a Spark.
        ip(node, f"route add default via {lan_ip(254)} dev {LAN}")
        for half, name in enumerate(halves(node.number) if cabled else ()):
            address = f"address add {qsfp_ip(node.number, half)}/24 dev {name}"
            ip(node, f"link set {name} mtu {MTU}", address, f"link set {name} up")
    deadline = time.monotonic() + LINK_SECONDS  # the kernel tells of a link up to a second later
    for node in nodes:
        while "DOWN" in ip(node, "-brief link show"):
            if time.monotonic() > deadline:
                raise NodeError(f"{node.name}: a link stays down:\n{ip(node, 'link show')}")
            time.sleep(0.1)


def bytes_moved(node: Node) -> tuple[int, int]:
    """Return the bytes that crossed its LAN interface, and both halves of its QSFP cable."""
    moved = node.traffic()
    return moved[LAN], sum(moved.get(name, 0) for name in halves(node.number))


def _bridge(switch: Node, bridge: str, interfaces: dict[Node, str]) -> None:
    ip(switch, f"link add {bridge} type bridge", f"link set {bridge} up")
    for node, name in interfaces.items():
        end = f"{bridge}-{node.number}"
        ip(node, f"link add {name} type veth peer {end} netns {switch.pid}")
        ip(switch, f"link set {end} mtu {MTU} master {bridge} up")


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
