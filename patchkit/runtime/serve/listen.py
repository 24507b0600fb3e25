"""Choose the address that the API server listens on: this machine, the cable or the LAN.

`--host` of vLLM is the API server's alone: nodes find each other by ``--master-addr`` and
``VLLM_HOST_IP``, so that any choice serves a model over several nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address

from patchkit.errors import HostError, UsageError
from patchkit.quoting import quoted
from patchkit.runtime.host.host import Host
from patchkit.runtime.node.address import choose_address
from patchkit.runtime.node.decision import Node
from patchkit.runtime.node.fabric import find_fabric
from patchkit.runtime.serve.request import LOCAL, ServeRequest

CHOICES = ("local", "cable", "lan")
_ANY = ("0.0.0.0", "::")  # noqa: S104 (recognized, never chosen)


def listen_address(choice: str, node: Node, host: Host) -> str:
    """Return the address of one of CHOICES. Raises HostError for none, UsageError for several."""
    if choice == "local" or node.role == "worker":  # a worker answers no requests
        return LOCAL
    if choice == "cable":
        # The control may go over the LAN, and the data over the cable.
        if node.head and node.attachment.data == node.attachment.netdev:
            return node.head
        try:
            fabric = find_fabric(host, node.nodes, node.head)
            return choose_address(host, "roce", "head", "", fabric)[1]
        except HostError as error:
            raise HostError(
                f"--listen cable: {error.what}",
                hint="take --listen lan, or name one: --host ADDRESS",
            ) from None
    fast = {rdma.netdev for rdma in host.rdma}
    found = {
        str(own.ip): netdev.name
        for netdev in host.netdevs
        if netdev.kind in ("ethernet", "wifi") and netdev.up
        if netdev.cage is None and netdev.name not in fast
        for own in netdev.lasting
    }
    if len(found) == 1:
        return next(iter(found))
    what = ", ".join(f"{address} on {name}" for address, name in found.items())
    raise (UsageError if found else HostError)(
        f"--listen lan: {what or 'no interface beside the QSFP cages has an IPv4 address'}",
        hint="name the address: --host ADDRESS"
        if found
        else "take --listen local or cable",
    )


def listening(request: ServeRequest) -> Iterator[str]:
    """Yield who reaches the server; nothing for a worker."""
    node, host = request.node, request.host
    if node.role == "worker":
        return
    try:
        local = ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if local:
        yield f"it listens on {host}, for this machine alone; --listen cable or lan opens it"
        return
    if host in _ANY:
        yield "it listens on every interface"
    else:
        local_url = f"localhost:{request.port}"
        yield f"it listens on {host} alone: `{quoted('curl', local_url)}` is refused"
    if host != node.head:
        yield (
            f"everybody who reaches {host} can use the model: vLLM asks nobody for a key "
            "unless VLLM_API_KEY or --api-key is set"
        )


def models_url(request: ServeRequest) -> str:
    """Return where to ask for the models that are served; "" for a worker."""
    host = dict(zip(_ANY, ("127.0.0.1", "::1"), strict=True)).get(
        request.host, request.host
    )
    shown = f"[{host}]" if ":" in host else host
    return (
        ""
        if request.node.role == "worker"
        else f"http://{shown}:{request.port}/v1/models"
    )
