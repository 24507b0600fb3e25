"""Check the QSFP network of one host, the way to a peer, and the networks of two hosts together.

Measure what each half of a cage carries from node to node, and judge it by owners' figures.
"""

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from ipaddress import IPv4Network
from itertools import chain, groupby

from patchkit.cluster.agent import bandwidth
from patchkit.cluster.agent.node_facts import HEADERS, Way, try_ways
from patchkit.cluster.net.addressing import (
    Cages,
    NetPlan,
    NetPlanOptions,
    find_cages,
    list_halves,
    remove_joined,
    select_cages,
)
from patchkit.cluster.ssh.node import Remote, require_all, run_on_all
from patchkit.cluster.ssh.ssh import HERE, make_finding, make_fine, ssh_command
from patchkit.errors import HostError, PatchkitError
from patchkit.finding import Finding, Findings, Level
from patchkit.frozen import Texts, positional
from patchkit.runtime.host import advice
from patchkit.runtime.host.host import Host, Netdev, in_reach, overlaps
from patchkit.runtime.rules.releases import read_env_data

_NETWORK = read_env_data("network")
_MTU = _NETWORK["plan"]["mtu"]
# Whether a check passed → the outcome's key in network.toml, and its level if that has none.
_OUTCOMES = {
    True: ("fine", Level.OK),
    False: ("failed", Level.ERROR),
    None: ("unknown", Level.UNKNOWN),
}
_PASSED = {"answers": True, "silent": False, "unknown": None}
"""The echo of a way → whether the check of it passed, None if it was not made."""


def judge_check(
    passed: bool | None,
    where: str,
    check: str,
    about: str = "",
    **fields: object,
) -> Finding:
    """Return the result of a check; ``passed`` is None for one that could not be made.

    ``where`` is an interface, an address or a pair. The row ``check`` of network.toml has the texts
    of each outcome, which are filled with the tables of that file and with ``fields``; the field
    ``command`` is made of the row's words ``run``, for the field ``node``. ``about`` is the name
    that is shown, by default ``check``.
    """
    name, level = _OUTCOMES[passed]
    row = _NETWORK["checks"][check]
    texts = {"hint": "", "level": level, **row, **row.get(name, {})}
    hint = texts["hint"]
    fields = {**_NETWORK, **fields}

    if "{command}" in hint:
        words = [word.format_map(fields) for word in row["run"]]
        fields["command"] = ssh_command(str(fields.get("node", HERE)), *words)
    return Finding(
        level=Level(texts["level"]),
        where=where,
        about=about or check,
        what=texts["what"].format_map(fields),
        hint=hint.format_map(fields),
        kind=HostError,
    )


def choose_checked_cages(host: Host, names: Sequence[str] = ()) -> Cages:
    """Return the cages to check.

    These are the named netdevs; without names the cages with a link, else those with an address,
    else all. Raises UsageError for a name that no netdev has, HostError for a host without cages.
    """
    selected = select_cages(host, names)
    if names:
        return selected

    return find_cages(host, cabled=True) or _find_used(selected) or selected


def _find_used(cages: Cages) -> Cages:
    """Return the cages with an IPv4 address on at least one half."""
    return {
        number: twins
        for number, twins in cages.items()
        if any(twin.ipv4 for twin in twins)
    }


def plan_remarks(host: Host, plan: NetPlan) -> Findings:
    """Yield remarks about a plan and the addresses that it keeps, possible failures first."""
    changed = {f"cage {line.cage}" for line in plan.changes}
    names = (line.netdev for line in plan.lines)
    netdevs = filter(None, map(host.netdev, names))

    for remark in _machine_remarks(host, "plan", netdevs):
        if remark.where in changed:
            # The plan mends what the remark is about, so there is nothing else to do.
            remark = replace(remark, hint="")
        yield remark

    if plan.topology == "ring":
        yield judge_check(False, "this ring", "cabling")

    for line in plan.lines:
        is_kept = line.action == "keep" and line.addresses
        if is_kept and line.mtu < _MTU:
            yield _judge_mtu(line.netdev, line.mtu)


def host_checks(
    host: Host,
    cages: Cages,
    node: str = HERE,
    names: Texts = (),
) -> Findings:
    """Yield the checks that need no peer: of cages, then of cables and networks.

    ``node`` is the name of the machine for ssh. ``names`` are interfaces that a cluster uses, in
    the cages or not, the one with the node's address first. Their cables may be yielded twice.
    """
    halves = list_halves(cages)
    used = _find_used(cages)

    for number, twins in cages.items():
        if number in used or not used:
            yield from _check_cage(host, number, twins, node)
        else:
            where = _join_names(twins)
            yield judge_check(False, where, "unused cage", f"cage {number}")

    cluster_netdevs = [netdev for netdev in map(host.netdev, names) if netdev]
    for netdev in cluster_netdevs:
        yield _check_cable(netdev, node)

    yield from _check_networks(host, halves, cluster_netdevs, node)


def _check_cable(netdev: Netdev, node: str) -> Finding:
    judge = make_fine if netdev.linked else make_finding
    return judge("cable", netdev.name, netdev=netdev, node=node)


def _check_networks(
    host: Host,
    halves: Sequence[Netdev],
    cluster_netdevs: Sequence[Netdev],
    node: str,
) -> Findings:
    """Check that no other interface, such as the other half of a cage, is in the same networks.

    Each pair of addresses is one finding. An interface of the cluster keeps its address, the first
    one before others.
    """
    clashes = [clash for half in halves for clash in overlaps(host, [half.name])]
    # A later row replaces that of the same pair, so the first netdev comes last. Each row names the
    # other interface, which is the one to change.
    for netdev in reversed(cluster_netdevs):
        others = {
            other.name
            for other in host.netdevs
            if other != netdev and other.kind != "loopback"
        }
        clashes += overlaps(host, others)

    pairs = {frozenset((row.address, row.present)): row for row in clashes}
    for clash in pairs.values():
        yield make_finding("networks", clash.netdev.name, clash=clash, node=node)

    netdevs = dict.fromkeys([*cluster_netdevs, *halves])
    names = _join_names(netdev for netdev in netdevs if netdev.ipv4)
    if names and not clashes:
        yield make_fine("networks", "this host", names=names)


def _machine_remarks(
    host: Host,
    verb: str,
    halves: Iterable[Netdev],
) -> Findings:
    """Yield the remarks of hardware.toml about the machine and about the cages of ``halves``."""
    cages = [netdev.cage for netdev in halves]
    for remark in advice.find_remarks(host, verb, cages):
        level = remark.level
        if remark.about == "link-local-twins":
            # Harmless on a single node; between two nodes both must have such addresses.
            level = Level.WARNING
        yield replace(remark, where=remark.where or "this node", level=level)


def _join_names(netdevs: Iterable[Netdev]) -> str:
    return ", ".join(netdev.name for netdev in netdevs)


def _check_cage(
    host: Host,
    number: int | None,
    twins: Sequence[Netdev],
    node: str,
) -> Findings:
    for netdev in twins:
        rest = [twin for twin in twins if twin is not netdev]
        yield from _check_half(host, netdev, rest, node)

    if len(twins) < 2 and number is not None:
        yield judge_check(False, _join_names(twins), "both twins", number=number)


def _check_half(
    host: Host,
    netdev: Netdev,
    twins: Sequence[Netdev],
    node: str,
) -> Findings:
    is_unused = not netdev.carrier and not netdev.ipv4
    if is_unused and any(twin.carrier for twin in twins):
        return  # a remark says so if that costs bandwidth

    yield _check_cable(netdev, node)
    yield _check_speed(netdev, node)
    yield _judge_mtu(netdev.name, netdev.mtu)

    # A half without an address has a remark if its twin has an address, or if it is in a bond.
    has_remark = netdev.master or any(twin.ipv4 or twin.master for twin in twins)
    if netdev.ipv4 or not has_remark:
        yield _check_address(netdev, twins)
        yield _check_gid(host, netdev)


def _check_speed(netdev: Netdev, node: str) -> Finding:
    """Check the speed in Mbit/s. Each twin shows that of its cage, although it can carry half."""
    is_right = None
    if netdev.speed is not None:
        is_right = netdev.speed == _NETWORK["link"]["speed"]
    return judge_check(is_right, netdev.name, "speed", netdev=netdev, node=node)


def _judge_mtu(name: str, mtu: int) -> Finding:
    """Note an MTU below that of jumbo frames: it works if both ends have the same."""
    return judge_check(mtu >= _MTU, name, "small MTU", "MTU", mtu=mtu)


def _check_address(netdev: Netdev, twins: Sequence[Netdev]) -> Finding:
    """Check for an IPv4 address that lasts. Link-local ones on both halves have a remark."""
    addresses = ", ".join(map(str, netdev.ipv4))
    check = "IPv4"
    passed = bool(addresses)
    if passed and not netdev.lasting and not any(twin.ipv4 for twin in twins):
        check = "drawn"
        passed = False
    return judge_check(passed, netdev.name, check, "IPv4", addresses=addresses)


def _check_gid(host: Host, netdev: Netdev) -> Finding:
    """Check that the RDMA device has a RoCE v2 GID for an IPv4 address of the interface."""
    name = netdev.name
    about = "RoCE v2 GID"
    device = host.rdma_of(name)
    if device is None:
        return judge_check(None, name, about)
    if not device.active:
        return judge_check(False, name, "RDMA device", about, device=device)

    gid = device.gid_of(netdev.ips)
    addresses = ", ".join(sorted(set(netdev.ips))) or "an address that is missing"
    return judge_check(
        bool(gid),
        name,
        about,
        netdev=netdev,
        device=device,
        gid=gid,
        addresses=addresses,
    )


@positional
class _SharedNetwork:
    """An interface, one of its networks, and the interfaces of the peer in that network."""

    netdev: Netdev
    network: IPv4Network
    peers: tuple[Netdev, ...]


def pair_checks(
    host: Host, cages: Cages, peer: Host, nodes: tuple[str, str]
) -> Findings:
    """Yield the checks that compare two hosts: networks, MTU, addresses, twins, ports.

    ``nodes`` are the names of both for ssh. A finding about one host has its name as ``where``.
    """
    ends = _with_masters(host, cages)
    peer_ends = find_cages(peer)
    shared = list(shared_networks(ends, peer))
    if not shared:
        yield judge_check(False, "both ends", "common networks")

    for pair in shared:
        where = f"{pair.netdev.name} {pair.network}"
        names = _join_names(pair.peers) or "no interface"
        is_one = len(pair.peers) == 1
        yield judge_check(
            is_one,
            where,
            "peer's end",
            names=names,
            plan=NetPlanOptions(network=pair.network).command_line(),
        )
        if is_one:
            yield compare_mtus(pair.netdev, pair.peers[0], nodes)
            yield _compare_twins(host, peer, pair)

    if len(_find_used(ends)) > 1 and len(_find_used(peer_ends)) > 1:
        yield from _check_ring(shared)

    ips = chain.from_iterable(half.ips for half in list_halves(ends))
    addresses = set(peer.addresses).intersection(ips)
    shown = ", ".join(sorted(addresses)) or "none"
    yield judge_check(not addresses, "both ends", "addresses", shown=shown)


def _check_ring(shared: Iterable[_SharedNetwork]) -> Findings:
    """Check that a cable of a ring leads from port 0 of one node to port 1 of the other.

    If the two nodes share networks over several cables, nothing is yielded.
    """
    links = {(pair.netdev.cage, pair.peers[0].cage) for pair in shared if pair.peers}
    if len(links) == 1:
        ((port, peer_port),) = links
        yield judge_check(
            port != peer_port,
            "both ends",
            "ports",
            port=port,
            peer_port=peer_port,
        )


def _with_masters(host: Host, cages: Cages) -> Cages:
    """Return the cages; a bond stands in place of its parts, since it has their addresses."""
    if masters := host.masters(list_halves(cages)):
        return {None: masters, **remove_joined(host, cages)}
    return cages


def _twin_letter(host: Host, netdev: Netdev) -> str:
    """Return A for the first half of a cage, B for the second, "" for another netdev."""
    twin = host.netdev(netdev.twin)
    if twin is None:
        return ""
    return "A" if netdev.pci < twin.pci else "B"


def compare_mtus(netdev: Netdev, peer: Netdev, nodes: tuple[str, str]) -> Finding:
    """Compare the MTUs of two ends; if they differ, ``where`` is the node whose MTU is to change.

    That is the one without the MTU of `net plan`; if neither has it, the smaller one.
    """
    ends = sorted(
        zip((netdev, peer), nodes, strict=True),
        key=lambda end: (end[0].mtu == _MTU, end[0].mtu),
    )
    (wrong, node), (right, other) = ends
    if wrong.mtu == right.mtu:
        return judge_check(True, netdev.name, "mtu", right=right)

    what = f"{wrong.name} has an MTU of {wrong.mtu}, and {other} one of {right.mtu}"
    words = ("sudo", "ip", "link", "set", wrong.name, "mtu", str(right.mtu))
    command = ssh_command(node, *words)
    return make_finding("mtu", node, what=what, command=command)


def _compare_twins(host: Host, peer: Host, pair: _SharedNetwork) -> Finding:
    """Check that a network has the same half of a cage at both ends."""
    netdev = pair.netdev
    end = pair.peers[0]
    names = f"{netdev.name} and {end.name}"
    twin = _twin_letter(host, netdev)
    peer_twin = _twin_letter(peer, end)
    is_same = None
    if twin and peer_twin:
        is_same = twin == peer_twin
    return judge_check(is_same, names, "same twin", twin=twin, peer_twin=peer_twin)


def shared_networks(ends: Cages, peer: Host) -> Iterator[_SharedNetwork]:
    """Yield each network of this host with the peer's interfaces in it.

    If there are several cages, one that shares no network with the peer is left out: in a ring it
    leads to another node.
    """
    for twins in ends.values():
        pairs = []
        for netdev in twins:
            for address in netdev.lasting:
                network = address.network
                peers = [other for other in peer.netdevs if network in other.networks]
                pairs.append(_SharedNetwork(netdev, network, tuple(peers)))
        if len(ends) == 1 or any(pair.peers for pair in pairs):
            yield from pairs


def verify_network(
    host: Host,
    cages: Cages,
    peer: tuple[str, Host] | None,
    addresses: Sequence[str],
    *,
    live: bool,
) -> Findings:
    """Yield all checks of `net verify`; ``peer`` is the name for ssh and the facts of a peer.

    ``live`` says that ``host`` is this machine, so that packets can be sent. ``addresses`` are the
    addresses of the peer that the user named; those in the facts of ``peer`` are tried as well.
    """
    halves = list_halves(cages)
    halves += host.masters(halves)

    yield from _machine_remarks(host, "verify", halves)
    yield from host_checks(host, cages)
    targets = dict.fromkeys(addresses)
    if peer:
        name, peer_host = peer
        yield from pair_checks(host, cages, peer_host, (HERE, name))
        targets |= dict.fromkeys(find_targets(host, halves, peer_host))
    if live and targets:
        for way in try_ways(list(targets)):
            yield from _check_way(halves, way)
        return

    check = "way to a peer" if live else "way from here"
    yield judge_check(None, _join_names(halves), check, "way to a peer")


def find_targets(host: Host, halves: Iterable[Netdev], peer: Host) -> Iterator[str]:
    """Yield the lasting addresses of the peer that are in a network of ``halves``."""
    for netdev in peer.netdevs:
        for interface in netdev.lasting:
            address = str(interface.ip)
            if netdevs_towards(halves, address) and not host.has_address(address):
                yield address


def way_checks(way: Way, netdev: str, peer: str, node: str = HERE) -> Findings:
    """Yield the checks of a way to ``peer``: ``route``, ``way`` (an echo), ``mtu`` (a full frame).

    Packets should go through ``netdev``, directly. A check is made only if the one before it
    passed: an echo that comes back by another way proves nothing. ``node`` is where the way begins.
    """
    is_direct = way.netdev == netdev and not way.gateway
    router = f", by way of {way.gateway}" if way.gateway else ""
    route = f"through {way.netdev}{router}, not through {netdev or 'a QSFP interface'}"
    passed = {
        "route": is_direct if way.netdev else None,
        "way": _PASSED[way.plain],
        "mtu": _PASSED[way.full],
    }
    lost = f"frames of {way.mtu} bytes do not arrive at {peer} ({way.address})"
    fields: dict[str, object] = {
        "node": node,
        "other": peer,
        "way": way,
        "route": route,
        "what": ": ".join(filter(None, (lost, way.said))),
        "payload": way.mtu - HEADERS,
    }

    obstacle = ""
    for about, is_fine in passed.items():
        if obstacle:
            yield judge_check(None, way.address, "moot", about, obstacle=obstacle)
        elif is_fine is None:
            obstacle = way.said or "no answer" if way.netdev else f"ip: {way.said}"
            yield judge_check(None, way.address, about, obstacle=obstacle, way=way)
        elif is_fine:
            yield make_fine(about, way.address, **fields)
        else:
            obstacle = _NETWORK["untried"].get(about, "").format(peer=peer)
            yield make_finding(about, way.address, **fields)


def netdevs_towards(netdevs: Iterable[Netdev], address: str) -> list[str]:
    """Return the names of the interfaces that reach an IPv4 address without a router."""
    return [netdev.name for netdev in netdevs if in_reach(netdev, address)]


def _check_way(halves: Sequence[Netdev], way: Way) -> Findings:
    """Check the way to one address of a peer: network, route, and echoes small and of full MTU."""
    where = way.address
    networks = [str(network) for half in halves for network in half.networks]
    ours = ", ".join(networks) or "none"
    name = next(iter(netdevs_towards(halves, where)), "")
    yield judge_check(bool(name), where, "same network", netdev=name, ours=ours)

    frames = f"{way.mtu}-byte frames" if way.mtu else "jumbo frames"
    abouts = {"route": "route", "way": "echo", "mtu": frames}
    for result in way_checks(way, name, where):
        yield replace(result, about=abouts[result.about])


_MEASURE = _NETWORK["measure"]
_SECONDS = _MEASURE["seconds"]
_MOST = 1e4  # Gb/s: no cable carries more

Node = tuple[Remote, Host]
Rate = tuple[Finding, float | None]
"""A finding and the Gb/s that were measured, None if nothing was."""


@positional
class HalfEnd:
    """One end of a half of a cable; ``device`` are ib_write_bw's words for it, () without RDMA."""

    remote: Remote
    netdev: Netdev
    address: str
    device: Texts


Half = tuple[HalfEnd, HalfEnd]  # the sender's, and the receiver's


def _find_end(node: Node, netdev: Netdev, network: IPv4Network) -> HalfEnd:
    remote, host = node
    address = next(str(it.ip) for it in netdev.ipv4 if it.network == network)
    device = host.rdma_of(netdev.name)
    gid = device and device.gid_of([address])
    words = ("-d", device.name, "-x", str(gid.index)) if device and gid else ()
    return HalfEnd(remote, netdev, address, words)


def measure_network(
    nodes: Sequence[Node],
    names: Texts,
    tell: Callable[[str], None],
) -> Iterator[Rate]:
    """Measure the cables from each node to the next one, and of a ring from the last to the first.

    Each half of each cage is measured alone, then both halves at once. ``names`` are interfaces of
    the senders, none for those of the cages with a link. ``tell`` gets a line before each
    measurement. What is wrong between two nodes is a finding, too.
    """
    remotes = [remote for remote, _host in nodes]
    tools = run_on_all(remotes, lambda node: node.call(bool, bandwidth.has_tool))
    by = bandwidth.TOOL if all(require_all(tools)) else "sockets"

    following = [*nodes[1:], nodes[0]] if len(nodes) > 2 else nodes[1:]
    for sender, receiver in zip(nodes, following, strict=False):
        if receiver[0].here:
            # What this process calls here runs only while it is asked for its next part.
            sender, receiver = receiver, sender

        remote, host = sender
        peer_remote, peer = receiver
        try:
            cages = choose_checked_cages(host, names)
        except PatchkitError as error:
            error.what = f"{remote.destination}: {error.what}"
            raise

        ends = (remote.destination, peer_remote.destination)
        for finding in pair_checks(host, cages, peer, ends):
            if finding.level is Level.ERROR:
                yield finding, None

        halves = [
            (
                _find_end(sender, pair.netdev, pair.network),
                _find_end(receiver, pair.peers[0], pair.network),
            )
            for pair in shared_networks(cages, peer)
            if len(pair.peers) == 1
        ]
        for _cage, group in groupby(halves, lambda half: half[0].netdev.cage):
            twins = list(group)
            rounds = [[half] for half in twins]
            if len(twins) > 1:
                rounds.append(twins)
            for chosen in rounds:
                yield _measure_halves(chosen, by, tell)


def _measure_halves(
    halves: Sequence[Half], by: str, tell: Callable[[str], None]
) -> Rate:
    """Measure one half, or several at the same time; return the sum."""
    if not all(end.device for end in chain.from_iterable(halves)):
        by = "sockets"

    sender, receiver = halves[0]
    part = "both halves" if len(halves) > 1 else sender.netdev.name
    where = f"{sender.remote.destination} to {receiver.remote.destination}, {part}"
    tell(f"{where}: {_SECONDS} s by {by}")

    rates = run_on_all(halves, lambda half: _measure_half(half, by))
    try:
        gbits = sum(require_all(rates))
    except PatchkitError as error:
        return make_finding("bandwidth-unknown", where, error=error), None
    return judge_rate(gbits, len(halves), by, where), gbits


def judge_rate(gbits: float, halves: int, by: str, where: str) -> Finding:
    """Return the finding about a rate: the first class of network.toml that it is in."""
    place = min(halves, 2) - 1
    about = next(
        row["id"]
        for row in _MEASURE["class"]
        if row["by"] == by and gbits < row["below"][place]
    )
    expected = _MEASURE["expected"][place]
    fields = {"gbits": gbits, "by": by, "expected": expected}
    return make_finding(about, where, **fields)


def _measure_half(half: Half, by: str) -> float:
    """Return the Gb/s of one half. Raises HostError if a node cannot, or answers nonsense."""
    sender, receiver = half
    token = secrets.token_hex(16)
    devices = [end.device if by == bandwidth.TOOL else () for end in half]

    with receiver.remote.opened(
        int,
        bandwidth.receive,
        address=receiver.address,
        token=token,
        seconds=_SECONDS,
        device=devices[1],
    ) as port:
        gbits = sender.remote.call(
            float,
            bandwidth.transmit,
            address=receiver.address,
            port=port,
            netdev=sender.netdev.name,
            token=token,
            seconds=_SECONDS,
            device=devices[0],
        )

    if not 0 <= gbits <= _MOST:
        raise HostError(f"{sender.remote.destination}: {gbits:.3g} Gb/s is impossible")
    return gbits
