"""Choose the RDMA devices that carry the data of a cluster: those of one QSFP cage. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ipaddress import IPv4Interface, IPv4Network
from typing import NamedTuple

from patchkit.errors import HostError
from patchkit.runtime.host.host import Host, Netdev, Rdma
from patchkit.runtime.host.networks import overlaps
from patchkit.runtime.node.address import reaches, usable_rdma


class _Port(NamedTuple):
    device: Rdma
    netdev: Netdev

    @property
    def cage(self) -> int | None:
        return self.device.cage


def fabric(host: Host, nodes: int, head: str) -> tuple[Rdma, ...]:
    """Return the devices of the cage that joins this node to the others, best first.

    ``head`` is the head's address, or empty; one on the LAN says nothing about the cage. Returns
    nothing where no device is usable, or where each of two cages may be meant.
    """
    ports = list(_usable_ports(host))
    spanning = _spanning_ports(host, ports, nodes)
    own = [each for each in ports if any(str(address.ip) == head for address in each.netdev.ipv4)]
    near = [each for each in spanning if head and reaches(each.netdev, head)]
    cages = _separate_cages(own or near or spanning)
    if len(cages) > 1 and nodes > 2:
        cages = _slower_cages(spanning, cages)
        if len(cages) > 1:
            return ()
    # What was left out of `spanning` is taken where it has the very address that was named.
    of_cage = [each for each in spanning if each.cage in cages[:1]] or own
    return tuple(each.device for each in of_cage)


def check_chosen(host: Host, nodes: int, chosen: Sequence[Rdma]) -> None:
    """Raise HostError, which asks for an address, where each of two cages may be meant."""
    if chosen:
        return
    first: dict[int | None, Netdev] = {}
    for port in _spanning_ports(host, list(_usable_ports(host)), nodes):
        first.setdefault(port.cage, port.netdev)
    shown = [f"{each.ipv4[0].ip} on {each.name}" for each in first.values()]
    raise HostError(
        f"two cages are in use, and nothing says which one joins {nodes} nodes: "
        f"{' or '.join(shown)}",
        why="a switch joins all nodes in one network; in a ring each cage leads to another node",
        hint="name the head's address in the network that all nodes share: --head-ip ADDRESS; "
        "if it is a ring: --topology ring",
    )


def _usable_ports(host: Host) -> Iterator[_Port]:
    for device in usable_rdma(host):
        if netdev := host.netdev(device.netdev):
            yield _Port(device, netdev)


def _spanning_ports(host: Host, ports: Sequence[_Port], nodes: int) -> list[_Port]:
    """Return the ports whose network has room for the nodes, those with lasting addresses first.

    Where no network has room, all count; a network that is also another interface's does where
    there is no other.
    """
    roomy = [each for each in ports if any(_host_count(own) >= nodes for own in each.netdev.ipv4)]
    found = roomy or list(ports)
    shared = {each.netdev.name for each in overlaps(host, {each.netdev.name for each in found})}
    apart = [each for each in found if each.netdev.name not in shared] or found
    return sorted(apart, key=lambda each: (not each.netdev.lasting, each.device.pci))


def _separate_cages(ports: Sequence[_Port]) -> list[int | None]:
    """Return the cages, best first, without those in a network that a better one is in."""
    found: dict[int | None, set[IPv4Network]] = {}
    for port in ports:
        # Link-local networks say nothing of where a cable leads.
        networks = {own.network for own in port.netdev.lasting}
        others = set().union(*(own for cage, own in found.items() if cage != port.cage))
        if not networks & others:
            found.setdefault(port.cage, set()).update(networks)
    return list(found)


def _slower_cages(ports: Sequence[_Port], cages: list[int | None]) -> list[int | None]:
    """Return the cages that are slower than another: a cable between two Sparks has its full speed.

    Returns all cages where none is slower.
    """
    speeds = dict.fromkeys(cages, 0)
    for port in ports:
        speeds[port.cage] = max(speeds[port.cage], port.netdev.speed or 0)
    return [each for each in cages if 0 < speeds[each] < max(speeds.values())] or cages


def _host_count(address: IPv4Interface) -> int:
    """Return how many hosts a network may have; both addresses of a /31 are hosts (RFC 3021)."""
    size = address.network.num_addresses
    return size if size <= 2 else size - 2
