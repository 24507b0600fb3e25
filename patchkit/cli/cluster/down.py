"""Stop a model on every node, and check: `patchkit down`."""

from __future__ import annotations

import contextlib
from dataclasses import asdict

import click

from patchkit.cli.cluster.cluster_options import BREAK_LOCK, cluster_option
from patchkit.cli.out import as_json, print_json, say, style
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.start import StoppedNode, check_stopped, stop_group
from patchkit.errors import HostError, PatchkitError
from patchkit.units import KIB_PER_GIB


@click.command("down")
@cluster_option
@BREAK_LOCK
@click.option("--dry-run", is_flag=True, help="Show what would be stopped.")
@as_json
def command(*, cluster: Cluster, dry_run: bool, as_json: bool) -> None:
    """Stop the model on every node, and check: no unit, no process, the memory back.

    It does not come back after a reboot until the next `up`. A node that did not answer is named.
    """
    if dry_run:
        for node in cluster.nodes:
            units = " ".join(cluster.units_of(node))
            say(f"{node.destination}: systemctl --user disable --now {units}")
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(HostError):  # a head that is off keeps nobody out
            stack.enter_context(cluster.alone())
        results = stop_group(cluster)
    rows = [(node.destination, result) for node, result in zip(cluster.nodes, results, strict=True)]
    if as_json:
        print_json({"nodes": [_json_fields(*row) for row in rows]})
    else:
        for row in rows:
            say(_stopped_line(*row))
    check_stopped(cluster, results)


def _json_fields(node: str, result: StoppedNode | PatchkitError) -> dict[str, object]:
    if isinstance(result, PatchkitError):
        return {"node": node, "error": result.what}
    return {"node": node, "problem": result.problem, **asdict(result)}


def _stopped_line(node: str, result: StoppedNode | PatchkitError) -> str:
    if isinstance(result, PatchkitError):
        return style("✗", fg="red") + f" {result.what}"
    after, memory = result.state.memory, ""
    if after and result.before is not None:
        free = (result.before / KIB_PER_GIB, after.available / KIB_PER_GIB)
        memory = f", memory {free[0]:.1f} → {free[1]:.1f} GiB free"
    problem = result.problem
    mark = style("✗", fg="red") if problem else style("✓", fg="green")
    return mark + f" {node}: {problem or 'stopped, no process left'}{memory}"
