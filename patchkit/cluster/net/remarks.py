"""Say of a QSFP network that works what could be better, and what fails in the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from patchkit.cluster.net.cages import Cages, cages
from patchkit.cluster.net.plan import NetPlan, NetPlanOptions, again
from patchkit.errors import HostError
from patchkit.finding import Finding, Level
from patchkit.quoting import quoted
from patchkit.runtime.host import advice
from patchkit.runtime.host.host import Host, Netdev
from patchkit.runtime.host.network_facts import facts
from patchkit.runtime.host.networks import overlaps

# What is a note to who looks at one node is a warning to who joins two.
_LEVELS = {"link-local-twins": Level.WARNING}


def said(
    level: Level, where: str, about: str, what: str, *, why: str = "", hint: str = ""
) -> Finding:
    """Return a finding at an interface, an address or a pair; ``about`` names what was checked."""
    return Finding(
        level=level, where=where, about=about, what=what, why=why, hint=hint, kind=HostError
    )


def machine_remarks(host: Host, verb: str, chosen: Iterable[Netdev]) -> Iterator[Finding]:
    """Yield what ``verify`` or ``plan`` says of the machine, and of the cages of some netdevs.

    Texts and sources are those of hardware.toml.
    """
    about = {"", *(advice.cage_name(each.cage) for each in chosen)}
    for each in advice.remarks(host, verb):
        if each.where in about:
            level = _LEVELS.get(each.about, each.level)
            yield replace(each, where=each.where or "this node", level=level)


def plan_remarks(host: Host, plan: NetPlan, options: NetPlanOptions) -> Iterator[Finding]:
    """Yield what to know of a plan and of what it keeps, what may fail first."""
    pairs = _in_lines(host, plan)
    changed = {advice.cage_name(line.cage) for line in plan.changes}
    planned = [netdev for pair in pairs.values() for netdev in pair]
    for each in machine_remarks(host, "plan", planned):
        # Of a cage that changes a remark is the reason, and the plan is what to do.
        yield replace(each, hint="") if each.where in changed else each
    yield from _about_rings(host, plan, pairs)
    for line in plan.lines:
        if line.action == "keep" and line.addresses and line.mtu < facts()["plan"]["mtu"]:
            yield small_mtu(line.netdev, line.mtu)
        if options.mtu not in (None, line.mtu) and not line.addresses:
            yield _mtu_by_hand(line.netdev, line.mtu, options.mtu or 0)
    if plan.node and not (options.peers or options.network) and _is_new(plan):
        yield _other_end(plan)
    for cage, halves in plan.spare.items():
        yield spare_cage(cage, halves)
    for cage, halves in cages(host).items():
        if not {cage, None} & pairs.keys() and cage not in host.cabled:
            yield from left_over(cage, halves)


def _is_new(plan: NetPlan) -> bool:
    """Return whether all addresses are counted by node: then the other end has to count alike."""
    return all(line.action in ("add", "replace") for line in plan.lines)


def _other_end(plan: NetPlan) -> Finding:
    return said(
        Level.NOTE,
        "the other node" if plan.nodes == 2 else "the other nodes",
        "IPv4",
        "is planned alike, and has no other addresses yet",
        hint="if it has: `patchkit net plan` there prints, with its --role, what to run here",
    )


def small_mtu(name: str, mtu: int) -> Finding:
    wanted = facts()["plan"]["mtu"]
    return said(
        Level.NOTE,
        name,
        "MTU",
        f"{mtu}; {wanted} brings 2 to 8 % with RoCE, and more with TCP",
        hint="on both ends and the switch: "
        + quoted("patchkit", "net", "plan", "--mtu", str(wanted)),
    )


def _mtu_by_hand(name: str, mtu: int, wanted: int) -> Finding:
    command = quoted("sudo", "ip", "link", "set", name, "mtu", str(wanted))
    return said(
        Level.WARNING,
        name,
        "MTU",
        f"stays at {mtu}: without an address it is in no file of patchkit's",
        hint=f"until the next boot: {command}; or with --twins",
    )


def spare_cage(cage: int | None, halves: Iterable[Netdev]) -> Finding:
    """Return the remark on a cable that has no address while another one has."""
    return said(
        Level.WARNING,
        ", ".join(each.name for each in halves),
        f"cage {cage}",
        "cabled, but without an address; not used",
        why="a second cable to the same node brings nothing; one to a third node makes a ring",
        hint=f"if it leads to a third node: {again(NetPlanOptions(node=1, nodes=3))}",
    )


def left_over(cage: int | None, halves: Iterable[Netdev]) -> Iterator[Finding]:
    """Yield the remark on a cage without a cable that has an address all the same."""
    has = [f"{each.name} {own}" for each in halves for own in each.ipv4]
    if has:
        yield said(
            Level.NOTE,
            f"cage {cage}",
            "IPv4",
            f"no cable, but an address: {', '.join(has)}; not used",
            hint="nothing to do, unless the cable should be there",
        )


def ring_if_any(host: Host, pairs: Cages) -> Iterator[Finding]:
    """Yield what to know of rings where two cages are in use and both may be links of one.

    Not so where one of them is slower or in the network of another interface: that is a switch's.
    """
    used = [[n for n in twins if n.lasting and n.carrier] for twins in pairs.values()]
    halves = [netdev for twins in used for netdev in twins]
    speeds = {netdev.speed for netdev in halves}
    if sum(map(bool, used)) < 2 or len(speeds) > 1:
        return
    if not any(overlaps(host, [each.name for each in halves])):
        owners = facts()["owners"]
        what = f"two cages are in use; if that is a ring: {owners['triangle']}"
        yield said(Level.NOTE, "this node", "cabling", what, why=owners["ring_of_four"])


def _about_rings(host: Host, plan: NetPlan, pairs: Cages) -> Iterator[Finding]:
    owners = facts()["owners"]
    if plan.topology != "ring":
        yield from ring_if_any(host, pairs)
    elif plan.nodes > 3:
        hint = "a switch, or a patched NCCL"
        yield said(Level.WARNING, "this ring", "NCCL", owners["ring_of_four"], hint=hint)
    else:
        yield said(Level.NOTE, "this ring", "cabling", owners["triangle"])


def _in_lines(host: Host, plan: NetPlan) -> Cages:
    found: dict[int | None, tuple[Netdev, ...]] = {}
    for line in plan.lines:
        if netdev := host.netdev(line.netdev):
            found[line.cage] = (*found.get(line.cage, ()), netdev)
    return found
