"""Plan which QSFP interface of a node gets which address: what works is kept. Pure.

Two nodes on one cable, or any number on a switch: both twins of the one cabled cage have an
address, in different networks; node n has the host number 9 + n, as in NVIDIA's playbook.

Three nodes in a ring: link k leads from port 0 of node k to port 1 of the next one, and has the
networks 2(k - 1) and 2(k - 1) + 1, counted from the base; docs/net.md has them in a table.

A cage with an address, whoever gave it, is in use: its addresses are kept, and only a half that has
drawn one is changed. ``network`` asks for counted addresses in any case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Interface, IPv4Network

from patchkit.errors import PatchkitError
from patchkit.quoting import quoted
from patchkit.runtime.host.advice import find_remark
from patchkit.runtime.host.host import Host, Netdev
from patchkit.runtime.rules.refusals import refusal
from patchkit.runtime.rules.releases import read_env_data

_NETWORK = read_env_data("network")
RING = 3
"""Nodes of a ring: in larger ones stock NCCL failed."""

Addresses = tuple[IPv4Interface, ...]
Cages = Mapping[int | None, tuple[Netdev, ...]]
"""Number of the cage, or None for netdevs that the user named → its halves, twin A first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetPlanOptions:
    """The options of a plan, None for what was not asked for; ``netdevs`` are instead of cages."""

    node: int | None = None
    nodes: int = 2
    mtu: int | None = None
    network: IPv4Network | None = None
    netdevs: tuple[str, ...] = ()

    def command_words(self) -> list[str]:
        """Return what patchkit is asked for such a plan: ``net plan`` and the options."""
        asked = {
            "--node": self.node,
            "--nodes": self.nodes if self.nodes != 2 else None,
            "--network": self.network,
            "--mtu": self.mtu,
        }
        words = [
            word
            for name, value in asked.items()
            if value
            for word in (name, str(value))
        ]
        words += [word for name in self.netdevs for word in ("--netdev", name)]
        return ["net", "plan", *words]

    def command_line(self) -> str:
        """Return the command line of the plan."""
        return quoted("patchkit", *self.command_words())


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Hold what patchkit's file has: netdev → ``address/prefix``; node and MTU, 0 if not known."""

    addresses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    node: int = 0
    mtu: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One interface: its addresses and MTU before and after.

    ``cage`` is None where the user named netdevs; ``peer`` None where it is unknown, or a switch.
    ``ours`` says that patchkit's file has it already.
    """

    netdev: str
    addresses: Addresses
    before: Addresses
    mtu: int
    mtu_before: int
    cage: int | None = None
    twin: int
    peer: int | None = None
    ours: bool = False

    @property
    def action(self) -> str:
        """Return ``keep``, ``add``, ``replace``, or ``mtu`` where only that changes."""
        if self.addresses != self.before:
            return "replace" if self.before else "add"
        return "keep" if self.mtu == self.mtu_before else "mtu"

    @property
    def place(self) -> str:
        """Return ``cage 0, twin A``."""
        return (
            "by name"
            if self.cage is None
            else f"cage {self.cage}, twin {'AB'[self.twin]}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NetPlan:
    """The interfaces of one node; a cabled cage that nobody uses is left alone."""

    node: int | None
    nodes: int
    topology: str
    lines: tuple[Line, ...]

    @property
    def written(self) -> tuple[Line, ...]:
        """Return what patchkit's file has: who set what is kept stays in charge of it."""
        return tuple(line for line in self.lines if line.action != "keep" or line.ours)

    @property
    def changes(self) -> tuple[Line, ...]:
        """Return what is not as it is to be."""
        return tuple(line for line in self.lines if line.action != "keep")


def find_cages(host: Host, *, cabled: bool = False) -> Cages:
    """Return the netdevs of each QSFP cage, twin A (the lower PCI domain) first.

    ``cabled`` asks for those with a link on at least one of their twins.
    """
    found: dict[int | None, tuple[Netdev, ...]] = {}
    halves = (netdev for netdev in host.netdevs if netdev.cage is not None)
    for netdev in sorted(halves, key=lambda half: (half.cage, half.pci, half.name)):
        if netdev.cage in host.cabled or not cabled:
            found[netdev.cage] = (*found.get(netdev.cage, ()), netdev)
    return found


def find_asked_cages(host: Host, names: Sequence[str]) -> Cages:
    """Return the netdevs that the user named, or all cages.

    Raises UsageError for what is not there, HostError for a host without any cage.
    """
    for name in names:
        if host.netdev(name) is None:
            there = ", ".join(netdev.name for netdev in host.netdevs) or "none"
            raise refusal("no-netdev", name=name, there=there)
    if names:
        return {
            None: tuple(
                found for name in dict.fromkeys(names) if (found := host.netdev(name))
            )
        }
    if known := find_cages(host):
        return known
    if off_bus := find_remark(host, "no-connectx"):
        raise off_bus.error()
    raise refusal("no-cage")


def make_net_plan(
    host: Host, options: NetPlanOptions, given: Given | None = None
) -> NetPlan:
    """Return what every interface has, and what it is to have.

    Raises UsageError for options that contradict each other or lack an answer, HostError if no
    cage is cabled.
    """
    facts, node, nodes = _NETWORK["plan"], options.node, options.nodes
    network = options.network or IPv4Network(facts["network"])
    if nodes < 2:
        raise refusal("net-one-node", nodes=nodes)
    if node is not None and not 1 <= node <= nodes:
        raise refusal("net-node", node=node, nodes=nodes)
    # The last number of a network is its broadcast address.
    if (last := facts["first_host"] + nodes) >= network.num_addresses - 1:
        raise refusal("net-small", network=network, nodes=nodes, last=last)
    given = given or Given()
    planner = _Planner(host, options, given, network)
    chosen = planner.choose_cages()
    topology = "cable" if nodes == 2 else "switch"
    if len(chosen) > 1:
        topology = "ring" if nodes == RING else "as found"
    lines = tuple(planner.make_lines(chosen, topology))
    least, most = facts["mtu_min"], facts["mtu_max"]
    for line in lines:
        if line.action != "keep" and not least <= line.mtu <= most:
            raise refusal(
                "net-mtu", mtu=line.mtu, netdev=line.netdev, least=least, most=most
            )
    known = node or given.node or None
    return NetPlan(node=known, nodes=nodes, topology=topology, lines=lines)


@dataclass(frozen=True, slots=True)
class _Planner:
    host: Host
    options: NetPlanOptions
    given: Given
    base: IPv4Network

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
        known = find_asked_cages(self.host, self.options.netdevs)
        if self.options.netdevs:
            self.check_masters(known)
            return known

        linked = find_cages(self.host, cabled=True)
        free = {
            number: its for number, its in linked.items() if not self.host.masters(its)
        }
        if not linked:
            first = next(iter(known.values()))[0].name
            up = quoted("sudo", "ip", "link", "set", first, "up")
            raise refusal("no-cabled-cage", cages="; ".join(_show_cages(known)), up=up)
        if not free:
            self.check_masters(linked)
        if len(free) == 1 or self.options.nodes == RING:
            return free

        used = {
            n: its for n, its in free.items() if any(map(self.present_addresses, its))
        }
        if used:
            return used
        raise self.refuse_two_cables(free)

    def refuse_two_cables(self, linked: Cages) -> PatchkitError:
        """Return the error for several cables of which nothing says where they lead."""
        asked = replace(self.options, node=self.options.node or 1)
        ring = replace(asked, nodes=RING).command_line()
        names = [tuple(twin.name for twin in twins) for twins in linked.values()]
        one = [replace(asked, netdevs=halves).command_line() for halves in names]
        cages = "; ".join(_show_cages(linked))
        return refusal("two-cables", cages=cages, one="; or ".join(one), ring=ring)

    def check_masters(self, chosen: Cages) -> None:
        """Raise HostError for interfaces that are parts of a bond, bridge or team."""
        joined = find_remark(self.host, "part-of-master")
        if joined and self.host.masters(
            twin for twins in chosen.values() for twin in twins
        ):
            raise joined.error()

    def make_lines(self, chosen: Cages, topology: str) -> Iterator[Line]:
        """Yield the lines of all cages: what is in use is kept, the others are counted."""
        node, first, peer, base = self.options.node, 0, 0, self.base
        for cage, twins in chosen.items():
            after = {twin.name: self.present_addresses(twin) for twin in twins}
            lasting = [
                one for own in after.values() for one in own if not one.is_link_local
            ]
            if node and topology == "cable":
                peer = 3 - node
            elif node and topology == "ring":
                following, former = node % RING + 1, (node - 2) % RING + 1
                peer, link = (following, node) if cage == 0 else (former, former)
                first = 2 * (link - 1)
            for number, twin in enumerate(twins, first):
                own = after[twin.name]
                if lasting and own and all(one.is_link_local for one in own):
                    # One that was drawn: in the network after the set one, with its host number.
                    address = int(lasting[0].ip) + lasting[0].network.num_addresses
                    after[twin.name] = (
                        IPv4Interface((address, lasting[0].network.prefixlen)),
                    )
                elif not any(self.present_addresses(each) for each in twins):
                    if node is None:
                        raise refusal("net-no-node", nodes=self.options.nodes)
                    start = int(base.network_address) + number * base.num_addresses
                    if start >> 32:  # above 255.255.255.255
                        raise refusal(
                            "net-no-room", network=base.network_address, number=number
                        )
                    address = start + _NETWORK["plan"]["first_host"] + node
                    after[twin.name] = (IPv4Interface((address, base.prefixlen)),)
            yield from self._make_lines_of(cage, twins, after, peer)

    def _make_lines_of(
        self,
        cage: int | None,
        twins: Sequence[Netdev],
        after: Mapping[str, Addresses],
        peer: int,
    ) -> Iterator[Line]:
        kept = [twin.mtu for twin in twins if after[twin.name] == twin.ipv4 != ()]
        usual = kept[0] if kept else _NETWORK["plan"]["mtu"]
        for number, twin in enumerate(twins):
            addresses = after[twin.name]
            before = twin.ipv4 or self.present_addresses(twin)
            noted = self.given.addresses.get(twin.name, ())
            ours = bool(addresses) and all(
                str(address) in noted for address in addresses
            )
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
                peer=(peer or None) if addresses != twin.ipv4 else None,
                ours=ours,
            )


def _show_cages(cages: Cages) -> Iterator[str]:
    """Yield ``cage 0: enp1s0f0np0, enP2p1s0f0np0`` for each."""
    for number, twins in cages.items():
        yield f"cage {number}: {', '.join(twin.name for twin in twins)}"


def other_node_options(plan: NetPlan, options: NetPlanOptions) -> NetPlanOptions | None:
    """Return how to plan the other end of one cable in this node's networks; None if unknown."""
    own = [address for line in plan.lines for address in line.addresses]
    # Link-local ones are drawn there; in a small network there is no room to count.
    usable = all(not one.is_link_local and one.network.prefixlen <= 29 for one in own)
    if plan.topology != "cable" or not own or not usable:
        return None
    base, node = own[0].network, 1 if (plan.node or 1) > 1 else 2
    host = _NETWORK["plan"]["first_host"] + node
    for number, address in enumerate(own):
        start = base.network_address + number * base.num_addresses
        if address.network.network_address != start or address.ip == start + host:
            return None
    return NetPlanOptions(node=node, network=base, mtu=options.mtu)
