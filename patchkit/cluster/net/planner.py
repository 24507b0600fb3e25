r"""Plan which QSFP interface of a node gets which address: what works is kept. Pure.

Two nodes on one cable, or any number on a switch: both twins of the one cabled cage have an
address, in different networks; node n has the host number 9 + n, as in NVIDIA's playbook.

              192.168.100.0/24  twin A
    node 1 ══════════════════════════════ node 2
       .10    192.168.101.0/24  twin B    .11

Three nodes in a ring: every link has two networks of its own, so each node has four addresses.
Link k leads from node k to the next one (from the last to node 1), and has networks 2(k - 1) and
2(k - 1) + 1, counted from the base; docs/net.md has them in a table. Addresses belong to links, not
to ports: where the cables run the other way round, ``port0_to`` says so.

A cage with an address, whoever gave it, is in use: its addresses are kept, and only a half that has
drawn one is changed. ``network`` asks for counted addresses in any case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Interface, IPv4Network

from patchkit.cluster.net.cages import Cages, cabled, cages, find_asked_cages, list_cages, no_link
from patchkit.cluster.net.plan import Given, Line, NetPlan, NetPlanOptions, plan_command_line
from patchkit.errors import UsageError
from patchkit.runtime.host.hardware import network_facts
from patchkit.runtime.host.host import Host, Netdev

Addresses = tuple[IPv4Interface, ...]


def make_net_plan(
    host: Host,
    options: NetPlanOptions,
    mtu_max: Mapping[str, int] | None = None,
    given: Given | None = None,
) -> NetPlan:
    """Return what every interface has, and what it is to have. ``mtu_max``: what each can do.

    Raises UsageError for options that contradict each other or lack an answer, HostError if no
    cage is cabled.
    """
    _check_numbers(options)
    planner = _Planner(host, options, given or Given())
    chosen = planner.choose_cages()
    topology = planner.find_topology(chosen)
    lines = tuple(planner.make_lines(chosen, topology))
    least, most = network_facts()["plan"]["mtu_min"], network_facts()["plan"]["mtu_max"]
    for line in lines:
        limit = (mtu_max or {}).get(line.netdev, most)
        if line.action != "keep" and not least <= line.mtu <= limit:
            raise UsageError(
                f"--mtu {line.mtu}: {line.netdev} takes {least} to {limit}",
                hint="9000 on every node and on the switch, or 1500",
            )
    linked = cabled(host).items()
    return NetPlan(
        node=options.node,
        nodes=options.nodes,
        topology=topology,
        lines=lines,
        spare={n: twins for n, twins in linked if chosen.keys().isdisjoint({n, None})},
    )


@dataclass(frozen=True, slots=True)
class _Planner:
    host: Host
    options: NetPlanOptions
    given: Given

    def present_addresses(self, netdev: Netdev) -> Addresses:
        """Return the addresses that are kept: none where the plan counts them anew.

        Those that patchkit gave count even while the interface is down, and no more once this is
        another node.
        """
        if self.options.network:
            return ()
        ours = tuple(map(IPv4Interface, self.given.addresses.get(netdev.name, ())))
        if self.options.node in (None, self.given.node):
            return netdev.ipv4 or ours
        return tuple(address for address in netdev.ipv4 if address not in ours)

    def choose_cages(self) -> Cages:
        """Return the cages to plan. Raises HostError for none, UsageError for too many."""
        options, linked = self.options, cabled(self.host)
        if asked := find_asked_cages(self.host, options.netdevs, options.cage):
            return asked
        if not linked:
            raise no_link(cages(self.host))
        if options.topology == "ring":
            return cages(self.host)  # an end that is not plugged in yet has an address all the same
        # A ring of four or more is so rare, and a second cable so common, that it is asked for.
        if len(linked) == 1 or (options.topology == "auto" and options.nodes == 3):
            return linked
        in_use = {
            n: twins for n, twins in linked.items() if any(map(self.present_addresses, twins))
        }
        if in_use:
            return in_use
        asked_again = replace(options, node=options.node or 1)
        one = [plan_command_line(replace(asked_again, cage=cage)) for cage in linked]
        ring = replace(asked_again, nodes=max(options.nodes, 3), topology="ring")
        raise UsageError(
            f"where do the two cables lead? {list_cages(linked)}",
            why="no address says so; one cable carries all that the ConnectX-7 can: a second one "
            "to the same node or switch brings nothing",
            hint=f"both to one node, or to a switch: {'; or '.join(one)}; to two nodes: "
            + plan_command_line(ring),
        )

    def find_topology(self, chosen: Cages) -> str:
        """Return the topology; ``as found`` where two cages are in use and nobody said for what.

        Raises UsageError for one that cannot be.
        """
        nodes, topology = self.options.nodes, self.options.topology
        if topology == "auto" and len(chosen) > 1:
            topology = "ring" if nodes == 3 else "as found"
        elif topology == "auto":
            topology = "cable" if nodes == 2 else "switch"
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
        return topology

    def make_lines(self, chosen: Cages, topology: str) -> Iterator[Line]:
        """Yield the lines of all cages: what is in use is kept, the others are counted."""
        for cage, twins in chosen.items():
            before = {twin.name: self.present_addresses(twin) for twin in twins}
            present = [address for own in before.values() for address in own]
            lasting = [address for address in present if not address.is_link_local]
            peer = self._find_peer(cage, topology)
            if lasting or (present and not self.options.twins):
                after = self._complete_halves(twins, before, lasting)
            else:
                node = self._require_node()
                # A ring's link has the number of the node which it leads away from.
                link = node if peer in (None, node % self.options.nodes + 1) else peer or node
                first = 2 * (link - 1)
                after = {
                    twin.name: (self._count_address(number + (first if topology == "ring" else 0)),)
                    for number, twin in enumerate(twins)
                }
            yield from self._make_lines_of(cage, twins, after, peer)

    def _complete_halves(
        self,
        twins: Sequence[Netdev],
        before: Mapping[str, Addresses],
        lasting: Sequence[IPv4Interface],
    ) -> Mapping[str, Addresses]:
        """Return the addresses of a cage in use: a half gets one if it has drawn one, or if asked.

        It is in the next network, with the same host number.
        """
        after = dict(before)
        for twin in twins if lasting else ():
            own = before[twin.name]
            if any(address in lasting for address in own) or not (own or self.options.twins):
                continue
            base = lasting[0]
            address = base.ip + base.network.num_addresses
            after[twin.name] = (IPv4Interface(f"{address}/{base.network.prefixlen}"),)
        return after

    def _count_address(self, number: int) -> IPv4Interface:
        """Return this node's address in the network that is ``number`` after the base."""
        base = self.options.base
        host = network_facts()["plan"]["first_host"] + self._require_node()
        try:
            address = base.network_address + number * base.num_addresses + host
            return IPv4Interface(f"{address}/{base.prefixlen}")
        except ValueError:  # above 255.255.255.255
            raise UsageError(
                f"--network {base.network_address}: no room for {number} networks after it"
            ) from None

    def _find_peer(self, cage: int | None, topology: str) -> int | None:
        """Return the node where a cage leads, None for a switch. Raises UsageError."""
        node, nodes, first = self.options.node, self.options.nodes, self.options.port0_to
        if node is None or topology not in ("ring", "cable"):
            return None
        if topology == "cable":
            return 3 - node
        before, after = (node - 2) % nodes + 1, node % nodes + 1
        if first not in (None, before, after):
            raise UsageError(
                f"--port0-to {first}: node {node} of a ring of {nodes} is between {before} "
                f"and {after}",
                hint=f"--port0-to {before} or --port0-to {after}",
            )
        return before if (first == before) is (cage == 0) else after

    def _make_lines_of(
        self,
        cage: int | None,
        twins: Sequence[Netdev],
        after: Mapping[str, Addresses],
        peer: int | None,
    ) -> Iterator[Line]:
        kept = [twin.mtu for twin in twins if after[twin.name] == twin.ipv4 != ()]
        usual = kept[0] if kept else network_facts()["plan"]["mtu"]
        for number, twin in enumerate(twins):
            addresses = after[twin.name]
            before = twin.ipv4 or self.present_addresses(twin)
            noted = self.given.addresses.get(twin.name, ())
            ours = bool(addresses) and all(str(address) in noted for address in addresses)
            mtu_noted = self.given.mtu if ours else 0
            # An interface that is down tells nothing of what patchkit's file says.
            mtu_before = twin.mtu if twin.ipv4 else mtu_noted or twin.mtu
            mtu = mtu_noted or (mtu_before if addresses == before else usual)
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

    def _require_node(self) -> int:
        if self.options.node is None:
            raise UsageError(
                "missing --node or --role",
                why="the cable has no addresses yet, and they are counted by the node",
                hint=f"--node 1 to {self.options.nodes}, or --role head; the head is 1",
            )
        return self.options.node


def _check_numbers(options: NetPlanOptions) -> None:
    """Raise UsageError for numbers that contradict each other, or do not fit the network."""
    node, nodes, network = options.node, options.nodes, options.base
    if nodes < 2:
        raise UsageError(f"--nodes {nodes}: one node needs no network", hint="2 or more")
    if node is not None and not 1 <= node <= nodes:
        raise UsageError(
            f"--node {node}: nodes are numbered from 1 to {nodes}", hint="the head is node 1"
        )
    # The last number of a network is its broadcast address.
    last = network_facts()["plan"]["first_host"] + nodes
    if last >= network.num_addresses - 1:
        raise UsageError(
            f"--network {network} is too small for {nodes} nodes",
            why=f"node {nodes} has the host number {last}",
            hint="give a /24",
        )


def find_free_base(taken: Sequence[IPv4Network], count: int) -> IPv4Network:
    """Return the first of the recipe's bases with ``count`` free networks, else the second."""
    bases = [IPv4Network(base) for base in network_facts()["plan"]["networks"]]
    for base in bases:
        last = int(base.network_address) + count * base.num_addresses
        networks = (
            IPv4Network((start, base.prefixlen))
            for start in range(int(base.network_address), last, base.num_addresses)
        )
        if not any(network.overlaps(other) for network in networks for other in taken):
            return base
    return bases[1]
