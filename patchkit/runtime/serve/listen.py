"""Choose the address that the API server listens on: this machine, the cable or the LAN.

vLLM's `--host` is for the API server only. Nodes find each other by ``--master-addr`` and
``VLLM_HOST_IP``, so every choice works for a model on several nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address

from patchkit.errors import HostError, UsageError
from patchkit.quoting import quoted
from patchkit.runtime.host.host import Host
from patchkit.runtime.node.decision import Node
from patchkit.runtime.node.fabric import find_fabric
from patchkit.runtime.node.topology import choose_address
from patchkit.runtime.serve.request import LOCAL, ServeRequest

CHOICES = ("local", "cable", "lan")
_LAN_KINDS = ("ethernet", "wifi")

# Addresses that stand for all interfaces → the address for a client on this machine. patchkit never
# chooses such an address, but a user may.
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104


def listen_address(choice: str, node: Node, host: Host) -> str:
    """Return the address for one of CHOICES; a worker always gets the local one.

    Raises HostError if there is no such address, UsageError if there are several.
    """
    if choice == "local" or node.role == "worker":  # a worker answers no requests
        return LOCAL
    if choice == "cable":
        return _cable_address(node, host)

    return _lan_address(host)


def _cable_address(node: Node, host: Host) -> str:
    # The address of the head may be one on the LAN, although the data goes over the cable.
    is_head_on_cable = node.attachment.data == node.attachment.netdev
    if node.head and is_head_on_cable:
        return node.head

    try:
        fabric = find_fabric(host, node.nodes, node.head)
        return choose_address(host, "roce", "head", "", fabric)[1]
    except HostError as error:
        raise HostError(
            f"--listen cable: {error.what}",
            hint="take --listen lan, or name one: --host ADDRESS",
        ) from None


def _lan_address(host: Host) -> str:
    """Return the only permanent IPv4 address of Ethernet and Wi-Fi interfaces outside QSFP cages.

    Raises HostError if there is none, UsageError if there are several.
    """
    netdev_by_address = {}
    rdma_netdevs = {rdma.netdev for rdma in host.rdma}

    for netdev in host.netdevs:
        is_in_cage = netdev.cage is not None or netdev.name in rdma_netdevs
        is_lan = netdev.kind in _LAN_KINDS and netdev.up
        if is_lan and not is_in_cage:
            for address in netdev.lasting:
                netdev_by_address[str(address.ip)] = netdev.name

    if not netdev_by_address:
        raise HostError(
            "--listen lan: no interface beside the QSFP cages has an IPv4 address",
            hint="take --listen local or cable",
        )

    chosen, *others = netdev_by_address
    if others:
        places = [f"{ip} on {name}" for ip, name in netdev_by_address.items()]
        raise UsageError(
            f"--listen lan: {', '.join(places)}",
            hint="name the address: --host ADDRESS",
        )

    return chosen


def listen_notes(request: ServeRequest) -> Iterator[str]:
    """Yield notes on who can reach the server; none for a worker."""
    node = request.node
    host = request.host
    if node.role == "worker":
        return
    if _is_loopback(host):
        yield f"it listens on {host}, for this machine alone; --listen cable or lan opens it"
        return

    if host in _ANY:
        yield "it listens on every interface"
    else:
        command = quoted("curl", f"localhost:{request.port}")
        yield f"it listens on {host} alone: `{command}` is refused"
    if host != node.head:
        yield (
            f"everybody who reaches {host} can use the model: vLLM asks nobody for a key "
            "unless VLLM_API_KEY or --api-key is set"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def models_url(request: ServeRequest) -> str:
    """Return the URL that lists the served models, "" for a worker."""
    if request.node.role == "worker":
        return ""

    host = _ANY.get(request.host, request.host)
    shown = f"[{host}]" if ":" in host else host

    return f"http://{shown}:{request.port}/v1/models"
