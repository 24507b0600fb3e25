"""Check the QSFP network of a host from one end, and that of two hosts from both."""

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
    select_cages,
)
from patchkit.errors import HostError
from patchkit.finding import Finding, Level
from patchkit.quoting import quoted
from patchkit.runtime.host import advice
from patchkit.runtime.host.host import Host, Netdev
from patchkit.runtime.host.networks import overlaps
from patchkit.runtime.rules.releases import read_env_data

_NETWORK = read_env_data("network")
_TRIANGLE = _NETWORK["owners"]["triangle"]
_MTU = _NETWORK["plan"]["mtu"]
_JUMBO = f"{_MTU} brings 2 to 8 % with RoCE, and more with TCP"
_PLAN = NetPlanOptions(mtu=_MTU).command_line()


def net_finding(
    level: Level, where: str, about: str, what: str, hint: str = ""
) -> Finding:
    """Return a finding at an interface, an address or a pair; ``about`` names what was checked."""
    return Finding(
        level=level, where=where, about=about, what=what, hint=hint, kind=HostError
    )


check_fine = partial(net_finding, Level.OK)
check_noted = partial(net_finding, Level.NOTE)
check_warned = partial(net_finding, Level.WARNING)
check_unknown = partial(net_finding, Level.UNKNOWN)


def judge(
    fine: bool, where: str, check: str, what: str, about: str = "", **fields: Any
) -> Finding:
    """Return that a check of network.toml, called ``about``, passed, or what to do."""
    if fine:
        return check_fine(where, about or check, what)
    row = _NETWORK["checks"][check]
    hint = row["hint"].format_map(fields)
    return net_finding(
        Level(row.get("bad", "error")), where, about or check, what, hint
    )


def choose_checked_cages(host: Host, names: Sequence[str] = ()) -> Cages:
    """Return the cages to check: those asked for, else those cabled, else those with an address.

    Raises UsageError, HostError.
    """
    known = select_cages(host, names)
    addressed = {
        number: twins for number, twins in known.items() if any(t.ipv4 for t in twins)
    }
    return known if names else find_cages(host, cabled=True) or addressed or known


def plan_remarks(host: Host, plan: NetPlan) -> Iterator[Finding]:
    """Yield what to know of a plan and of what it keeps, what may fail first."""
    changed = {f"cage {line.cage}" for line in plan.changes}
    netdevs = [netdev for line in plan.lines if (netdev := host.netdev(line.netdev))]
    for remark in _machine_remarks(host, "plan", netdevs):
        # Of a cage that changes a remark is the reason, and the plan is what to do.
        yield replace(remark, hint="") if remark.where in changed else remark
    if plan.topology == "ring":
        yield check_noted("this ring", "cabling", _TRIANGLE)
    for line in plan.lines:
        if line.action == "keep" and line.addresses and line.mtu < _MTU:
            yield judge(
                False,
                line.netdev,
                "small MTU",
                f"{line.mtu}; {_JUMBO}",
                "MTU",
                plan=_PLAN,
            )


def host_checks(host: Host, chosen: Cages) -> Iterator[Finding]:
    """Yield what can be seen from one end."""
    used = [cage for cage, twins in chosen.items() if any(twin.ipv4 for twin in twins)]
    halves = [twin for twins in chosen.values() for twin in twins]
    yield from _machine_remarks(host, "verify", halves)
    for cage, twins in chosen.items():
        where = ", ".join(twin.name for twin in twins)
        if used and cage not in used:
            what = f"cabled, but without an address; not used: {_NETWORK['owners']['second']}"
            yield judge(False, where, "unused cage", what, about=f"cage {cage}")
            continue
        for netdev in twins:
            yield from _check_half(
                host, netdev, [twin for twin in twins if twin is not netdev]
            )
        networks = [address.network for twin in twins for address in twin.lasting]
        seen = ", ".join(map(str, networks))
        if len(twins) < 2 and cage is not None:
            yield judge(False, where, "both twins", f"cage {cage} has one half only")
        elif any(a.overlaps(b) for n, a in enumerate(networks) for b in networks[:n]):
            what = (
                f"{seen} overlap: Linux answers for both addresses on both interfaces"
            )
            last = twins[-1]
            remove = quoted(
                "sudo", "ip", "address", "del", str(last.lasting[0]), "dev", last.name
            )
            yield judge(False, where, "different networks", what, remove=remove)
        elif all(twin.lasting for twin in twins):
            yield check_fine(where, "different networks", seen)
    clashes = list(overlaps(host, [netdev.name for netdev in halves]))
    speeds = {twin.speed for cage in used for twin in chosen[cage] if twin.carrier}
    # A slower cage, or one in the network of another interface, is a switch's.
    if len(used) > 1 and len(speeds) == 1 and not clashes:
        what = f"two cages are in use; if that is a ring: {_TRIANGLE}"
        yield check_noted("this node", "cabling", what)
    for clash in clashes:
        name, address = clash.netdev.name, str(clash.address)
        what = f"{address} is in one network with {clash.other.name} ({clash.present})"
        remove = quoted("sudo", "ip", "address", "del", address, "dev", name)
        yield judge(False, name, "networks of its own", what, remove=remove)
    if any(netdev.ipv4 for netdev in halves) and not clashes:
        yield check_fine(
            "this host", "networks of its own", "no other interface is in them"
        )


def _machine_remarks(
    host: Host, verb: str, chosen: Iterable[Netdev]
) -> Iterator[Finding]:
    """Yield what hardware.toml says of the machine, and of the cages of some netdevs."""
    places = {"", *(f"cage {netdev.cage}" for netdev in chosen)}
    for remark in advice.find_remarks(host, verb):
        if remark.where in places:
            # What is a note to who looks at one node is a warning to who joins two.
            level = (
                Level.WARNING if remark.about == "link-local-twins" else remark.level
            )
            yield replace(remark, where=remark.where or "this node", level=level)


def _check_half(
    host: Host, netdev: Netdev, others: Sequence[Netdev]
) -> Iterator[Finding]:
    lit = [other for other in others if other.carrier]
    if lit and not netdev.carrier and not netdev.ipv4:
        return  # nobody uses it, or it would have an address; if that costs, a remark says so

    seen = f"{netdev.state}, {'a' if netdev.carrier else 'no'} carrier"
    up = quoted("sudo", "ip", "link", "set", netdev.name, "up")
    yield judge(netdev.up and netdev.carrier, netdev.name, "link", seen, up=up)
    yield _check_speed(netdev)
    yield _check_mtu(netdev, lit)

    # Of a half without an address beside one that has one, or in a bond, the remark tells.
    elsewhere = netdev.master or any(other.ipv4 or other.master for other in others)
    if netdev.ipv4 or not elsewhere:
        yield _check_address(netdev, others)
        yield _check_gid(host, netdev)
    yield _check_lanes(netdev)


def _check_speed(netdev: Netdev) -> Finding:
    """Check the speed: each twin shows that of the cage, although its PCIe half carries less."""
    if netdev.speed is None:
        command = quoted("ethtool", netdev.name)
        return check_unknown(netdev.name, "speed", "the driver does not say", command)
    right = _NETWORK["link"]["speed"]
    low, high = _NETWORK["link"]["twin_gbits"]
    seen = f"{netdev.speed} of {right} Mbit/s for the cage; {low} to {high} Gb/s a twin"
    return judge(netdev.speed == right, netdev.name, "speed", seen)


def _check_mtu(netdev: Netdev, lit: Sequence[Netdev]) -> Finding:
    """Check the MTU: any will do that both ends have; jumbo frames are better."""
    name = netdev.name
    larger = next((other for other in lit if other.mtu > netdev.mtu), None)
    if larger:
        seen = f"{netdev.mtu}, its other half {larger.name} has {larger.mtu}"
        return check_warned(
            name, "MTU", seen, NetPlanOptions(mtu=larger.mtu).command_line()
        )
    if netdev.mtu < _MTU:
        return judge(
            False, name, "small MTU", f"{netdev.mtu}; {_JUMBO}", "MTU", plan=_PLAN
        )
    return check_fine(name, "MTU", str(netdev.mtu))


def _check_address(netdev: Netdev, others: Sequence[Netdev]) -> Finding:
    """Check for an IPv4 address; of link-local ones on two halves the machine's remarks tell."""
    seen = ", ".join(map(str, netdev.ipv4))
    is_drawn = bool(seen) and not netdev.lasting
    if is_drawn and not any(other.ipv4 for other in others):
        seen += ": link-local, drawn anew at any boot unless somebody set it"
        return judge(False, netdev.name, "drawn", seen, about="IPv4")
    return judge(bool(seen), netdev.name, "IPv4", seen or "no address")


def _check_lanes(netdev: Netdev) -> Finding:
    if netdev.lanes is None:
        return check_unknown(
            netdev.name, "PCIe lanes", "sysfs does not say", "sudo lspci -vv"
        )
    needed = _NETWORK["link"]["lanes"]
    seen = f"x{netdev.lanes} of x{needed}"
    return judge(netdev.lanes >= needed, netdev.name, "PCIe lanes", seen)


def _check_gid(host: Host, netdev: Netdev) -> Finding:
    """Check for a RoCE v2 GID of the interface's IPv4 address."""
    name, about = netdev.name, "RoCE v2 GID"
    device = next((device for device in host.rdma if device.netdev == name), None)
    if device is None:
        return check_unknown(
            name, about, "no RDMA device here", "ls /sys/class/infiniband"
        )
    if not device.active:
        what = f"{device.name} is {device.state}"
        return net_finding(Level.ERROR, name, about, what, "the link, as above")
    own = {str(address.ip) for address in netdev.ipv4}
    found = [gid for gid in device.gids if gid.kind == "RoCE v2" and gid.address in own]
    seen = f"{device.name} has none for {', '.join(sorted(own)) or 'an address that is missing'}"
    if found:
        seen = f"{device.name} index {found[0].index} for {found[0].address}"
    return judge(bool(found), name, about, seen, netdev=name)


_Pair = tuple[Netdev, IPv4Network, tuple[Netdev, ...]]


def pair_checks(host: Host, chosen: Cages, peer: Host) -> Iterator[Finding]:
    """Yield how both ends compare: networks, MTU, addresses, twins, ports."""
    ends = _with_masters(host, chosen)
    peer_ends = find_cages(peer)
    pairs = list(_find_pairs(ends, peer))
    if not pairs:
        yield judge(False, "both ends", "networks", "there is no address to compare")

    twins = _name_twins(ends)
    peer_twins = _name_twins(peer_ends)
    for netdev, network, others in pairs:
        where = f"{netdev.name} {network}"
        seen = f"{', '.join(one.name for one in others) or 'no interface'} of the peer is in it"
        plan = NetPlanOptions(network=network).command_line()
        yield judge(len(others) == 1, where, "peer's end", seen, plan=plan)
        if len(others) == 1:
            yield from _compare_ends(netdev, others[0], where, twins, peer_twins)

    # A ring's cable leads from port 0 to port 1; a single one may lead anywhere.
    links = {
        (netdev.cage, other.cage) for netdev, _, others in pairs for other in others[:1]
    }
    if len(links) == 1 and _uses_several(ends) and _uses_several(peer_ends):
        ((port, other_port),) = links
        seen = f"port {port} here leads to port {other_port} there"
        yield judge(port != other_port, "both ends", "ports", seen, triangle=_TRIANGLE)

    halves = [twin for cage in ends.values() for twin in cage]
    twice = sorted(_addresses(halves) & _addresses(peer.netdevs))
    shown = ", ".join(map(str, twice)) or "none"
    yield judge(not twice, "both ends", "addresses", f"{shown} on both hosts")


def _with_masters(host: Host, chosen: Cages) -> Cages:
    """Return the cages with a bond in the place of its parts: the addresses are the bond's."""
    masters = host.masters(twin for twins in chosen.values() for twin in twins)
    if not masters:
        return chosen
    free = {
        number: twins for number, twins in chosen.items() if not host.masters(twins)
    }
    return {None: masters, **free}


def _name_twins(cages: Cages) -> dict[str, str]:
    """Return netdev → A or B, for the two halves of each cage."""
    pairs = (zip(twins, "AB", strict=False) for twins in cages.values())
    return {netdev.name: letter for pair in pairs for netdev, letter in pair}


def _compare_ends(
    netdev: Netdev,
    other: Netdev,
    where: str,
    twins: dict[str, str],
    peer_twins: dict[str, str],
) -> Iterator[Finding]:
    """Yield how two interfaces of one network compare."""
    seen = f"{netdev.mtu} here, {other.mtu} at the peer's {other.name}"
    yield judge(netdev.mtu == other.mtu, where, "equal MTU", seen)

    both = f"{netdev.name} and {other.name}"
    here = twins.get(netdev.name, "")
    there = peer_twins.get(other.name, "")
    if there:
        yield judge(here == there, both, "same twin", f"{here} here, {there} there")
    else:
        yield check_unknown(
            both, "same twin", "the peer's interface has no RDMA device"
        )


def _uses_several(cages: Cages) -> bool:
    """Return whether more than one cage has an address, as in a ring."""
    return sum(any(twin.ipv4 for twin in twins) for twins in cages.values()) > 1


def _addresses(netdevs: Iterable[Netdev]) -> set[IPv4Address]:
    return {address.ip for netdev in netdevs for address in netdev.ipv4}


def _find_pairs(chosen: Cages, peer: Host) -> Iterator[_Pair]:
    """Yield each own network with the peer's interfaces in it; a ring's other link is left out."""
    own = {netdev: {each.network for each in netdev.ipv4} for netdev in peer.netdevs}
    for twins in chosen.values():
        networks = [
            (netdev, each.network) for netdev in twins for each in netdev.lasting
        ]
        rows = [
            (its, net, tuple(n for n in own if net in own[n])) for its, net in networks
        ]
        if len(chosen) == 1 or any(others for _, _, others in rows):
            yield from rows


def verify_network(
    host: Host,
    chosen: Cages,
    peer: Host | None,
    addresses: Sequence[IPv4Address],
    *,
    live: bool,
) -> Iterator[Finding]:
    """Yield all checks. ``live``: the facts are this machine's, so its network can be tried.

    ``addresses`` are the peer's that the user named, beside those of its facts in our networks.
    """
    yield from host_checks(host, chosen)
    halves = [netdev for twins in chosen.values() for netdev in twins]
    if peer:
        yield from pair_checks(host, chosen, peer)
    halves += host.masters(halves)
    ours = [own.network for half in halves for own in half.ipv4]
    known = [
        address.ip
        for netdev in (peer.netdevs if peer else ())
        for address in netdev.lasting
        # The peer may have others, on its LAN for example.
        if any(address.ip in own for own in ours)
        and not host.has_address(str(address.ip))
    ]
    targets = [str(each) for each in dict.fromkeys((*addresses, *known))]
    for way in try_ways(targets) if live else ():
        yield from _check_way(host, halves, way)
    if not (live and targets):
        why = (
            "no peer's address is known"
            if live
            else "these facts are of another machine"
        )
        hint = (
            "--peer with the peer's address there, or all at once: --ssh"
            if live
            else ""
        )
        yield check_unknown(
            ", ".join(half.name for half in halves), "way to a peer", why, hint
        )


def _check_way(host: Host, halves: list[Netdev], way: Way) -> Iterator[Finding]:
    """Check the way to one address of a peer, with small packets and with frames of its MTU."""
    where = way.address
    if host.has_address(where):
        what = "is an address of this host"
        yield net_finding(Level.ERROR, where, "same network", what, "name the peer's")
        return
    peer = IPv4Address(where)
    netdev = next(
        (h for h in halves if any(peer in own.network for own in h.ipv4)), None
    )
    ours = ", ".join(str(own.network) for half in halves for own in half.ipv4)
    seen = f"that of {netdev.name}" if netdev else f"is in none of {ours or 'ours'}"
    yield judge(netdev is not None, where, "same network", seen, ours=ours or "none")
    untried = "the route is not known"
    if way.netdev:
        seen = f"through {way.netdev}" + (
            f", by way of {way.gateway}" if way.gateway else ""
        )
        right = netdev is not None and way.netdev == netdev.name and not way.gateway
        untried = (
            "" if right else "not tried: packets would not go through the QSFP port"
        )
        shown = (
            seen
            if right
            else f"{seen}, not {netdev.name if netdev else 'a QSFP interface'}"
        )
        yield judge(right, where, "route", shown)
    else:
        yield check_unknown(
            where, "route", f"ip: {way.said}", "sudo apt install iproute2"
        )
    frames = f"{way.mtu}-byte frames" if way.mtu else "jumbo frames"
    for check, about, outcome in (
        ("echo", "echo", way.plain),
        ("frames", frames, way.full),
    ):
        if untried or outcome == "unknown":
            ping = quoted(
                "sudo", "ping", "-M", "do", "-I", way.netdev or "DEVICE", where
            )
            hint = (
                "" if untried else f"{ping}; without it: sudo apt install iputils-ping"
            )
            yield check_unknown(where, about, untried or way.said, hint)
        else:
            seen = "came back" if outcome == "answers" else way.said or "no answer"
            fields = {"netdev": way.netdev, "mtu": way.mtu}
            yield judge(outcome == "answers", where, check, seen, about, **fields)
