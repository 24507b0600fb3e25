"""Say of a QSFP network that works what could be better, and what fails in the end.

Texts about what owners measured are data: ``[owners]`` of recipes/env/network.toml.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from ipaddress import IPv4Interface

from patchkit.errors import HostError
from patchkit.finding import Finding, Level
from patchkit.quoting import quoted
from patchkit.runtime.host.host import Host, Netdev
from patchkit.runtime.net.cages import Cages, cages, lasting
from patchkit.runtime.net.conflicts import without_ipv4
from patchkit.runtime.net.facts import facts
from patchkit.runtime.net.plan import Given, NetPlan, NetPlanOptions, again, make_plan


def said(
    level: Level, where: str, about: str, what: str, *, why: str = "", hint: str = ""
) -> Finding:
    """Return a finding at an interface, an address or a pair; ``about`` names what was checked.

    ``why`` may be a key of ``[owners]``.
    """
    why = facts()["owners"].get(why, why)
    return Finding(
        level=level, where=where, about=about, what=what, why=why, hint=hint, kind=HostError
    )


def plan_remarks(
    host: Host, plan: NetPlan, options: NetPlanOptions, given: Given
) -> Iterator[Finding]:
    """Yield what to know of a plan and of what it keeps, what may fail first."""
    kept = [line for line in plan.lines if line.action == "keep" and line.addresses]
    yield from shared_networks(host, [line.netdev for line in kept])
    pairs = _in_lines(host, plan)
    changed = {line.cage for line in plan.changes}
    for cage, pair in pairs.items():
        if cage not in changed:
            yield from link_local_pair(pair)
        for netdev in pair:
            others = [each for each in pair if lasting(each)]
            if others and netdev.ipv4 and not lasting(netdev):
                yield drawn_half(netdev, others[0])
    yield from _about_rings(host, plan, pairs)
    yield from _bare(host, plan, options, given)
    for line in kept:
        if line.mtu < facts()["plan"]["mtu"]:
            yield small_mtu(line.netdev, line.mtu)
    for cage, halves in plan.spare.items():
        yield spare_cage(cage, halves)
    for cage, halves in cages(host).items():
        if not {cage, None} & pairs.keys() and cage not in host.cabled:
            yield from left_over(cage, halves)


def shared_networks(host: Host, names: Iterable[str]) -> Iterator[Finding]:
    """Yield interfaces of the cable in whose network another interface of this host is."""
    ours = [n for n in host.netdevs if n.name in set(names)]
    for other in host.netdevs:
        if other in ours or other.kind == "loopback":
            continue
        for netdev, own, theirs in _overlaps(ours, other):
            what = f"{own} is in one network with {other.name} ({theirs})"
            # By default the cable keeps its address, but not where the other one is the way in.
            hint = quoted("sudo", "ip", "address", "del", str(own), "dev", netdev.name)
            yield said(
                Level.WARNING,
                netdev.name,
                "networks of its own",
                what,
                why="one_subnet",
                hint=f"take one of both out, and where it is configured: {hint}",
            )


def _overlaps(
    ours: Iterable[Netdev], other: Netdev
) -> Iterator[tuple[Netdev, IPv4Interface, IPv4Interface]]:
    for netdev in ours:
        for own in netdev.ipv4:
            for theirs in other.ipv4:
                # Link-local networks are one for everybody.
                if own.network.overlaps(theirs.network) and not own.is_link_local:
                    yield netdev, own, theirs


def link_local_pair(pair: Sequence[Netdev]) -> Iterator[Finding]:
    """Yield what to know of a cage that has link-local addresses alone.

    Nothing tells a drawn one from one that somebody set.
    """
    drawn = [each for each in pair if each.ipv4]
    if not drawn or any(lasting(each) for each in drawn):
        return
    seen = ", ".join(str(own) for each in drawn for own in each.ipv4)
    first, *others = (each.name for each in drawn)
    lasts = f"patchkit net plan --role head --network {facts()['plan']['network']}"
    hint = f"for addresses that stay: `{lasts}`, and the same as worker there"
    if others:
        hint = f"if {first}'s was set: `{without_ipv4(others[0])}`; {hint}"
    yield said(
        Level.WARNING if others else Level.NOTE,
        ", ".join((first, *others)),
        "IPv4",
        f"{seen}: link-local, drawn anew at any boot unless somebody set it",
        why="link_local" if others else "",
        hint=hint,
    )


def drawn_half(netdev: Netdev, other: Netdev) -> Finding:
    """Return the warning about a random address beside a static one."""
    return said(
        Level.WARNING,
        netdev.name,
        "IPv4",
        f"{netdev.ipv4[0]} is drawn at random, its other half {other.name} has {lasting(other)[0]}",
        why="mixed_twin",
        hint="on both nodes `patchkit net plan` gives it one that stays; or it goes without: "
        f"`{without_ipv4(netdev.name)}`",
    )


def bare_half(names: str, seen: str, *, static: bool) -> Finding:
    """Return the advice about a half without an address beside one that has one.

    ``static`` says that the other half's is not link-local.
    """
    network = facts()["plan"]["network"]
    both = "--twins" if static else f"--role head --network {network}"
    hint = f"to give it one, on both nodes or on none: `patchkit net plan {both}`"
    return said(Level.NOTE, names, "IPv4", seen, why="bare_twin", hint=hint)


def small_mtu(name: str, mtu: int) -> Finding:
    wanted = facts()["plan"]["mtu"]
    return said(
        Level.NOTE,
        name,
        "MTU",
        f"{mtu}; {wanted} brings 2 to 8 % with RoCE, and more with TCP",
        hint=f"on both ends and the switch: `patchkit net plan --mtu {wanted}`",
    )


def spare_cage(cage: int | None, halves: Iterable[Netdev]) -> Finding:
    """Return the remark on a cable that has no address while another one has."""
    return said(
        Level.WARNING,
        ", ".join(each.name for each in halves),
        f"cage {cage}",
        "cabled, but without an address; not used",
        why="a second cable to the same node brings nothing; one to a third node makes a ring",
        hint=f"if it leads to a third node: `{again(NetPlanOptions(node=1, nodes=3))}`",
    )


def left_over(cage: int | None, halves: Iterable[Netdev]) -> Iterator[Finding]:
    """Yield the remark on a cage without a cable that has an address all the same."""
    has = [f"{each.name} {own}" for each in halves for own in each.ipv4]
    if has:
        yield said(
            Level.NOTE,
            has[0].split()[0],
            f"cage {cage}",
            f"no cable, but an address: {', '.join(has)}; not used",
            hint="nothing to do, unless the cable should be there",
        )


def _in_lines(host: Host, plan: NetPlan) -> dict[int | None, tuple[Netdev, ...]]:
    found: dict[int | None, tuple[Netdev, ...]] = {}
    for line in plan.lines:
        if netdev := host.netdev(line.netdev):
            found[line.cage] = (*found.get(line.cage, ()), netdev)
    return found


def _bare(host: Host, plan: NetPlan, options: NetPlanOptions, given: Given) -> Iterator[Finding]:
    """Yield the advice about halves that stay without an address; ``--twins`` gives them one."""
    bare = {line.netdev: line for line in plan.lines if not line.addresses}
    lit = [name for name in bare if (netdev := host.netdev(name)) and netdev.carrier]
    if lit:
        more = make_plan(host, replace(options, twins=True), given=given)
        would = [str(a) for line in more.lines if line.netdev in lit for a in line.addresses]
        extra = f"; --twins would give {', '.join(would)}" if would else ""
        seen = "no IPv4, while the other half has one"
        yield bare_half(", ".join(lit), seen + extra, static=bool(would))
    for name in lit if options.mtu else ():
        if bare[name].mtu != options.mtu:
            set_it = quoted("sudo", "ip", "link", "set", name, "mtu", str(options.mtu))
            yield said(
                Level.WARNING,
                name,
                "MTU",
                f"stays at {bare[name].mtu}: without an address it is in no file of patchkit's",
                hint=f"until the next boot: `{set_it}`; or with --twins",
            )


def _about_rings(host: Host, plan: NetPlan, pairs: Cages) -> Iterator[Finding]:
    if plan.topology != "ring":
        yield from ring_if_any(host, pairs)
    elif plan.nodes > 3:
        four = facts()["owners"]["ring_of_four"]
        yield said(Level.WARNING, "this ring", "NCCL", four, hint="a switch, or a patched NCCL")
    else:
        yield said(Level.NOTE, "this ring", "cabling", facts()["owners"]["triangle"])


def ring_if_any(host: Host, pairs: Cages) -> Iterator[Finding]:
    """Yield what to know of rings where two cages are in use and both may be links of one.

    Not so where one of them is slower or in the network of another interface: that is a switch's.
    """
    used = [[n for n in twins if lasting(n) and n.carrier] for twins in pairs.values()]
    halves = [netdev for twins in used for netdev in twins]
    speeds = {netdev.speed for netdev in halves}
    if sum(map(bool, used)) < 2 or len(speeds) > 1:
        return
    if not any(shared_networks(host, [each.name for each in halves])):
        what = f"two cages are in use; if that is a ring: {facts()['owners']['triangle']}"
        yield said(Level.NOTE, "this node", "cabling", what, why="ring_of_four")
