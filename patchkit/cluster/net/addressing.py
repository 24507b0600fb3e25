"""Plan which QSFP interface of a node gets which address; addresses that work are kept. Pure.

Two nodes on one cable, or several on a switch: both twins of the one cabled cage get an address, in
two networks. Node n has the host number 9 + n, as in NVIDIA's playbook.

Three nodes in a ring: link k leads from port 0 of node k to port 1 of the next node. It has the
networks with the numbers 2(k - 1) and 2(k - 1) + 1, counted from the base of the plan; the table in
docs/net.md lists them.

A cage that has an address is in use, whoever gave the address. Its addresses are kept; only a half
with a random address gets a new one. With the option ``network`` all addresses are new.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from ipaddress import IPv4Interface, IPv4Network
from itertools import chain
from operator import attrgetter

from patchkit.errors import PatchkitError
from patchkit.frozen import Texts, frozen, positional
from patchkit.quoting import quoted
from patchkit.runtime.host.advice import find_remark
from patchkit.runtime.host.host import Host, Netdev
from patchkit.runtime.rules.releases import read_env_data, refusal

_NETWORK = read_env_data("network")
_FIRST_HOST = _NETWORK["plan"]["first_host"]  # node n has this number + n
RING = 3
"""The only number of nodes for a ring: in larger rings, stock NCCL failed."""
_CABLES = _NETWORK["cables"]
_TOPOLOGIES = {(1, 2): "cable", (2, RING): "ring"}  # by the numbers of cages and nodes

Addresses = tuple[IPv4Interface, ...]
Cages = Mapping[int | None, tuple[Netdev, ...]]
"""Number of a cage → its halves, twin A first; None → netdevs that the user named."""


@frozen
class NetPlanOptions:
    """The options of a plan; None means not given.

    ``node`` is the number of this node, from 1, and ``nodes`` the number of all. ``network`` is the
    base. ``netdevs`` are interfaces to plan instead of those of the cages.
    """

    node: int | None = None
    nodes: int = 2
    mtu: int | None = None
    network: IPv4Network | None = None
    netdevs: Texts = ()

    def command_words(self) -> list[str]:
        """Return ``net plan`` and the options, as words of a command line."""
        options = {
            "--node": self.node,
            "--nodes": self.nodes if self.nodes != 2 else None,
            "--network": self.network,
            "--mtu": self.mtu,
        }

        words = ["net", "plan"]

        for option, value in options.items():
            if value:
                words += [option, str(value)]
        for name in self.netdevs:
            words += ["--netdev", name]
        return words

    def command_line(self) -> str:
        """Return the command line that makes this plan, quoted for a shell."""
        return quoted("patchkit", *self.command_words())


@frozen
class WrittenPlan:
    """The content of patchkit's netplan file.

    ``addresses`` maps a netdev to its ``address/prefix``. ``node`` and ``mtu`` are 0 if the file
    does not say them.
    """

    addresses: Mapping[str, Texts] = field(default_factory=dict)
    node: int = 0
    mtu: int = 0


@frozen
class Line:
    """One interface of a plan.

    ``addresses`` and ``mtu`` are those after the plan, ``before`` and ``mtu_before`` the present
    ones. ``cage`` is None if the user named netdevs; ``twin`` is 0 for twin A, 1 for B. ``peer`` is
    the number of the node at the other end, None for a switch or if unknown. ``ours`` says that
    patchkit's file already has the addresses.
    """

    netdev: str
    addresses: Addresses
    before: Addresses
    mtu: int
    mtu_before: int
    cage: int | None = None
    twin: int
    peer: int | None = None
    ours: bool

    @property
    def action(self) -> str:
        """Return ``keep``, ``add``, ``replace``, or ``mtu`` if only the MTU changes."""
        if self.addresses != self.before:
            return "replace" if self.before else "add"
        return "keep" if self.mtu == self.mtu_before else "mtu"

    @property
    def is_written(self) -> bool:
        """Return whether the interface belongs into patchkit's file after the plan."""
        return self.ours or self.action != "keep"

    @property
    def place(self) -> str:
        """Return ``cage 0, twin A``, or ``by name``."""
        if self.cage is None:
            return "by name"
        return f"cage {self.cage}, twin {'AB'[self.twin]}"


@frozen
class NetPlan:
    """The plan of one node: a line for each interface in use.

    ``node`` is the number of this node, None if not given. ``topology`` is ``cable``, ``switch``,
    ``ring`` or ``as found``.
    """

    node: int | None
    nodes: int
    topology: str
    lines: tuple[Line, ...]

    @property
    def written(self) -> tuple[Line, ...]:
        """Return the lines for patchkit's file: not those whose addresses others set and keep."""
        return tuple(line for line in self.lines if line.is_written)

    @property
    def changes(self) -> tuple[Line, ...]:
        """Return the lines of interfaces that the plan changes."""
        return tuple(line for line in self.lines if line.action != "keep")


def find_cages(host: Host, *, cabled: bool = False) -> Cages:
    """Return the netdevs of each QSFP cage, twin A first: the one with the lower PCI domain.

    ``cabled`` selects the cages with a link on at least one of their twins.
    """
    halves = sorted(host.netdevs, key=attrgetter("pci", "name"))
    numbers = {half.cage for half in halves if half.cage is not None}
    chosen = host.cabled if cabled else sorted(numbers)
    return {
        number: tuple(half for half in halves if half.cage == number)
        for number in chosen
    }


def list_halves(cages: Cages) -> list[Netdev]:
    """Return the netdevs of all cages."""
    return [half for twins in cages.values() for half in twins]


def select_cages(host: Host, names: Sequence[str]) -> Cages:
    """Return the netdevs that the user named, or all cages.

    Raises UsageError for a name that no netdev has, HostError for a host without any cage.
    """
    netdevs = {netdev.name: netdev for netdev in host.netdevs}
    for name in names:
        if name not in netdevs:
            present = ", ".join(netdevs) or "none"
            raise refusal("no-netdev", name=name, there=present)

    if names:
        unique = dict.fromkeys(names)
        return {None: tuple(netdevs[name] for name in unique)}

    if cages := find_cages(host):
        return cages
    if off_bus := find_remark(host, "no-connectx"):
        raise off_bus.error()
    raise refusal("no-cage")


def make_net_plan(
    host: Host,
    options: NetPlanOptions,
    written: WrittenPlan | None = None,
) -> NetPlan:
    """Return the plan of a node: the present and the planned addresses of its interfaces.

    ``written`` is the content of patchkit's netplan file. Raises UsageError for options that
    contradict each other or are missing, HostError if no cage is cabled or all are in a bond.
    """
    network = options.network or IPv4Network(_NETWORK["plan"]["network"])
    _check_numbers(options, network)

    written = written or WrittenPlan()
    planner = _Planner(host, options, written, network)
    cages = planner.choose_cages()
    topology = _name_topology(options.nodes, len(cages))
    return NetPlan(
        node=options.node or written.node or None,
        nodes=options.nodes,
        topology=topology,
        lines=tuple(planner.make_lines(cages, topology)),
    )


def _name_topology(nodes: int, cages: int) -> str:
    several = "as found" if cages > 1 else "switch"
    return _TOPOLOGIES.get((cages, nodes), several)


def _check_numbers(options: NetPlanOptions, network: IPv4Network) -> None:
    """Raise UsageError if ``node`` is not one of ``nodes``, or the network is too small for all."""
    node = options.node
    nodes = options.nodes
    if node is not None and not 1 <= node <= nodes:
        raise refusal("net-node", node=node, nodes=nodes)

    # The last number of a network is its broadcast address.
    last_host = _FIRST_HOST + nodes
    if last_host >= network.num_addresses - 1:
        raise refusal("net-small", network=network, nodes=nodes, last=last_host)


@frozen
class _Cable:
    """The cable of a cage.

    ``peer`` is the number of the node at its other end, 0 if unknown. ``network`` is the number of
    the network of twin A, counted from the base of the plan.
    """

    peer: int = 0
    network: int = 0


@positional
class _Planner:
    host: Host
    options: NetPlanOptions
    written: WrittenPlan
    base: IPv4Network

    def kept_addresses(self, netdev: Netdev) -> Addresses:
        """Return the addresses of a netdev that the plan keeps; none if the user named a network.

        An interface that is down keeps the addresses of patchkit's file. If the file was written
        for another node number, its addresses are not kept.
        """
        if self.options.network:
            return ()

        texts = self.written.addresses.get(netdev.name, ())
        ours = tuple(map(IPv4Interface, texts))
        if self.options.node in (None, self.written.node):
            return netdev.ipv4 or ours
        return tuple(address for address in netdev.ipv4 if address not in ours)

    def choose_cages(self) -> Cages:
        """Return the cages to plan.

        Raises HostError if no cage has a link, or if all are in a bond; UsageError if several have
        a link and none has an address to keep.
        """
        selected = select_cages(self.host, self.options.netdevs)
        if self.options.netdevs:
            self.check_masters(selected)
            return selected

        linked = find_cages(self.host, cabled=True)
        if not linked:
            netdev = list_halves(selected)[0].name
            up = quoted("sudo", "ip", "link", "set", netdev, "up")
            raise refusal("no-cabled-cage", cages=_show_cages(selected), up=up)

        free = remove_joined(self.host, linked)
        if not free:
            self.check_masters(linked)
        if len(free) == 1 or self.options.nodes == RING:
            return free

        used = {
            number: twins
            for number, twins in free.items()
            if any(map(self.kept_addresses, twins))
        }
        if used:
            return used
        raise self.refuse_two_cables(free)

    def refuse_two_cables(self, linked: Cages) -> PatchkitError:
        """Return the error for several cables of which nothing tells where they lead."""
        options = replace(self.options, node=self.options.node or 1)
        commands = []
        for twins in linked.values():
            names = tuple(twin.name for twin in twins)
            commands.append(replace(options, netdevs=names).command_line())

        return refusal(
            "two-cables",
            cages=_show_cages(linked),
            one="; or ".join(commands),
            ring=replace(options, nodes=RING).command_line(),
        )

    def check_masters(self, cages: Cages) -> None:
        """Raise HostError if an interface of the cages is part of a bond, bridge or team."""
        joined = find_remark(self.host, "part-of-master")
        if joined and self.host.masters(list_halves(cages)):
            raise joined.error()

    def make_lines(self, cages: Cages, topology: str) -> Iterator[Line]:
        """Yield the lines of all cages, with kept or new addresses."""
        for cage, twins in cages.items():
            cable = self.find_cable(cage, topology)
            addresses = self.choose_addresses(twins, cable)
            usual_mtu = self.find_usual_mtu(twins, addresses)

            for number, twin in enumerate(twins):
                line = self.make_line(twin, addresses[twin.name], usual_mtu)
                # A kept address may lead to any node: the user did not say to which.
                peer = None if line.addresses == twin.ipv4 else cable.peer
                yield replace(line, cage=cage, twin=number, peer=peer or None)

    def find_usual_mtu(
        self, twins: Iterable[Netdev], addresses: Mapping[str, Addresses]
    ) -> int:
        """Return the MTU of the first twin that keeps its addresses, else that of new plans."""
        for twin in twins:
            if twin.ipv4 and addresses[twin.name] == twin.ipv4:
                return twin.mtu
        mtu: int = _NETWORK["plan"]["mtu"]
        return mtu

    def find_cable(self, cage: int | None, topology: str) -> _Cable:
        """Return the cable of a cage; one without a peer if the node has no number."""
        node = self.options.node
        if not node or topology not in _CABLES:
            return _Cable()
        ports = _CABLES[topology][node - 1]
        return _Cable(**ports[cage or 0])

    def choose_addresses(
        self, twins: Sequence[Netdev], cable: _Cable
    ) -> dict[str, Addresses]:
        """Return the addresses of each twin by its name.

        If no twin keeps an address, all get new ones. If one twin has a lasting address, a twin
        with a random one gets the same host number in the network that follows. Raises UsageError
        if new addresses are needed and the node has no number.
        """
        chosen = {twin.name: self.kept_addresses(twin) for twin in twins}
        if not any(chosen.values()):
            for number, twin in enumerate(twins, cable.network):
                chosen[twin.name] = self.count_address(number)
            return chosen

        every = chain.from_iterable(chosen.values())
        lasting = [address for address in every if not address.is_link_local]
        if not lasting:
            return chosen

        for name, addresses in chosen.items():
            is_random = all(address.is_link_local for address in addresses)
            if addresses and is_random:
                chosen[name] = (_following_address(lasting[0]),)
        return chosen

    def count_address(self, number: int) -> Addresses:
        """Return this node's address in the network with this number, counted from the base.

        Raises UsageError if the node has no number, or if the network lies above 255.255.255.255.
        """
        node = self.options.node
        if node is None:
            raise refusal("net-no-node", nodes=self.options.nodes)

        try:
            return (_count_address(self.base, number, node),)
        except ValueError:
            base = self.base.network_address
            raise refusal("net-no-room", network=base, number=number) from None

    def make_line(self, netdev: Netdev, addresses: Addresses, usual_mtu: int) -> Line:
        """Return the line of one interface, without its cage, twin and peer."""
        texts = self.written.addresses.get(netdev.name, ())
        is_ours = bool(addresses) and set(texts).issuperset(map(str, addresses))
        before = netdev.ipv4 or self.kept_addresses(netdev)
        written_mtu = self.written.mtu if is_ours else 0
        mtu_before = netdev.mtu
        if written_mtu and not netdev.ipv4:
            # An interface that is down does not have the MTU of patchkit's file yet.
            mtu_before = written_mtu
        mtu = mtu_before if addresses == before else usual_mtu
        mtu = self.options.mtu or written_mtu or mtu
        if not addresses:
            # patchkit's file has no interface without an address, so its MTU stays as well.
            mtu = mtu_before

        return Line(
            netdev=netdev.name,
            addresses=addresses,
            before=before,
            mtu=mtu,
            mtu_before=mtu_before,
            twin=0,
            ours=is_ours,
        )


def _count_address(base: IPv4Network, number: int, node: int) -> IPv4Interface:
    """Return a node's address in the network of this number from the base."""
    start = int(base.network_address) + number * base.num_addresses
    return IPv4Interface((start + _FIRST_HOST + node, base.prefixlen))


def _following_address(address: IPv4Interface) -> IPv4Interface:
    """Return the address with the same host number in the network that follows."""
    network = address.network
    number = int(address.ip) + network.num_addresses
    return IPv4Interface((number, network.prefixlen))


def remove_joined(host: Host, cages: Cages) -> Cages:
    """Return the cages without those that are parts of a bond, bridge or team."""
    return {number: twins for number, twins in cages.items() if not host.masters(twins)}


def _show_cages(cages: Cages) -> str:
    """Return ``cage 0: enp1s0f0np0, enP2p1s0f0np0; cage 1: …``."""
    shown = []
    for number, twins in cages.items():
        names = ", ".join(twin.name for twin in twins)
        shown.append(f"cage {number}: {names}")
    return "; ".join(shown)


def other_node_options(plan: NetPlan, options: NetPlanOptions) -> NetPlanOptions | None:
    """Return the options that plan the other end of this node's cable in the same networks.

    Return None if there is no single cable, or if no such options exist: the networks of the plan
    do not follow each other, or an address is link-local.
    """
    addresses = list(chain.from_iterable(line.addresses for line in plan.lines))
    if plan.topology != "cable" or not addresses:
        return None

    base = addresses[0].network
    node = 1 if plan.node == 2 else 2
    for number, address in enumerate(addresses):
        peer = _count_address(base, number, node)
        # A plan cannot name link-local addresses, which the peer draws at random; and in a small
        # network there may be no room for the peer's number.
        is_alike = peer.network == address.network and peer.ip != address.ip
        if address.is_link_local or not is_alike:
            return None
    return NetPlanOptions(node=node, network=base, mtu=options.mtu)
