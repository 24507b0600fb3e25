"""Verify the QSFP network of this host, with a peer or alone. No rights needed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path

from patchkit.cluster.net.cages import Cages
from patchkit.cluster.net.checks import check_failed, check_passed, check_unknown, host_checks
from patchkit.cluster.net.live import run_ip
from patchkit.cluster.net.pair import pair_checks
from patchkit.errors import HostError, UsageError
from patchkit.finding import Finding, Level
from patchkit.process import attempt
from patchkit.quoting import quoted
from patchkit.reading import read_text
from patchkit.runtime.host.hardware import network_facts
from patchkit.runtime.host.host import Host, Netdev, from_json
from patchkit.runtime.host.ping import HEADERS, PLAIN, echo, ping_obstacle

# perftest: over rdma_cm, no warning about CPU frequency, Gbit/s, for ten seconds.
_BANDWIDTH = ("-R", "-F", "--report_gbits", "-D", "10")
_FIRST_PORT = 18515  # ib_write_bw's own
# States of a neighbour whose MAC is resolved: ip-neighbour(8).
_KNOWN = {"REACHABLE", "STALE", "DELAY", "PROBE", "PERMANENT"}
_HINTS = {  # by ssh's exit status, and the shell's there
    127: "name it: --ssh-patchkit /path/to/bin/patchkit",
    255: "ssh must work without a password: ssh-copy-id; or use --peer-probe FILE",
}
_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")  # no prompt; seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The other end: addresses that the user named, and its facts if they are known."""

    addresses: tuple[IPv4Address, ...] = ()
    host: Host | None = None


def read_peer_facts(path: Path) -> Host:
    """Return the facts in a file. Raises UsageError, SourceError or StorageError."""
    text = read_text(path, hint="write it on the peer: patchkit probe --json > peer.json")
    return from_json(text, str(path))


def ask_peer_facts(destination: str, patchkit: str) -> Host:
    """Ask the peer itself; ``patchkit`` is the command there. Raises HostError with ssh's words."""
    # ssh would take it for an option, and -oProxyCommand=… runs a program.
    if destination.startswith("-"):
        raise UsageError(f"--ssh {destination}: is not a host", hint="--ssh user@host")
    done = attempt("ssh", *_OPTIONS, "--", destination, f"{patchkit} probe --json")
    if done.trouble:
        hint = _HINTS.get(done.status or 0, "run that command by hand")
        raise done.error(HostError, hint=hint if done.started else "use --peer-probe FILE")
    return from_json(done.output, f"`patchkit probe --json` on {destination}")


def verify_network(
    host: Host, chosen: Cages, peer: Peer, mtu: int | None, *, live: bool
) -> Iterator[Finding]:
    """Yield all checks. ``live``: the facts are this machine's, so its network can be tried.

    ``mtu`` is what both ends should have, None for what each has here.
    """
    yield from host_checks(host, chosen, mtu)
    if peer.host:
        yield from pair_checks(host, chosen, peer.host)
    halves = [netdev for twins in chosen.values() for netdev in twins]
    addresses = _find_targets(halves, peer)
    for address in addresses if live else ():
        yield from _check_way(host, halves, address, mtu)
    everywhere = not any(netdev.ipv4 for netdev in halves)
    untried = ", ".join(
        netdev.name
        for netdev in halves
        # From an interface without an address there is no way.
        if (netdev.ipv4 or everywhere)
        and not (live and any(_is_near(netdev, address) for address in addresses))
    )
    if untried and live:
        hint = "--peer with the peer's address there, or all at once: --ssh, --peer-probe"
        yield check_unknown(untried, "way to a peer", "no peer's address is known", hint)
    elif untried:
        yield check_unknown(untried, "way to a peer", "these facts are of another machine")


def bandwidth_commands(host: Host, chosen: Cages, peer: Peer) -> list[str]:
    """Return commands that measure RDMA, which nothing here does: at the peer, then here."""
    halves = [netdev for twins in chosen.values() for netdev in twins]
    addresses, lines = _find_targets(halves, peer), []
    devices = {device.netdev: device.name for device in host.rdma}
    theirs = {device.netdev: device.name for device in peer.host.rdma} if peer.host else {}
    for number, netdev in enumerate(half for half in halves if half.name in devices):
        for address in [near for near in addresses if _is_near(netdev, near)][:1]:
            holder = next((n.name for n in _peer_netdevs(peer) if _has_address(n, address)), "")
            # A port for each twin, so that both can be measured at once.
            options = (*_BANDWIDTH, "-p", str(_FIRST_PORT + number))
            other = theirs.get(holder, "ITS-DEVICE")
            lines.append(f"peer: {quoted('ib_write_bw', '-d', other, *options)}")
            here = quoted("ib_write_bw", "-d", devices[netdev.name], *options, str(address))
            lines.append(f"here: {here}")
    return lines


def expected_bandwidth() -> str:
    """Return what these commands should print."""
    link = network_facts()["link"]
    (low, high), (least, most) = link["twin_gbits"], link["both_gbits"]
    return f"{low} to {high} Gb/s for one twin, {least} to {most} for both at once"


def _peer_netdevs(peer: Peer) -> tuple[Netdev, ...]:
    return peer.host.netdevs if peer.host else ()


def _has_address(netdev: Netdev, address: IPv4Address) -> bool:
    return any(own.ip == address for own in netdev.ipv4)


def _is_near(netdev: Netdev, address: IPv4Address) -> bool:
    return any(address in own.network for own in netdev.ipv4)


def _find_targets(halves: list[Netdev], peer: Peer) -> tuple[IPv4Address, ...]:
    """Return the peer's addresses to try: those named, and those of its facts in our networks."""
    known = [
        address.ip
        for netdev in _peer_netdevs(peer)
        for address in netdev.lasting
        # The peer may have others, on its LAN for example.
        if any(_is_near(half, address.ip) and not _has_address(half, address.ip) for half in halves)
    ]
    return tuple(dict.fromkeys((*peer.addresses, *known)))


def _check_way(
    host: Host, halves: list[Netdev], peer: IPv4Address, mtu: int | None
) -> Iterator[Finding]:
    """Check the way to one address of a peer, with frames of ``mtu``, or of the interface's own."""
    where = str(peer)
    netdev = next((half for half in halves if _is_near(half, peer)), None)
    if any(_has_address(own, peer) for own in host.netdevs):
        yield check_failed(where, "same network", "is an address of this host", "name the peer's")
        return
    if netdev:
        yield check_passed(where, "same network", f"that of {netdev.name}")
    else:
        ours = ", ".join(str(own.network) for half in halves for own in half.ipv4)
        hint = f"give both nodes addresses in one network, here one of {ours or 'none'}"
        yield check_failed(where, "same network", f"is in none of {ours or 'ours'}", hint)
    route = _check_route(where, netdev)
    yield route
    if netdev is None or route.level is not Level.OK:
        seen = "the way is not the QSFP's; what would answer is not it"
        if route.level is Level.UNKNOWN:
            seen = "the route is not known"
        for about in ("echo", "jumbo frames", "neighbour"):
            yield check_unknown(where, about, seen)
        return
    plain = _check_echo(netdev, where, PLAIN, "echo")
    yield plain
    frame = mtu or netdev.mtu
    yield _check_echo(netdev, where, frame - HEADERS, f"{frame}-byte frames")
    # After the echo, which makes the kernel resolve the address.
    macs = _find_macs(where)
    if netdev.name in macs:
        yield check_passed(where, "neighbour", f"{macs[netdev.name]} at {netdev.name}")
    elif plain.level is Level.UNKNOWN:
        yield check_unknown(where, "neighbour", "nothing was sent that would make it answer")
    else:
        seen = f"nobody answers for it at {netdev.name}"
        yield check_failed(where, "neighbour", seen, "the cables")
    if plain.level is Level.ERROR:
        yield from _find_elsewhere(halves, netdev, where)


def _check_route(peer: str, netdev: Netdev | None) -> Finding:
    """Check that the kernel sends through the interface of the peer's network, and directly."""
    if not shutil.which("ip"):
        return check_unknown(peer, "route", "ip is not installed", "sudo apt install iproute2")
    try:
        answer = next(iter(run_ip("route", "get", peer)), {})
    except HostError as error:
        return check_failed(peer, "route", str(error), "give the QSFP interface its address")
    seen = f"through {answer.get('dev')}"
    if "gateway" in answer:
        seen += f", by way of {answer['gateway']}"
    elif netdev and answer.get("dev") == netdev.name:
        return check_passed(peer, "route", seen)
    right = netdev.name if netdev else "a QSFP interface"
    return check_failed(peer, "route", f"{seen}, not {right}", "`ip route` shows who says so")


def _check_echo(netdev: Netdev, peer: str, size: int, about: str) -> Finding:
    """Send packets of that many bytes of payload, unfragmented, and wait for one to come back.

    The exit status of ping decides; its words differ between versions and are only shown.
    """
    if obstacle := ping_obstacle():
        return check_unknown(peer, about, obstacle, "sudo apt install iputils-ping")
    done = echo(netdev.name, peer, size)
    if not done.trouble:
        return check_passed(peer, about, f"{size} bytes there and back")
    words = next(iter(done.errors.strip().splitlines()), "")
    if done.status != 1:  # iputils: 1 is for sent, and nothing came back; 2 is any other error
        seen = words or f"ping: {done.trouble}"
        return check_unknown(peer, about, seen, quoted("sudo", *done.command))
    hint = f"the same MTU on both ends and on the switch; here {netdev.name} has {netdev.mtu}"
    if size == PLAIN:
        hint = "is the peer up and configured? `patchkit net verify` there"
    return check_failed(peer, about, f"{size} bytes: {words or 'no answer'}", hint)


def _find_macs(peer: str) -> dict[str, str]:
    """Return the interfaces where a neighbour has that address → its MAC."""
    try:
        entries = run_ip("neighbour", "show", peer)
    except HostError:
        return {}
    return {
        entry["dev"]: entry["lladdr"]
        for entry in entries
        if "lladdr" in entry and _KNOWN & set(entry.get("state", ()))
    }


def _find_elsewhere(halves: list[Netdev], netdev: Netdev, peer: str) -> Iterator[Finding]:
    """Ask at the other interfaces: where the cables are swapped, it answers there."""
    for other in halves:
        if other.name != netdev.name and other.carrier:
            _check_echo(other, peer, PLAIN, "echo")
            if other.name in _find_macs(peer):
                seen = f"answers at {other.name}, not at {netdev.name}"
                hint = "swap the cables, or plan with --port0-to"
                yield check_failed(peer, "cabling", seen, hint)
                return
