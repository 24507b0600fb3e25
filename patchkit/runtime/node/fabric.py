"""Choose the RDMA devices that carry the data of a cluster: those of one QSFP cage. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Network

from patchkit.errors import HostError
from patchkit.runtime.host.host import Host
from patchkit.runtime.host.networks import Port, in_reach, overlaps, usable_ports


def fabric(host: Host, nodes: int, head: str) -> tuple[Port, ...]:
    """Return the ports of the cage that joins this node to the others, best first.

    ``head`` is the head's address, or empty; one on the LAN says nothing about the cage. Returns
    nothing where no device is usable, or where each of two cages may be meant.
    """
    ports = usable_ports(host)
    spanning = _spanning_ports(host, ports, nodes)
    own = [port for port in ports if any(str(each.ip) == head for each in port.netdev.ipv4)]
    near = [port for port in spanning if head and in_reach(port.netdev, head)]
    cages = _separate_cages(own or near or spanning)
    if len(cages) > 1 and nodes > 2:
        # A cable between two Sparks has its full speed: a slower cage leads to a switch.
        speeds = dict.fromkeys(cages, 0)
        for port in spanning:
            cage = port.device.cage
            speeds[cage] = max(speeds[cage], port.netdev.speed or 0)
        cages = [cage for cage in cages if 0 < speeds[cage] < max(speeds.values())]
        if len(cages) != 1:
            return ()
    # What was left out of `spanning` is taken where it has the very address that was named.
    return tuple(port for port in spanning if port.device.cage in cages[:1]) or tuple(own)


def check_chosen(host: Host, nodes: int, chosen: Sequence[Port]) -> None:
    """Raise HostError, which asks for an address, where each of two cages may be meant."""
    if chosen:
        return
    first: dict[int | None, str] = {}
    for port in _spanning_ports(host, usable_ports(host), nodes):
        first.setdefault(port.device.cage, f"{port.netdev.ipv4[0].ip} on {port.netdev.name}")
    raise HostError(
        f"two cages are in use, and nothing says which one joins {nodes} nodes: "
        f"{' or '.join(first.values())}",
        why="a switch joins all nodes in one network; in a ring each cage leads to another node",
        hint="name the head's address in the network that all nodes share: --head-ip ADDRESS; "
        "if it is a ring: --topology ring",
    )


def _spanning_ports(host: Host, ports: Sequence[Port], nodes: int) -> list[Port]:
    """Return the ports whose network has room for the nodes, those with lasting addresses first.

    Where no network has room, all count; a network that is also another interface's does where
    there is no other.
    """
    roomy = []
    for port in ports:
        sizes = (own.network.num_addresses for own in port.netdev.ipv4)
        # Both addresses of a /31 are hosts (RFC 3021).
        if any((size if size <= 2 else size - 2) >= nodes for size in sizes):
            roomy.append(port)
    found = roomy or list(ports)
    shared = {each.netdev.name for each in overlaps(host, {port.netdev.name for port in found})}
    apart = [port for port in found if port.netdev.name not in shared] or found
    return sorted(apart, key=lambda port: (not port.netdev.lasting, port.device.pci))


def _separate_cages(ports: Sequence[Port]) -> list[int | None]:
    """Return the cages, best first, without those in a network that a better one is in."""
    found: dict[int | None, set[IPv4Network]] = {}
    for port in ports:
        # Link-local networks say nothing of where a cable leads.
        networks = {own.network for own in port.netdev.lasting}
        cage = port.device.cage
        others = set().union(*(own for other, own in found.items() if other != cage))
        if not networks & others:
            found.setdefault(cage, set()).update(networks)
    return list(found)
