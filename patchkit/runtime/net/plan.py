r"""Plan which QSFP interface of a node gets which address. Pure.

Two nodes on one cable, or any number on a switch: both twins of the one cabled cage have an
address, in different networks; node n has the host number 10 + n.

              192.168.100.0/24  twin A
    node 1 ══════════════════════════════ node 2
       .11    192.168.101.0/24  twin B    .12

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
       1          2   192.168.100.11   192.168.101.11           3   192.168.104.11   192.168.105.11
       2          3   192.168.102.12   192.168.103.12           1   192.168.100.12   192.168.101.12
       3          1   192.168.104.13   192.168.105.13           2   192.168.102.13   192.168.103.13

Addresses belong to links, not to ports: where the cables run the other way round, ``port0_to`` says
so, and the same addresses go to the other cage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from ipaddress import IPv4Interface, IPv4Network
from typing import Any

from patchkit.errors import HostError, UsageError
from patchkit.paths import RECIPES
from patchkit.quoting import quoted
from patchkit.records import read_toml
from patchkit.runtime.host.host import Host, Netdev

Cages = Mapping[int | None, tuple[Netdev, ...]]
TOPOLOGIES = ("auto", "cable", "ring", "switch")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetPlanOptions:
    """The options of a plan. ``node`` counts from 1.

    ``netdevs`` replaces the detection of cages; ``mtu_max`` is what each netdev can do.
    """

    node: int
    nodes: int = 2
    mtu: int
    network: IPv4Network
    topology: str = "auto"
    cage: int | None = None
    port0_to: int | None = None
    netdevs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One address. ``cage`` is None where the user named netdevs; ``peer`` None on a switch."""

    netdev: str
    address: IPv4Interface
    cage: int | None = None
    twin: int
    peer: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetPlan:
    """The addresses of one node."""

    node: int
    nodes: int
    topology: str
    mtu: int
    lines: tuple[Line, ...]


@cache
def facts() -> Mapping[str, Mapping[str, Any]]:
    """Return ``recipes/env/network.toml``: tables ``plan`` and ``link``."""
    return read_toml(dict[str, dict[str, Any]], RECIPES / "env" / "network.toml")


def make_plan(
    host: Host, options: NetPlanOptions, mtu_max: Mapping[str, int] | None = None
) -> NetPlan:
    """Return which netdev gets which address.

    Raises UsageError for options that contradict each other, HostError if no cage is cabled.
    """
    _check_numbers(options)
    chosen = named(host, options.netdevs) if options.netdevs else _choose(host, options)
    topology = options.topology
    if topology == "auto":
        topology = "cable" if options.nodes == 2 else "ring" if len(chosen) > 1 else "switch"
    lines = _ring(chosen, options) if topology == "ring" else _flat(chosen, options, topology)
    _check_mtu(options.mtu, [line.netdev for line in lines], mtu_max or {})
    return NetPlan(
        node=options.node, nodes=options.nodes, topology=topology, mtu=options.mtu, lines=lines
    )


def cages(host: Host) -> Cages:
    """Return the netdevs of each QSFP cage, twin A (the lower PCI domain) first."""
    found: dict[int | None, tuple[Netdev, ...]] = {}
    halves = (each for each in host.netdevs if each.cage is not None)
    for netdev in sorted(halves, key=lambda each: (each.cage, each.pci, each.name)):
        found[netdev.cage] = (*found.get(netdev.cage, ()), netdev)
    return found


def cabled(host: Host) -> Cages:
    """Return the cages with a link on at least one of their twins."""
    return {cage: twins for cage, twins in cages(host).items() if cage in host.cabled}


def named(host: Host, names: Sequence[str]) -> Cages:
    """Return netdevs that the user named, as one cage. Raises UsageError for a missing one."""
    for name in names:
        if host.netdev(name) is None:
            there = ", ".join(each.name for each in host.netdevs) or "none"
            raise UsageError(f"no network interface is called {name!r}", hint=f"there are: {there}")
    once = dict.fromkeys(names)
    return {None: tuple(netdev for name in once if (netdev := host.netdev(name)))}


def _check_numbers(options: NetPlanOptions) -> None:
    if options.nodes < 2:
        raise UsageError(f"--nodes {options.nodes}: one node needs no network", hint="2 or more")
    if not 1 <= options.node <= options.nodes:
        raise UsageError(
            f"--node {options.node}: nodes are numbered from 1 to {options.nodes}",
            hint="the head is node 1",
        )
    # The last number of a network is its broadcast address.
    last = facts()["plan"]["first_host"] + options.nodes
    if last >= options.network.num_addresses - 1:
        raise UsageError(
            f"--network {options.network} is too small for {options.nodes} nodes",
            why=f"node {options.nodes} has the host number {last}",
            hint="give a /24",
        )


def _check_mtu(mtu: int, names: Sequence[str], mtu_max: Mapping[str, int]) -> None:
    least, most = facts()["plan"]["mtu_min"], facts()["plan"]["mtu_max"]
    for name in names:
        limit = mtu_max.get(name, most)
        if not least <= mtu <= limit:
            raise UsageError(
                f"--mtu {mtu}: {name} takes {least} to {limit}",
                hint="9000 on every node and on the switch, or 1500",
            )


def _choose(host: Host, options: NetPlanOptions) -> Cages:
    """Return the cages to plan. Raises HostError for none, UsageError for too many."""
    known, linked = cages(host), cabled(host)
    if not known:
        raise HostError(
            "this machine has no QSFP cage that patchkit could recognise",
            why="the ConnectX-7 or its driver is missing, or this is not a DGX Spark",
            hint="`patchkit probe` shows what there is; or name interfaces with --netdev",
        )
    if options.cage is not None:
        if options.cage not in known:
            raise UsageError(f"there is no cage {options.cage}", hint=_listing(known))
        return {options.cage: known[options.cage]}
    if not linked:
        first = next(iter(known.values()))[0].name
        raise HostError(
            f"no QSFP cage is cabled: {_listing(known)}",
            why="no cable, the other end is off, or the interfaces are down administratively, "
            "which hides the link",
            hint=f"{quoted('sudo', 'ip', 'link', 'set', first, 'up')}; or name it: --cage 0",
        )
    if len(linked) > 1 and (options.topology in ("cable", "switch") or options.nodes == 2):
        raise UsageError(
            f"two cages are cabled: {_listing(linked)}",
            why="one cable carries all that the ConnectX-7 can; a second one brings nothing",
            hint="choose one: " + " or ".join(f"--cage {cage}" for cage in linked),
        )
    if options.topology == "ring":
        return known  # an end that is not plugged in yet has an address all the same
    return linked


def _listing(known: Cages) -> str:
    return "; ".join(
        f"cage {cage}: {', '.join(twin.name for twin in twins)}" for cage, twins in known.items()
    )


def _flat(chosen: Cages, options: NetPlanOptions, topology: str) -> tuple[Line, ...]:
    """Plan nodes that all reach each other in the same networks, one for each twin."""
    if topology == "cable" and options.nodes != 2:
        raise UsageError(f"one cable joins two nodes, not {options.nodes}", hint="ring or switch")
    if options.port0_to is not None:
        raise UsageError("--port0-to is for a ring", hint="leave it out")
    # _choose refuses two cages for a cable or a switch.
    ((cage, twins),) = chosen.items()
    return tuple(
        Line(
            netdev=twin.name,
            address=_address(options, number),
            cage=cage,
            twin=number,
            peer=3 - options.node if topology == "cable" else None,  # 1 or 2: the other one
        )
        for number, twin in enumerate(twins)
    )


def _ring(chosen: Cages, options: NetPlanOptions) -> tuple[Line, ...]:
    """Plan a ring: each cage has a link of its own to one of the two neighbours."""
    if options.nodes < 3 or set(chosen) != {0, 1}:
        raise UsageError(
            "a ring is of three nodes or more, with both cages of each",
            why=f"{options.nodes} nodes, and here "
            + (f"cage {next(iter(chosen))}" if None not in chosen else "interfaces by name"),
            hint="--nodes 3 without --cage and --netdev; or --topology cable, or switch",
        )
    lines = []
    for cage, peer in _neighbours(options).items():
        # A link has the number of the node that it leads away from, so both ends agree on it.
        link = options.node if peer == options.node % options.nodes + 1 else peer
        lines += [
            Line(
                netdev=twin.name,
                address=_address(options, 2 * (link - 1) + number),
                cage=cage,
                twin=number,
                peer=peer,
            )
            for number, twin in enumerate(chosen[cage])
        ]
    return tuple(lines)


def _neighbours(options: NetPlanOptions) -> dict[int, int]:
    """Return where the cages lead: by default 0 to the next node, 1 to the one before."""
    before, after = (options.node - 2) % options.nodes + 1, options.node % options.nodes + 1
    first = after if options.port0_to is None else options.port0_to
    if first not in (before, after):
        raise UsageError(
            f"--port0-to {first}: node {options.node} of a ring of {options.nodes} is between "
            f"{before} and {after}",
            hint=f"--port0-to {before} or --port0-to {after}",
        )
    return {0: first, 1: after if first == before else before}


def _address(options: NetPlanOptions, number: int) -> IPv4Interface:
    """Return this node's address in the network that is ``number`` after the base."""
    size = options.network.num_addresses
    host = facts()["plan"]["first_host"] + options.node
    base = options.network.network_address
    try:
        return IPv4Interface(f"{base + number * size + host}/{options.network.prefixlen}")
    except ValueError:  # above 255.255.255.255
        raise UsageError(f"--network {base}: no room for {number} networks after it") from None


def letter(twin: int) -> str:
    """Return A for the first half of a cage, B for the second."""
    return chr(ord("A") + twin)
