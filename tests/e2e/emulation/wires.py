"""What connects the nodes: a LAN, and QSFP cables whose two halves are subnets of their own.

Each node is cabled at its own port, so that neighbours' interfaces have different names: port 0 is
enp1s0f0np0 with its twin enP2p1s0f0np0, port 1 is enp1s0f1np1 with enP2p1s0f1np1.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence

from e2e.emulation.nodes import Node, NodeError

LAN = "lan0"
MTU = 9000
LINK_SECONDS = 5


def halves(node: Node) -> tuple[str, str]:
    """The two interfaces of its cable: one cage, two PCIe roots."""
    port = (node.number + 1) % 2
    return f"enp1s0f{port}np{port}", f"enP2p1s0f{port}np{port}"


def lan_ip(node: Node) -> str:
    return f"10.0.0.1{node.number}"


def qsfp_ip(node: Node, half: int = 0) -> str:
    return f"192.168.{100 + half}.1{node.number}"


def hosts(names: Sequence[str], own: str = "") -> str:
    """An /etc/hosts that knows them at their LAN addresses, as a LAN's name service would.

    ``own`` is what Debian and Ubuntu write on that node: its name at 127.0.1.1.
    """
    lines = ["127.0.0.1 localhost", *([f"127.0.1.1 {own}"] if own else [])]
    lines += [f"10.0.0.1{number} {name}" for number, name in enumerate(names, 1) if name != own]
    return "\n".join([*lines, ""])


def connect(nodes: Sequence[Node], switch: Node) -> None:
    """A LAN for all; a cable from node to node for two, from each node to the switch for more."""
    _bridge(nodes, switch, lambda node: LAN, "lan")
    if len(nodes) == 2:
        for ends in zip(*map(halves, nodes), strict=True):
            _cable(nodes[0], ends[0], nodes[1], ends[1])
    elif len(nodes) > 2:
        for half in range(2):
            _bridge(nodes, switch, lambda node, half=half: halves(node)[half], f"qsfp{half}-")
    for node in nodes:
        _address(node, cabled=len(nodes) > 1)
    for node in nodes:
        _wait_for_links(node)


def _address(node: Node, *, cabled: bool) -> None:
    _ip(node, "link set lo up", f"address add {lan_ip(node)}/24 dev {LAN}", f"link set {LAN} up")
    # Nobody answers there. Programs that ask for the way out find the LAN's address, as on a Spark.
    _ip(node, f"route add default via 10.0.0.1 dev {LAN}")
    for half, name in enumerate(halves(node) if cabled else ()):
        address = f"address add {qsfp_ip(node, half)}/24 dev {name}"
        _ip(node, f"link set {name} mtu {MTU}", address, f"link set {name} up")


def _wait_for_links(node: Node) -> None:
    """The kernel tells a link's state with a delay of up to a second."""
    deadline = time.monotonic() + LINK_SECONDS
    while "DOWN" in _ip(node, "-brief link show"):
        if time.monotonic() > deadline:
            raise NodeError(f"{node.name}: a link stays down:\n{_ip(node, 'link show')}")
        time.sleep(0.1)


def bytes_moved(node: Node) -> tuple[int, int]:
    """Bytes that crossed its LAN interface, and both halves of its QSFP cable."""
    moved = node.traffic()
    return moved[LAN], sum(moved.get(name, 0) for name in halves(node))


def _cable(one: Node, name: str, other: Node, peer: str) -> None:
    _ip(one, f"link add {name} type veth peer {peer} netns {other.pid}")


def _bridge(
    nodes: Sequence[Node], switch: Node, interface: Callable[[Node], str], prefix: str
) -> None:
    bridge = f"{prefix}bridge"
    _ip(switch, f"link add {bridge} type bridge", f"link set {bridge} up")
    for node in nodes:
        name = f"{prefix}{node.number}"
        _cable(node, interface(node), switch, name)
        _ip(switch, f"link set {name} mtu {MTU} master {bridge} up")


def _ip(node: Node, *commands: str) -> str:
    """Only the network is the node's here, so that it works before anything else is there."""
    enter = ("nsenter", f"--target={node.pid}", "--net", "ip")
    done = [
        subprocess.run([*enter, *each.split()], capture_output=True, text=True, timeout=20)
        for each in commands
    ]
    if failed := [each for each in done if each.returncode]:
        raise NodeError(f"{node.name}: {' '.join(failed[0].args[2:])}: {failed[0].stderr.strip()}")
    return "".join(each.stdout for each in done)
