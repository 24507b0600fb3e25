"""Hold what a plan of the QSFP network asks for and says: options, lines, commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Interface, IPv4Network

from patchkit.cluster.net.cages import Cages
from patchkit.quoting import quoted
from patchkit.runtime.host.network_facts import facts

TOPOLOGIES = ("auto", "cable", "ring", "switch")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetPlanOptions:
    """The options of a plan; None is for what was not asked for. ``node`` counts from 1.

    ``netdevs`` replaces the detection of cages. ``peers`` are addresses of the other end, with its
    prefix (/32 where the user gave none); ``twins`` asks for an address on every half.
    """

    node: int | None = None
    nodes: int = 2
    mtu: int | None = None
    network: IPv4Network | None = None
    topology: str = "auto"
    cage: int | None = None
    port0_to: int | None = None
    netdevs: tuple[str, ...] = ()
    peers: tuple[IPv4Interface, ...] = ()
    twins: bool = False

    @property
    def base(self) -> IPv4Network:
        return self.network or IPv4Network(facts()["plan"]["network"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What patchkit gave before: netdev → ``address/prefix``, at last and ever.

    ``node`` and ``mtu`` are those of the last plan, 0 if they are not known.
    """

    last: Mapping[str, Sequence[str]] = field(default_factory=dict)
    ever: Mapping[str, Sequence[str]] = field(default_factory=dict)
    node: int = 0
    mtu: int = 0

    def is_all(self, netdev: str, addresses: Sequence[IPv4Interface]) -> bool:
        """Return whether all of an interface's addresses are from patchkit."""
        return all(str(each) in self.ever.get(netdev, ()) for each in addresses)


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
    def written(self) -> bool:
        """Return whether patchkit's file has it: who set what is kept stays in charge of it."""
        return self.action != "keep" or self.ours


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
        return tuple(line for line in self.lines if line.written)

    @property
    def changes(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.action != "keep")


def command(verb: str, options: NetPlanOptions) -> list[str]:
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
    words: list[object] = []
    for name, value in asked.items():
        words += [] if value is None else [name, value]
    words += [word for name in options.netdevs for word in ("--netdev", name)]
    words += [word for peer in options.peers for word in ("--peer", peer)]
    words += ["--twins"] if options.twins else []
    return ["net", verb, *map(str, words)]


def again(options: NetPlanOptions) -> str:
    """Return the command line that plans with these options."""
    return quoted("patchkit", *command("plan", options))
