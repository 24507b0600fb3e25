"""Compare the nodes of a cluster, and what is between them. Pure.

Every check says of every node that it is well, what is wrong, or why it was not looked at. What is
wrong is said once, where it begins: an interface without a carrier has no way that could be tried.
A worker needs no ssh to its head, and none is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from patchkit.cluster.launch.cluster_file import ClusterFile
from patchkit.cluster.ssh.ssh import there
from patchkit.doctor.peers.check import check, fine, require, unknown, wrong
from patchkit.doctor.peers.endpoints import cable_findings
from patchkit.doctor.peers.files import file_findings
from patchkit.doctor.peers.report import NodeReport
from patchkit.doctor.peers.software import model_findings, software_findings
from patchkit.doctor.peers.units import unit_findings
from patchkit.finding import Finding
from patchkit.quoting import quoted

_LEAST_FREE = 64 << 20  # bytes: what `up` writes, and a few compiled kernels
CLOCK_SECONDS = 2.0
"""By how much two clocks may differ."""


def peer_findings(file: ClusterFile, nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield what is wrong between the nodes, what is well, and what was not looked at."""
    for node in nodes:
        if node.silence:
            said = node.silence
            yield wrong("ssh", node.node, what=said.what, why=said.why, hint=said.hint)
        else:
            yield fine("ssh", node.node)
        yield from check_disks(node)
    if len(nodes) > 1:
        yield from clock_findings(nodes)
        yield from cable_findings(nodes)
    yield from software_findings(file, nodes)
    yield from model_findings(file, nodes)
    yield from file_findings(nodes)
    yield from unit_findings(file, nodes)


@check("disk")
def check_disks(node: NodeReport) -> Iterator[Finding]:
    """Yield disks of a node on which nothing can be written any more."""
    disks = require(node.disks or None, node.why_not("disks"))
    full = [each for each in disks if each.free < _LEAST_FREE or each.files == 0]
    for each in full:
        what = "no file can be made" if each.files == 0 else f"{each.free / 1e6:.0f} MB are free"
        largest = " | ".join((quoted("du", "-xah", "-d", "1", each.folder), "sort -h", "tail"))
        command = there(node.node, "sh", "-c", largest)
        yield wrong("disk", node.node, folder=each.folder, what=what, command=command)
    if not full:
        least = min(disks, key=lambda each: each.free)
        yield fine("disk", node.node, folder=least.folder, free=least.free / 1e9)


def clock_findings(nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield whose clock differs: of two, the one that is farther from the launcher's."""
    known = [(each, each.clock) for each in nodes if each.clock]
    for node in nodes:
        if node.clock is None:
            yield unknown("clock", node.node, node.why_not("clock"))
    if len(known) < 2:
        yield from (unknown("clock", each.node, "no other node answered") for each, _ in known)
        return
    # The clock in the middle is nobody's fault; of two it is the one that is nearer to ours.
    by_time = sorted(known, key=lambda each: each[1].ahead)
    right, clock = by_time[len(known) // 2]
    if len(known) == 2:
        right, clock = min(known, key=lambda each: abs(each[1].ahead))
    for node, own in known:
        apart, error = abs(own.ahead - clock.ahead), own.error + clock.error
        if node is not right and apart - error > CLOCK_SECONDS:
            yield wrong(
                "clock",
                node.node,
                seconds=apart,
                direction="ahead of" if own.ahead > clock.ahead else "behind",
                other=right.node,
                command=there(node.node, "sudo", "timedatectl", "set-ntp", "true"),
            )
        elif node is right or apart + error <= CLOCK_SECONDS:
            yield fine("clock", node.node, within=max(apart + error, 0.1))
        else:
            yield unknown("clock", node.node, f"the call took too long: ±{error:.0f} s")
