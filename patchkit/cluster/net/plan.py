"""Hold what a plan of the QSFP network asks for and says: options, lines, commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Interface, IPv4Network

from patchkit.cluster.net.cages import Cages
from patchkit.quoting import quoted
from patchkit.runtime.host.hardware import network_facts

TOPOLOGIES = ("auto", "cable", "ring", "switch")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetPlanOptions:
    """The options of a plan; None is for what was not asked for. ``node`` counts from 1.

    ``netdevs`` replaces the detection of cages; ``twins`` asks for an address on every half.
    """

    node: int | None = None
    nodes: int = 2
    mtu: int | None = None
    network: IPv4Network | None = None
    topology: str = "auto"
    cage: int | None = None
    port0_to: int | None = None
    netdevs: tuple[str, ...] = ()
    twins: bool = False

    @property
    def base(self) -> IPv4Network:
        return self.network or IPv4Network(network_facts()["plan"]["network"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Hold what the last plan gave: netdev → ``address/prefix``; node and MTU, 0 if not known."""

    addresses: Mapping[str, Sequence[str]] = field(default_factory=dict)
    node: int = 0
    mtu: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One interface: its addresses and MTU before and after.

    ``cage`` is None where the user named netdevs; ``peer`` None where it is unknown, or a switch.
    ``ours`` says that patchkit's file has it already.
    """

    netdev: str
    addresses: tuple[IPv4Interface, ...]
    before: tuple[IPv4Interface, ...]
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
        return "by name" if self.cage is None else f"cage {self.cage}, twin {'AB'[self.twin]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetPlan:
    """The interfaces of one node. ``spare`` are cabled cages that the plan leaves alone."""

    node: int | None
    nodes: int
    topology: str
    lines: tuple[Line, ...]
    spare: Cages = field(default_factory=dict)

    @property
    def written(self) -> tuple[Line, ...]:
        """Return what patchkit's file has: who set what is kept stays in charge of it."""
        return tuple(line for line in self.lines if line.action != "keep" or line.ours)

    @property
    def changes(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.action != "keep")


def net_command(verb: str, options: NetPlanOptions) -> list[str]:
    """Return what patchkit is asked for a plan with these options: ``net``, the verb, and so on."""
    asked: dict[str, object] = {
        "--node": options.node,
        "--nodes": options.nodes if options.nodes != 2 else None,
        "--topology": options.topology if options.topology != "auto" else None,
        "--network": options.network,
        "--cage": options.cage,
        "--port0-to": options.port0_to,
        "--mtu": options.mtu,
    }
    words = [str(w) for name, value in asked.items() if value is not None for w in (name, value)]
    words += [word for name in options.netdevs for word in ("--netdev", name)]
    words += ["--twins"] if options.twins else []
    return ["net", verb, *words]


def plan_command_line(options: NetPlanOptions) -> str:
    """Return the command line that plans with these options."""
    return quoted("patchkit", *net_command("plan", options))


def other_node_options(plan: NetPlan, options: NetPlanOptions) -> NetPlanOptions | None:
    """Return how to plan the other end of one cable in this node's networks; None if unknown."""
    own = [address for line in plan.lines for address in line.addresses]
    if plan.nodes != 2 or plan.topology != "cable" or not own:
        return None
    if any(address.is_link_local or address.network.prefixlen > 29 for address in own):
        return None  # the other end draws its own, or there is no room to count in
    there = NetPlanOptions(
        node=1 if (plan.node or 1) > 1 else 2, network=own[0].network, mtu=options.mtu
    )
    first = network_facts()["plan"]["first_host"]
    for number, address in enumerate(own):
        network = address.network
        start = int(own[0].network.network_address) + number * own[0].network.num_addresses
        host = int(address.ip) - int(network.network_address)
        if int(network.network_address) != start or host == first + (there.node or 0):
            return None
    return there
