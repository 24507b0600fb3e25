"""Measure what each half of a cage carries from node to node; judge it by owners' figures."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from ipaddress import IPv4Network
from itertools import chain, groupby

from patchkit.cluster.agent import bandwidth
from patchkit.cluster.net.checks import (
    choose_checked_cages,
    pair_checks,
    shared_networks,
)
from patchkit.cluster.ssh.node import Remote, require_all, run_on_all
from patchkit.cluster.ssh.ssh import make_finding
from patchkit.errors import HostError, PatchkitError
from patchkit.finding import Finding, Level
from patchkit.frozen import Texts, positional
from patchkit.runtime.host.host import Host, Netdev
from patchkit.runtime.rules.releases import read_env_data

_MEASURE = read_env_data("network")["measure"]
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
