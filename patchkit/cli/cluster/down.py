"""Stop a model on every node, and check: `patchkit down`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click

from patchkit.cli.cluster.cluster_options import cluster_option, node_fields
from patchkit.cli.render import BAD, GOOD, Block, Record, rendered
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.start import StoppedNode, check_stopped, stop_group
from patchkit.errors import HostError, PatchkitError
from patchkit.units import KIB_PER_GIB


@click.command("down")
@cluster_option
@rendered
def command(*, cluster: Cluster) -> Iterator[Block]:
    """Stop the model on every node, and check: no unit, no process, the memory back.

    It does not come back after a reboot until the next `up`. A node that did not answer is named.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(HostError):  # a head that is off keeps nobody out
            stack.enter_context(cluster.alone())
        results = stop_group(cluster)
    nodes = []
    for node, result in zip(cluster.nodes, results, strict=True):
        problem = {} if isinstance(result, PatchkitError) else {"problem": result.problem}
        nodes.append(node_fields(node.destination, result, **problem))
        yield _stopped_line(node.destination, result)
    yield Record({"nodes": nodes})
    check_stopped(cluster, results)


def _stopped_line(node: str, result: StoppedNode | PatchkitError) -> str:
    if isinstance(result, PatchkitError):
        return BAD + result.what
    after, memory = result.state.memory, ""
    if after and result.before is not None:
        free = (result.before / KIB_PER_GIB, after.available / KIB_PER_GIB)
        memory = f", memory {free[0]:.1f} → {free[1]:.1f} GiB free"
    mark = BAD if result.problem else GOOD
    return mark + f"{node}: {result.problem or 'stopped, no process left'}{memory}"
