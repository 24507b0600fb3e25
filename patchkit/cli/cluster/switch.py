"""Serve another model, or the former one again: `patchkit switch`."""

from __future__ import annotations

import click

from patchkit.cli.cluster.cluster_options import BREAK_LOCK, cluster_option
from patchkit.cli.cluster.up import DRY, MODEL, tell_answered, tell_plan, wait_attached, watch_start
from patchkit.cli.out import as_json
from patchkit.cluster.launch import up as launch
from patchkit.cluster.launch.cluster import Cluster


@click.command("switch")
@MODEL
@cluster_option
@BREAK_LOCK
@DRY
@as_json
def command(model: str, *, cluster: Cluster, dry_run: bool, as_json: bool) -> None:
    """Serve another model; if it does not answer, the former one again.

    The former one is stopped and its memory awaited first. vLLM's sleep mode is not used.
    """
    if dry_run:
        tell_plan(cluster, launch.make_plan(cluster, model), as_json=as_json)
        return
    watcher = watch_start(cluster, quiet=as_json)
    done = wait_attached(cluster, lambda: launch.switch_model(cluster, model, watcher))
    tell_answered(cluster, done, as_json=as_json, url="")
