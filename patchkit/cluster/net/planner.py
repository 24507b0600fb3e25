"""Plan which QSFP interface of a node gets which address: what works is kept. Pure.

A cage with an address, whoever gave it, is in use: its addresses are kept, and only a half that
disturbs is changed. A cage without any gets them beside the peer's that are known, else counted by
the number of the node (``numbers``). ``--network`` asks for counted ones in any case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Interface, IPv4Network

from patchkit.cluster.net.cages import Cages, cabled, cages, listing, named, no_card, no_link
from patchkit.cluster.net.numbers import (
    beside,
    check_numbers,
    counted,
    link,
    neighbours,
    next_to,
    with_prefix,
)
from patchkit.cluster.net.plan import Given, Line, NetPlan, NetPlanOptions, again
from patchkit.errors import UsageError
from patchkit.runtime.host.host import Host, Netdev
from patchkit.runtime.host.network_facts import facts


def make_plan(
    host: Host,
    options: NetPlanOptions,
    mtu_max: Mapping[str, int] | None = None,
    given: Given | None = None,
) -> NetPlan:
    """Return what every interface has, and what it is to have. ``mtu_max``: what each can do.

    Raises UsageError for options that contradict each other or lack an answer, HostError if no
    cage is cabled.
    """
    check_numbers(options.node, options.nodes, options.base)
    planner = _Planner(host, options, given or Given())
    chosen = planner.choose()
    lines = tuple(planner.lines(chosen))
    _check_mtu(lines, mtu_max or {})
    _check_peers(lines, options.peers)
    return NetPlan(
        node=options.node,
        nodes=options.nodes,
        topology=planner.topology(chosen),
        lines=lines,
        spare={
            n: twins for n, twins in cabled(host).items() if chosen.keys().isdisjoint({n, None})
        },
    )


@dataclass(frozen=True, slots=True)
class _Planner:
    host: Host
    options: NetPlanOptions
    given: Given

    def present(self, netdev: Netdev) -> tuple[IPv4Interface, ...]:
        """Return the addresses that are kept: none where the plan counts them anew.

        Those that patchkit gave count even while the interface is down, and no more once this is
        another node.
        """
        if self.options.network:
            return ()
        same = self.options.node in (None, self.given.node)
        ours = self.given.ever.get(netdev.name, ())
        noted = self.given.last.get(netdev.name, ()) if same else ()
        found = tuple(each for each in netdev.ipv4 if same or str(each) not in ours)
        return found or tuple(map(IPv4Interface, noted))

    # Which cages

    def choose(self) -> Cages:
        """Return the cages to plan. Raises HostError for none, UsageError for too many."""
        options, known, linked = self.options, cages(self.host), cabled(self.host)
        if options.netdevs:
            return named(self.host, options.netdevs)
        if not known:
            raise no_card(self.host)
        if options.cage is not None:
            if options.cage not in known:
                raise UsageError(f"there is no cage {options.cage}", hint=listing(known))
            return {options.cage: known[options.cage]}
        if not linked:
            raise no_link(known)
        if options.topology == "ring":
            return known  # an end that is not plugged in yet has an address all the same
        # A ring of four or more is so rare, and a second cable so common, that it is asked for.
        if len(linked) == 1 or (options.topology == "auto" and options.nodes == 3):
            return linked
        return self._in_use(linked) or self._ask(linked)

    def _in_use(self, linked: Cages) -> Cages:
        return {n: twins for n, twins in linked.items() if any(map(self.present, twins))}

    def _ask(self, linked: Cages) -> Cages:
        asked = replace(self.options, node=self.options.node or 1)
        one = [replace(asked, cage=cage) for cage in linked]
        ring = replace(asked, nodes=max(asked.nodes, 3), topology="ring")
        raise UsageError(
            f"where do the two cables lead? {listing(linked)}",
            why="no address says so; one cable carries all that the ConnectX-7 can: a second one "
            "to the same node or switch brings nothing",
            hint="both to one node, or to a switch: "
            + "; or ".join(map(again, one))
            + f"; to two nodes: {again(ring)}",
        )

    def topology(self, chosen: Cages) -> str:
        """Return the topology; ``as found`` where two cages are in use and nobody said for what."""
        if self.options.topology != "auto":
            return self.options.topology
        if len(chosen) > 1:
            return "ring" if self.options.nodes == 3 else "as found"
        return "cable" if self.options.nodes == 2 else "switch"

    # What their interfaces have

    def lines(self, chosen: Cages) -> Iterator[Line]:
        """Yield the lines of all cages: those in use, then those that have no address yet."""
        topology = self.topology(chosen)
        self._check_topology(chosen, topology)
        peers = self._unknown_peers(chosen)
        for cage, twins in chosen.items():
            has = {twin.name: self.present(twin) for twin in twins}
            static = [each for own in has.values() for each in own if not each.is_link_local]
            if peers and not static:
                has[twins[0].name] = self._near(peers, None)
                static = [*has[twins[0].name]]
            if static or (any(has.values()) and not self.options.twins):
                after = self._completed(twins, has, static, peers)
            else:
                after = self._counted(cage, twins, topology)
            yield from self._as_lines(cage, twins, after, topology)

    def _completed(
        self,
        twins: Sequence[Netdev],
        has: Mapping[str, tuple[IPv4Interface, ...]],
        static: Sequence[IPv4Interface],
        peers: list[IPv4Interface],
    ) -> dict[str, tuple[IPv4Interface, ...]]:
        """Return the addresses of a cage in use: a half gets one if it has only a drawn one.

        And if a peer's address or ``--twins`` asks for it.
        """
        after = dict(has)
        for twin in twins if static else ():
            own = has[twin.name]
            if any(each in static for each in own):
                continue
            if peers:
                number = int(static[0].ip) - int(static[0].network.network_address)
                after[twin.name] = self._near(peers, number)
            elif (own or self.options.twins) and (found := next_to(static[0], self._taken())):
                after[twin.name] = (found,)
        return after

    def _near(self, peers: list[IPv4Interface], own: int | None) -> tuple[IPv4Interface, ...]:
        """Take the next of the peer's addresses, and return one beside it."""
        # Of two nodes the other one is known, and which is the head matters to nobody.
        node = self.options.node or (2 if self.options.nodes == 2 else self._node())
        return (beside(peers.pop(0), node, own),)

    def _counted(
        self, cage: int | None, twins: Sequence[Netdev], topology: str
    ) -> dict[str, tuple[IPv4Interface, ...]]:
        node, first = self._node(), 0
        if topology == "ring":
            peer = neighbours(node, self.options.nodes, self.options.port0_to)[cage or 0]
            first = 2 * (link(node, self.options.nodes, peer) - 1)
        return {
            twin.name: (counted(self.options.base, first + number, node),)
            for number, twin in enumerate(twins)
        }

    def _as_lines(
        self,
        cage: int | None,
        twins: Sequence[Netdev],
        after: Mapping[str, tuple[IPv4Interface, ...]],
        topology: str,
    ) -> Iterator[Line]:
        node, nodes = self.options.node, self.options.nodes
        peer = None
        if node and topology == "ring":
            peer = neighbours(node, nodes, self.options.port0_to)[cage or 0]
        elif node and topology == "cable":
            peer = 3 - node  # 1 or 2: the other one
        present = [twin.mtu for twin in twins if after.get(twin.name) == twin.ipv4 != ()]
        usual = present[0] if present else facts()["plan"]["mtu"]
        for number, twin in enumerate(twins):
            addresses = after.get(twin.name, ())
            before = twin.ipv4 or self.present(twin)
            ours = bool(addresses) and self.given.is_all(twin.name, addresses)
            noted = self.given.mtu if ours else 0
            # An interface that is down tells nothing of what patchkit's file says.
            mtu_before = twin.mtu if twin.ipv4 else noted or twin.mtu
            mtu = noted or (mtu_before if addresses == before else usual)
            yield Line(
                netdev=twin.name,
                addresses=addresses,
                before=before,
                # Without an address an interface is in no file of patchkit's.
                mtu=(self.options.mtu or mtu) if addresses else twin.mtu,
                mtu_before=mtu_before if addresses else twin.mtu,
                cage=cage,
                twin=number,
                # Of an address that was there nobody said where it leads.
                peer=peer if addresses != twin.ipv4 else None,
                ours=ours,
            )

    def _check_topology(self, chosen: Cages, topology: str) -> None:
        nodes = self.options.nodes
        if topology == "ring" and (nodes < 3 or set(chosen) != {0, 1}):
            raise UsageError(
                "a ring is of three nodes or more, with both cages of each",
                why=f"{nodes} nodes, and here "
                + (f"cage {next(iter(chosen))}" if None not in chosen else "interfaces by name"),
                hint="--nodes 3 without --cage and --netdev; or --topology cable, or switch",
            )
        if topology == "cable" and nodes != 2:
            raise UsageError(f"one cable joins two nodes, not {nodes}", hint="ring or switch")
        if topology != "ring" and self.options.port0_to is not None:
            raise UsageError("--port0-to is for a ring", hint="leave it out")

    def _unknown_peers(self, chosen: Cages) -> list[IPv4Interface]:
        """Return the peer's addresses in whose networks this node has no address yet."""
        own = [each for twins in chosen.values() for n in twins for each in self.present(n)]
        asked = () if self.options.network else self.options.peers
        return [
            with_prefix(peer, self.options.base)
            for peer in asked
            if not any(peer.ip in each.network for each in own)
        ]

    def _taken(self) -> list[IPv4Network]:
        return [each.network for netdev in self.host.netdevs for each in netdev.ipv4]

    def _node(self) -> int:
        if self.options.node is None:
            nodes = self.options.nodes
            raise UsageError(
                "missing --node or --role",
                why="the cable has no addresses yet, and they are counted by the node",
                hint=f"--node 1 to {nodes}, or --role head; the head is 1",
            )
        return self.options.node


def _check_peers(lines: Sequence[Line], peers: Sequence[IPv4Interface]) -> None:
    """Raise UsageError for a peer that this plan could not reach."""
    own = [each for line in lines for each in line.addresses]
    for peer in peers:
        if any(peer.ip == each.ip for each in own):
            raise UsageError(
                f"--peer {peer.ip} is what this node has, or would get",
                hint="name an address of the other end, or another --node",
            )
        if not any(peer.ip in each.network for each in own):
            networks = ", ".join(str(each.network) for each in own)
            raise UsageError(
                f"--peer {peer.ip} is in none of {networks}",
                hint="leave out the peer's addresses that are of another cable, or --network",
            )


def _check_mtu(lines: Sequence[Line], mtu_max: Mapping[str, int]) -> None:
    least, most = facts()["plan"]["mtu_min"], facts()["plan"]["mtu_max"]
    for line in lines:
        limit = mtu_max.get(line.netdev, most)
        if line.action != "keep" and not least <= line.mtu <= limit:
            raise UsageError(
                f"--mtu {line.mtu}: {line.netdev} takes {least} to {limit}",
                hint="9000 on every node and on the switch, or 1500",
            )
