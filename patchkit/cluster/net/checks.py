"""Check the QSFP network of one host, the way to a peer, and the networks of two hosts together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from ipaddress import IPv4Address, IPv4Network
from typing import Any

from patchkit.cluster.agent.links import Way, try_ways
from patchkit.cluster.net.addressing import (
    Cages,
    NetPlan,
    NetPlanOptions,
    find_cages,
    list_halves,
    remove_joined,
    select_cages,
)
from patchkit.errors import HostError
from patchkit.finding import Finding, Findings, Level
from patchkit.frozen import positional
from patchkit.quoting import quoted
from patchkit.runtime.host import advice
from patchkit.runtime.host.host import Host, Netdev, overlaps
from patchkit.runtime.rules.releases import read_env_data

_NETWORK = read_env_data("network")
_TRIANGLE = _NETWORK["owners"]["triangle"]
_MTU = _NETWORK["plan"]["mtu"]
_JUMBO = f"{_MTU} brings 2 to 8 % with RoCE, and more with TCP"
_PLAN = NetPlanOptions(mtu=_MTU).command_line()


def net_finding(
    level: Level,
    where: str,
    about: str,
    what: str,
    hint: str = "",
) -> Finding:
    """Return a finding; ``where`` is an interface, an address or a pair, ``about`` the check."""
    return Finding(
        level=level,
        where=where,
        about=about,
        what=what,
        hint=hint,
        kind=HostError,
    )


check_fine = partial(net_finding, Level.OK)
check_unknown = partial(net_finding, Level.UNKNOWN)


def judge_check(
    passed: bool,
    where: str,
    check: str,
    what: str,
    about: str = "",
    **fields: Any,
) -> Finding:
    """Return the result of a check.

    ``what`` says what was seen. A check that failed has the hint, and the level (by default error),
    of the row ``check`` in network.toml; ``fields`` are filled into the hint. ``about`` is the name
    that is shown, by default ``check``.
    """
    about = about or check
    if passed:
        return check_fine(where, about, what)

    row = _NETWORK["checks"][check]
    hint = row["hint"].format_map(fields)
    level = Level(row.get("bad", "error"))
    return net_finding(level, where, about, what, hint)


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
    names = {line.netdev for line in plan.lines}
    netdevs = [netdev for netdev in host.netdevs if netdev.name in names]

    for remark in _machine_remarks(host, "plan", netdevs):
        if remark.where in changed:
            # The plan mends what the remark is about, so there is nothing else to do.
            remark = replace(remark, hint="")
        yield remark

    if plan.topology == "ring":
        yield net_finding(Level.NOTE, "this ring", "cabling", _TRIANGLE)

    for line in plan.lines:
        is_kept = line.action == "keep" and line.addresses
        if is_kept and line.mtu < _MTU:
            yield _note_small_mtu(line.netdev, line.mtu)


def _note_small_mtu(name: str, mtu: int) -> Finding:
    return judge_check(False, name, "small MTU", f"{mtu}; {_JUMBO}", "MTU", plan=_PLAN)


def host_checks(host: Host, cages: Cages) -> Findings:
    """Yield the checks that need no peer, and the remarks about the machine and its cages."""
    halves = list_halves(cages)
    used = _find_used(cages)

    yield from _machine_remarks(host, "verify", halves)
    for number, twins in cages.items():
        if number in used or not used:
            yield from _check_cage(host, number, twins)
        else:
            second = _NETWORK["owners"]["second"]
            state = f"cabled, but without an address; not used: {second}"
            where = _join_names(twins)
            yield judge_check(False, where, "unused cage", state, f"cage {number}")

    # Each half alone: the other half of its cage counts as another interface.
    clashes = [clash for half in halves for clash in overlaps(host, [half.name])]
    for clash in clashes:
        name = clash.netdev.name
        holder = f"{clash.other.name} ({clash.present})"
        yield judge_check(
            False,
            name,
            "networks of its own",
            f"{clash.address} is in one network with {holder}",
            remove=quoted(
                "sudo", "ip", "address", "del", str(clash.address), "dev", name
            ),
        )

    if used and not clashes:
        state = "no other interface is in them"
        yield check_fine("this host", "networks of its own", state)


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
) -> Findings:
    for netdev in twins:
        rest = [twin for twin in twins if twin is not netdev]
        yield from _check_half(host, netdev, rest)

    if len(twins) < 2 and number is not None:
        state = f"cage {number} has one half only"
        yield judge_check(False, _join_names(twins), "both twins", state)


def _check_half(
    host: Host,
    netdev: Netdev,
    twins: Sequence[Netdev],
) -> Findings:
    is_unused = not netdev.carrier and not netdev.ipv4
    if is_unused and any(twin.carrier for twin in twins):
        return  # a remark says so if that costs bandwidth

    yield _check_link(netdev)
    yield _check_speed(netdev)
    yield _check_mtu(netdev)

    # A half without an address has a remark if its twin has an address, or if it is in a bond.
    has_remark = netdev.master or any(twin.ipv4 or twin.master for twin in twins)
    if netdev.ipv4 or not has_remark:
        yield _check_address(netdev, twins)
        yield _check_gid(host, netdev)


def _check_link(netdev: Netdev) -> Finding:
    carrier = "a" if netdev.carrier else "no"
    return judge_check(
        netdev.up and netdev.carrier,
        netdev.name,
        "link",
        f"{netdev.state}, {carrier} carrier",
        up=quoted("sudo", "ip", "link", "set", netdev.name, "up"),
    )


def _check_speed(netdev: Netdev) -> Finding:
    """Check the speed in Mbit/s. Each twin shows that of its cage, although it can carry half."""
    if netdev.speed is None:
        command = quoted("ethtool", netdev.name)
        return check_unknown(netdev.name, "speed", "the driver does not say", command)

    right = _NETWORK["link"]["speed"]
    low, high = _NETWORK["link"]["twin_gbits"]
    state = (
        f"{netdev.speed} of {right} Mbit/s for the cage; {low} to {high} Gb/s a twin"
    )
    return judge_check(netdev.speed == right, netdev.name, "speed", state)


def _check_mtu(netdev: Netdev) -> Finding:
    """Note an MTU below that of jumbo frames: it works if both ends have the same."""
    if netdev.mtu < _MTU:
        return _note_small_mtu(netdev.name, netdev.mtu)
    return check_fine(netdev.name, "MTU", str(netdev.mtu))


def _check_address(netdev: Netdev, twins: Sequence[Netdev]) -> Finding:
    """Check for an IPv4 address that lasts. Link-local ones on both halves have a remark."""
    state = ", ".join(map(str, netdev.ipv4))
    is_drawn = bool(state) and not netdev.lasting
    if is_drawn and not any(twin.ipv4 for twin in twins):
        state += ": link-local, drawn anew at any boot unless somebody set it"
        return judge_check(False, netdev.name, "drawn", state, about="IPv4")
    return judge_check(bool(state), netdev.name, "IPv4", state or "no address")


def _check_gid(host: Host, netdev: Netdev) -> Finding:
    """Check that the RDMA device has a RoCE v2 GID for an IPv4 address of the interface."""
    name = netdev.name
    about = "RoCE v2 GID"
    devices = (device for device in host.rdma if device.netdev == name)
    device = next(devices, None)
    if device is None:
        look = "ls /sys/class/infiniband"
        return check_unknown(name, about, "no RDMA device here", look)
    if not device.active:
        state = f"{device.name} is {device.state}"
        return net_finding(Level.ERROR, name, about, state, "the link, as above")

    for gid in device.gids:
        if gid.kind == "RoCE v2" and gid.address in netdev.ips:
            state = f"{device.name} index {gid.index} for {gid.address}"
            return check_fine(name, about, state)

    addresses = ", ".join(sorted(set(netdev.ips))) or "an address that is missing"
    state = f"{device.name} has none for {addresses}"
    return judge_check(False, name, about, state, netdev=name)


@positional
class _SharedNetwork:
    """An interface, one of its networks, and the interfaces of the peer in that network."""

    netdev: Netdev
    network: IPv4Network
    peers: tuple[Netdev, ...]


def pair_checks(host: Host, cages: Cages, peer: Host) -> Findings:
    """Yield the checks that compare two hosts: networks, MTU, addresses, twins, ports."""
    ends = _with_masters(host, cages)
    peer_ends = find_cages(peer)
    shared = list(_find_shared_networks(ends, peer))
    if not shared:
        state = "there is no address to compare"
        yield judge_check(False, "both ends", "networks", state)

    for pair in shared:
        where = f"{pair.netdev.name} {pair.network}"
        names = _join_names(pair.peers) or "no interface"
        is_one = len(pair.peers) == 1
        yield judge_check(
            is_one,
            where,
            "peer's end",
            f"{names} of the peer is in it",
            plan=NetPlanOptions(network=pair.network).command_line(),
        )
        if is_one:
            yield from _compare_ends(host, peer, pair, where)

    if len(_find_used(ends)) > 1 and len(_find_used(peer_ends)) > 1:
        yield from _check_ring(shared)

    addresses = _list_ips(list_halves(ends)) & _list_ips(peer.netdevs)
    shown = ", ".join(map(str, sorted(addresses))) or "none"
    state = f"{shown} on both hosts"
    yield judge_check(not addresses, "both ends", "addresses", state)


def _list_ips(netdevs: Iterable[Netdev]) -> set[IPv4Address]:
    return {address.ip for netdev in netdevs for address in netdev.ipv4}


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
            f"port {port} here leads to port {peer_port} there",
            triangle=_TRIANGLE,
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


def _compare_ends(
    host: Host,
    peer: Host,
    pair: _SharedNetwork,
    where: str,
) -> Findings:
    """Yield the checks that compare the interfaces of two hosts in one network."""
    netdev = pair.netdev
    end = pair.peers[0]
    state = f"{netdev.mtu} here, {end.mtu} at the peer's {end.name}"
    yield judge_check(netdev.mtu == end.mtu, where, "equal MTU", state)

    names = f"{netdev.name} and {end.name}"
    twin = _twin_letter(host, netdev)
    peer_twin = _twin_letter(peer, end)
    if peer_twin:
        state = f"{twin} here, {peer_twin} there"
        yield judge_check(twin == peer_twin, names, "same twin", state)
    else:
        state = "the peer's interface has no RDMA device"
        yield check_unknown(names, "same twin", state)


def _find_shared_networks(ends: Cages, peer: Host) -> Iterator[_SharedNetwork]:
    """Yield each network of this host with the peer's interfaces in it.

    If there are several cages, one that shares no network with the peer is left out: in a ring it
    leads to another node.
    """
    for twins in ends.values():
        pairs = []
        for netdev in twins:
            for network in (address.network for address in netdev.lasting):
                peers = [other for other in peer.netdevs if network in other.networks]
                pairs.append(_SharedNetwork(netdev, network, tuple(peers)))
        if len(ends) == 1 or any(pair.peers for pair in pairs):
            yield from pairs


def verify_network(
    host: Host,
    cages: Cages,
    peer: Host | None,
    addresses: Sequence[str],
    *,
    live: bool,
) -> Findings:
    """Yield all checks of `net verify`.

    ``live`` says that ``host`` is this machine, so that packets can be sent. ``addresses`` are the
    addresses of the peer that the user named; those in the facts of ``peer`` are tried as well.
    """
    halves = list_halves(cages)
    halves += host.masters(halves)

    yield from host_checks(host, cages)
    targets = dict.fromkeys(addresses)
    if peer:
        yield from pair_checks(host, cages, peer)
        targets |= dict.fromkeys(_find_targets(host, halves, peer))
    if live and targets:
        for way in try_ways(list(targets)):
            yield from _check_way(halves, way)
        return

    state = "these facts are of another machine"
    hint = ""
    if live:
        state = "no peer's address is known"
        hint = "--peer with the peer's address there, or all at once: --ssh"
    yield check_unknown(_join_names(halves), "way to a peer", state, hint)


def _find_targets(host: Host, halves: Iterable[Netdev], peer: Host) -> Iterator[str]:
    """Yield the addresses of the peer that are in a network of ``halves``."""
    networks = [network for half in halves for network in half.networks]
    for netdev in peer.netdevs:
        for address in netdev.lasting:
            is_near = any(address.ip in network for network in networks)
            if is_near and not host.has_address(str(address.ip)):
                yield str(address.ip)


def _check_way(halves: Sequence[Netdev], way: Way) -> Findings:
    """Check the way to one address of a peer: network, route, and echoes small and of full MTU."""
    where = way.address
    pairs = [(half.name, network) for half in halves for network in half.networks]
    ours = ", ".join(str(network) for _name, network in pairs)
    names = (name for name, network in pairs if IPv4Address(where) in network)
    name = next(names, "")
    state = f"that of {name}" if name else f"is in none of {ours or 'ours'}"
    yield judge_check(bool(name), where, "same network", state, ours=ours or "none")

    route = _check_route(way, name)
    yield route
    untried = _UNTRIED.get(route.level, "")
    frames = f"{way.mtu}-byte frames" if way.mtu else "jumbo frames"
    yield _check_echo(way, "echo", "echo", way.plain, untried)
    yield _check_echo(way, "frames", frames, way.full, untried)


# The level of the check of a route → the reason for which no echo is tried.
_UNTRIED = {
    Level.UNKNOWN: "the route is not known",
    Level.ERROR: "not tried: packets would not go through the QSFP port",
}


def _check_route(way: Way, name: str) -> Finding:
    """Check that packets go through the interface ``name`` without a router.

    ``name`` is "" if no QSFP interface is in the peer's network: the check then fails.
    """
    if not way.netdev:
        state = f"ip: {way.said}"
        return check_unknown(way.address, "route", state, "sudo apt install iproute2")

    is_right = way.netdev == name and not way.gateway
    state = f"through {way.netdev}"
    if way.gateway:
        state += f", by way of {way.gateway}"

    if not is_right:
        state += f", not {name or 'a QSFP interface'}"
    return judge_check(is_right, way.address, "route", state)


def _check_echo(
    way: Way,
    check: str,
    about: str,
    outcome: str,
    untried: str,
) -> Finding:
    if untried:
        return check_unknown(way.address, about, untried)

    if outcome == "unknown":
        ping = quoted("sudo", "ping", "-M", "do", "-I", way.netdev, way.address)
        hint = f"{ping}; without it: sudo apt install iputils-ping"
        return check_unknown(way.address, about, way.said, hint)

    state = way.said or "no answer"
    if outcome == "answers":
        state = "came back"
    return judge_check(
        outcome == "answers",
        way.address,
        check,
        state,
        about,
        netdev=way.netdev,
        mtu=way.mtu,
    )
