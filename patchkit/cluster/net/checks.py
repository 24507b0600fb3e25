"""Check the QSFP network of a host from one end. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from patchkit.cluster.net.cages import Cages, cabled, cages, find_asked_cages
from patchkit.cluster.net.plan import NetPlan, NetPlanOptions, plan_command_line
from patchkit.errors import HostError
from patchkit.finding import Finding, Level
from patchkit.quoting import quoted
from patchkit.runtime.host import advice
from patchkit.runtime.host.hardware import network_facts
from patchkit.runtime.host.host import Host, Netdev
from patchkit.runtime.host.networks import overlaps

REPLAN = "`patchkit net plan --role head`, then apply, and the same as worker there"


def net_finding(level: Level, where: str, about: str, what: str, hint: str = "") -> Finding:
    """Return a finding at an interface, an address or a pair; ``about`` names what was checked."""
    return Finding(level=level, where=where, about=about, what=what, hint=hint, kind=HostError)


def check_passed(where: str, about: str, what: str) -> Finding:
    return net_finding(Level.OK, where, about, what)


def check_failed(where: str, about: str, what: str, hint: str) -> Finding:
    return net_finding(Level.ERROR, where, about, what, hint)


def check_warned(where: str, about: str, what: str, hint: str) -> Finding:
    return net_finding(Level.WARNING, where, about, what, hint)


def check_unknown(where: str, about: str, what: str, hint: str = "") -> Finding:
    return net_finding(Level.UNKNOWN, where, about, what, hint)


def choose_checked_cages(host: Host, names: Sequence[str] = (), cage: int | None = None) -> Cages:
    """Return the cages to check: those asked for, else those cabled, else those with an address.

    Raises UsageError, HostError.
    """
    if asked := find_asked_cages(host, names, cage):
        return asked
    known = cages(host)
    addressed = {number: twins for number, twins in known.items() if any(t.ipv4 for t in twins)}
    return cabled(host) or addressed or known


def plan_remarks(host: Host, plan: NetPlan, options: NetPlanOptions) -> Iterator[Finding]:
    """Yield what to know of a plan and of what it keeps, what may fail first."""
    changed = {advice.cage_name(line.cage) for line in plan.changes}
    netdevs = [netdev for line in plan.lines if (netdev := host.netdev(line.netdev))]
    for remark in _machine_remarks(host, "plan", netdevs):
        # Of a cage that changes a remark is the reason, and the plan is what to do.
        yield replace(remark, hint="") if remark.where in changed else remark
    owners = network_facts()["owners"]
    if plan.topology == "ring" and plan.nodes > 3:
        yield check_warned(
            "this ring", "NCCL", owners["ring_of_four"], "a switch, or a patched NCCL"
        )
    elif plan.topology == "ring":
        yield net_finding(Level.NOTE, "this ring", "cabling", owners["triangle"])
    for line in plan.lines:
        if line.action == "keep" and line.addresses and line.mtu < network_facts()["plan"]["mtu"]:
            yield _small_mtu(line.netdev, line.mtu)
        if options.mtu not in (None, line.mtu) and not line.addresses:
            command = quoted("sudo", "ip", "link", "set", line.netdev, "mtu", str(options.mtu))
            what = f"stays at {line.mtu}: without an address it is in no file of patchkit's"
            hint = f"until the next boot: {command}; or with --twins"
            yield check_warned(line.netdev, "MTU", what, hint)
    for cage, halves in plan.spare.items():
        yield _spare_cage(cage, halves)


def host_checks(host: Host, chosen: Cages, mtu: int | None) -> Iterator[Finding]:
    """Yield what can be seen from one end. ``mtu`` is what the user expects, None for any."""
    used = [cage for cage, twins in chosen.items() if any(twin.ipv4 for twin in twins)]
    halves = [twin for twins in chosen.values() for twin in twins]
    yield from _machine_remarks(host, "verify", halves)
    for cage, twins in chosen.items():
        if used and cage not in used:
            yield _spare_cage(cage, twins)
            continue
        for netdev in twins:
            yield from _check_half(
                host, netdev, [twin for twin in twins if twin is not netdev], mtu
            )
        yield from _check_both_halves(cage, twins)
    clashes = list(overlaps(host, [netdev.name for netdev in halves]))
    speeds = {twin.speed for cage in used for twin in chosen[cage] if twin.carrier}
    # A slower cage, or one in the network of another interface, is a switch's.
    if len(used) > 1 and len(speeds) == 1 and not clashes:
        what = f"two cages are in use; if that is a ring: {network_facts()['owners']['triangle']}"
        yield net_finding(Level.NOTE, "this node", "cabling", what)
    for clash in clashes:
        what = f"{clash.address} is in one network with {clash.other.name} ({clash.present})"
        command = _delete_command(str(clash.address), clash.netdev.name)
        hint = f"take one of both out, here and where it is configured: {command}"
        yield check_failed(clash.netdev.name, "networks of its own", what, hint)
    if any(netdev.ipv4 for netdev in halves) and not clashes:
        yield check_passed("this host", "networks of its own", "no other interface is in them")


def _machine_remarks(host: Host, verb: str, chosen: Iterable[Netdev]) -> Iterator[Finding]:
    """Yield what hardware.toml says of the machine, and of the cages of some netdevs."""
    places = {"", *(advice.cage_name(netdev.cage) for netdev in chosen)}
    for remark in advice.remarks(host, verb):
        if remark.where in places:
            # What is a note to who looks at one node is a warning to who joins two.
            level = Level.WARNING if remark.about == "link-local-twins" else remark.level
            yield replace(remark, where=remark.where or "this node", level=level)


def _spare_cage(cage: int | None, halves: Iterable[Netdev]) -> Finding:
    command = plan_command_line(NetPlanOptions(node=1, nodes=3))
    return check_warned(
        ", ".join(netdev.name for netdev in halves),
        f"cage {cage}",
        "cabled, but without an address; not used: a second cable to the same node brings nothing",
        f"if it leads to a third node: {command}",
    )


def _small_mtu(name: str, mtu: int) -> Finding:
    best = network_facts()["plan"]["mtu"]
    what = f"{mtu}; {best} brings 2 to 8 % with RoCE, and more with TCP"
    return net_finding(
        Level.NOTE, name, "MTU", what, f"on both ends and the switch: {_mtu_command(best)}"
    )


def _mtu_command(mtu: int) -> str:
    return quoted("patchkit", "net", "plan", "--mtu", str(mtu))


def _delete_command(address: str, netdev: str) -> str:
    return quoted("sudo", "ip", "address", "del", address, "dev", netdev)


def _check_half(
    host: Host, netdev: Netdev, others: Sequence[Netdev], mtu: int | None
) -> Iterator[Finding]:
    lit = [other for other in others if other.carrier]
    if lit and not netdev.carrier and not netdev.ipv4:
        return  # nobody uses it, or it would have an address; if that costs, a remark says so
    name, known = netdev.name, network_facts()["link"]
    seen = f"{netdev.state}, {'a' if netdev.carrier else 'no'} carrier"
    if netdev.up and netdev.carrier:
        yield check_passed(name, "link", seen)
    else:
        command = quoted("sudo", "ip", "link", "set", name, "up")
        yield check_failed(name, "link", seen, f"{command}; the cable; the other end")
    if netdev.speed is None:
        yield check_unknown(name, "speed", "the driver does not say", quoted("ethtool", name))
    elif netdev.speed == known["speed"]:
        low, high = known["twin_gbits"]
        # Each twin shows it, although its PCIe half carries less.
        seen = f"{netdev.speed} Mbit/s for the cage; {low} to {high} Gb/s a twin"
        yield check_passed(name, "speed", seen)
    else:
        seen = f"{netdev.speed} Mbit/s, a DGX Spark's cage has {known['speed']}"
        yield check_warned(name, "speed", seen, "the cable, or the switch and its port")
    yield _check_mtu(netdev, lit, mtu)
    # Of a half without an address beside one that has one, the remark on the machine tells.
    if netdev.ipv4 or not any(other.ipv4 for other in others):
        yield _check_address(netdev, others)
        yield _check_gid(host, netdev)
    if netdev.lanes is None:
        yield check_unknown(name, "PCIe lanes", "sysfs does not say", "sudo lspci -vv")
    elif netdev.lanes >= known["lanes"]:
        yield check_passed(name, "PCIe lanes", f"x{netdev.lanes}")
    else:
        seen = f"x{netdev.lanes}, a DGX Spark's twin has x{known['lanes']}"
        yield check_warned(name, "PCIe lanes", seen, "update the firmware: fwupdmgr")


def _check_mtu(netdev: Netdev, others: Sequence[Netdev], mtu: int | None) -> Finding:
    """Check the MTU: any will do that both ends have, jumbo frames are better."""
    name = netdev.name
    if mtu not in (None, netdev.mtu):
        hint = f"{_mtu_command(mtu or 0)}; or verify without --mtu, if both ends have {netdev.mtu}"
        return check_failed(name, "MTU", f"{netdev.mtu}, expected {mtu}", hint)
    more = next((other for other in others if other.mtu > netdev.mtu), None)
    if more and mtu is None:
        seen = f"{netdev.mtu}, its other half {more.name} has {more.mtu}"
        return check_warned(name, "MTU", seen, _mtu_command(more.mtu))
    if mtu is None and netdev.mtu < network_facts()["plan"]["mtu"]:
        return _small_mtu(name, netdev.mtu)
    return check_passed(name, "MTU", str(netdev.mtu))


def _check_address(netdev: Netdev, others: Sequence[Netdev]) -> Finding:
    """Check that there is one. Of link-local ones on two halves the machine's remarks tell."""
    seen = ", ".join(map(str, netdev.ipv4))
    if not seen:
        return check_failed(netdev.name, "IPv4", "no address", REPLAN)
    if netdev.lasting or any(other.ipv4 for other in others):
        return check_passed(netdev.name, "IPv4", seen)
    seen += ": link-local, drawn anew at any boot unless somebody set it"
    hint = "for addresses that stay: `patchkit net plan --twins`"
    return net_finding(Level.NOTE, netdev.name, "IPv4", seen, hint)


def _check_gid(host: Host, netdev: Netdev) -> Finding:
    """Check for a RoCE v2 GID of the interface's IPv4 address."""
    name, about = netdev.name, "RoCE v2 GID"
    device = next((device for device in host.rdma if device.netdev == name), None)
    if device is None:
        return check_unknown(name, about, "no RDMA device here", "ls /sys/class/infiniband")
    if not device.active:
        return check_failed(name, about, f"{device.name} is {device.state}", "the link, as above")
    own = {str(address.ip) for address in netdev.ipv4}
    found = [gid for gid in device.gids if gid.kind == "RoCE v2" and gid.address in own]
    if found:
        return check_passed(
            name, about, f"{device.name} index {found[0].index} for {found[0].address}"
        )
    seen = f"{device.name} has none for {', '.join(sorted(own)) or 'an address that is missing'}"
    return check_failed(name, about, seen, f"give {name} its IPv4 address first")


def _check_both_halves(cage: int | None, twins: Sequence[Netdev]) -> Iterator[Finding]:
    """Check that both halves of a cage are there, in different networks."""
    where = ", ".join(netdev.name for netdev in twins)
    networks = [address.network for twin in twins for address in twin.lasting]
    seen = ", ".join(map(str, networks))
    if len(twins) < 2 and cage is None:  # named by the user, who may have left the other half out
        yield check_unknown(where, "both twins", "one interface was named", "name both twins")
    elif len(twins) < 2:
        yield check_failed(
            where, "both twins", f"cage {cage} has one half only", "fwupdmgr update; lspci"
        )
    elif any(a.overlaps(b) for n, a in enumerate(networks) for b in networks[:n]):
        last = twins[-1]
        delete = _delete_command(str(last.lasting[0]), last.name)
        hint = f"{delete}; and where it is configured; then `patchkit net plan --twins`"
        what = f"{seen}: Linux answers for either at either"
        yield check_failed(where, "different networks", what, hint)
    elif all(twin.lasting for twin in twins):
        yield check_passed(where, "different networks", seen)
