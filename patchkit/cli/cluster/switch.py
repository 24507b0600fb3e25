"""Serve another model, or the former one again: `patchkit switch`."""

from __future__ import annotations

from collections.abc import Iterator

import click

from patchkit.cli.cluster.cluster_options import cluster_option
from patchkit.cli.cluster.up import MODEL, answered_blocks, wait_attached, watch_start
from patchkit.cli.render import Block, rendered
from patchkit.cluster.launch import up as launch
from patchkit.cluster.launch.cluster import Cluster


@click.command("switch")
@MODEL
@cluster_option
@rendered
def command(model: str, *, cluster: Cluster) -> Iterator[Block]:
    """Serve another model; if it does not answer, the former one again.

    The former one is stopped and its memory awaited first. vLLM's sleep mode is not used.
    """
    watcher = watch_start(cluster)
    wait_attached(lambda: launch.switch_model(cluster, model, watcher))
    yield from answered_blocks(cluster, model)
