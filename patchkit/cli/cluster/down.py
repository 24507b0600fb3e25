"""Stop a model on every node, and check: `patchkit down`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click

from patchkit.cli.cluster.cluster_options import cluster_option, node_fields
from patchkit.cli.render import BAD, GOOD, Block, Record, rendered
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.up import check_stopped, stop_group
from patchkit.errors import HostError, PatchkitError


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
        nodes.append(node_fields(node.destination, result))
        left = result.what if isinstance(result, PatchkitError) else result.left
        yield BAD + left if left else GOOD + f"{node.destination}: stopped, no process left"
    yield Record({"nodes": nodes})
    check_stopped(cluster, results)
