r"""Count networks and addresses: by the number of a node, or beside an address that is known.

Two nodes on one cable, or any number on a switch: both twins of the one cabled cage have an
address, in different networks; node n has the host number 9 + n, as in NVIDIA's playbook.

              192.168.100.0/24  twin A
    node 1 ══════════════════════════════ node 2
       .10    192.168.101.0/24  twin B    .11

Three nodes in a ring: every link has two networks of its own, so each node has four addresses.

                     node 1
              port 0 /    \ port 1
       .100/.101    /      \    .104/.105
           port 1  /        \  port 0
             node 2 ──────── node 3
               port 0      port 1
                   .102/.103

Link k leads from node k to the next one (from the last to node 1), and has networks 2(k - 1) and
2(k - 1) + 1, counted from the base. So the twelve addresses are

    node  port 0 to           twin A           twin B   port 1 to           twin A           twin B
       1          2   192.168.100.10   192.168.101.10           3   192.168.104.10   192.168.105.10
       2          3   192.168.102.11   192.168.103.11           1   192.168.100.11   192.168.101.11
       3          1   192.168.104.12   192.168.105.12           2   192.168.102.12   192.168.103.12

Addresses belong to links, not to ports: where the cables run the other way round, ``port0_to`` says
so, and the same addresses go to the other cage.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Interface, IPv4Network

from patchkit.errors import UsageError
from patchkit.runtime.host.network_facts import facts

_PRIVATE = tuple(map(IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")))  # RFC 1918


def check_numbers(node: int | None, nodes: int, network: IPv4Network) -> None:
    """Raise UsageError for numbers that contradict each other, or do not fit the network."""
    if nodes < 2:
        raise UsageError(f"--nodes {nodes}: one node needs no network", hint="2 or more")
    if node is not None and not 1 <= node <= nodes:
        raise UsageError(
            f"--node {node}: nodes are numbered from 1 to {nodes}", hint="the head is node 1"
        )
    # The last number of a network is its broadcast address.
    last = facts()["plan"]["first_host"] + nodes
    if last >= network.num_addresses - 1:
        raise UsageError(
            f"--network {network} is too small for {nodes} nodes",
            why=f"node {nodes} has the host number {last}",
            hint="give a /24",
        )


def counted(base: IPv4Network, number: int, node: int) -> IPv4Interface:
    """Return a node's address in the network that is ``number`` after the base."""
    host = facts()["plan"]["first_host"] + node
    try:
        address = base.network_address + number * base.num_addresses + host
        return IPv4Interface(f"{address}/{base.prefixlen}")
    except ValueError:  # above 255.255.255.255
        raise UsageError(
            f"--network {base.network_address}: no room for {number} networks after it"
        ) from None


def neighbours(node: int, nodes: int, port0_to: int | None) -> dict[int, int]:
    """Return where the cages of a ring's node lead: 0 to the next node, 1 to the one before.

    Raises UsageError if ``port0_to``, which turns that round, is no neighbour.
    """
    before, after = (node - 2) % nodes + 1, node % nodes + 1
    first = after if port0_to is None else port0_to
    if first not in (before, after):
        raise UsageError(
            f"--port0-to {first}: node {node} of a ring of {nodes} is between {before} and {after}",
            hint=f"--port0-to {before} or --port0-to {after}",
        )
    return {0: first, 1: after if first == before else before}


def link(node: int, nodes: int, peer: int) -> int:
    """Return the number of a ring's link: that of the node which it leads away from."""
    return node if peer == node % nodes + 1 else peer


def beside(peer: IPv4Interface, node: int, own: int | None = None) -> IPv4Interface:
    """Return an address for a node in the network of a peer's.

    ``own`` is the host number that this node has in another network, and is taken again where it
    is free. Else the peer is taken for the head, or, on the head, for node 2: node n of a head
    that has 10 gets 10 + n - 1. A pair link of two addresses (/31) has one left.
    """
    network, theirs = peer.network, int(peer.ip) - int(peer.network.network_address)
    counts = theirs + (node - 1 if node > 1 else -1)
    tried = (own, counts, *range(1, network.num_addresses))
    if network.prefixlen == 31:  # RFC 3021: both are hosts
        return IPv4Interface(f"{network[1 - theirs]}/31")
    for number in tried:
        if number is not None and number != theirs and 0 < number < network.num_addresses - 1:
            return IPv4Interface(f"{network[number]}/{network.prefixlen}")
    raise UsageError(f"--peer {peer}: its network has no room for a second address")


def next_to(own: IPv4Interface, taken: Iterable[IPv4Network]) -> IPv4Interface | None:
    """Return the address with the same host number in the nearest network that is not taken.

    Both ends of a cable see the same networks there, apart from their LANs, so they agree. Beside
    10.0.0.0/8, or public networks that a laboratory uses, all are other people's: then the address
    is in one of the recipe's, with the same last number. None if these are taken as well.
    """
    used, network = tuple(taken), own.network
    block = next((each for each in _PRIVATE if network.subnet_of(each)), network)
    for step in range(1, facts()["plan"]["search"] + 1):
        for number in (step, -step):
            try:
                start = network.network_address + number * network.num_addresses
                found = IPv4Network(f"{start}/{network.prefixlen}")
            except ValueError:  # below 0.0.0.0 or above 255.255.255.255
                continue
            if found.subnet_of(block) and not any(map(found.overlaps, used)):
                host = int(own.ip) - int(network.network_address)
                return IPv4Interface(f"{found[host]}/{network.prefixlen}")
    base, last = free_base(used, 1), own.ip.packed[-1]
    return IPv4Interface(f"{base[last]}/{base.prefixlen}") if base and 0 < last < 255 else None


def free_base(taken: Iterable[IPv4Network], count: int) -> IPv4Network | None:
    """Return the first of the recipe's bases with ``count`` free networks, None if all clash."""
    used = tuple(taken)
    for base in map(IPv4Network, facts()["plan"]["networks"]):
        size = base.num_addresses
        wanted = [
            IPv4Network((int(base.network_address) + number * size, base.prefixlen))
            for number in range(count)
        ]
        if not any(each.overlaps(one) for each in wanted for one in used):
            return base
    return None


def with_prefix(address: IPv4Interface, network: IPv4Network) -> IPv4Interface:
    """Return an address that was given without a prefix with that of the planned networks."""
    if address.network.prefixlen < address.max_prefixlen:
        return address
    return IPv4Interface(f"{address.ip}/{network.prefixlen}")
