"""Show what all ranks wrote: `patchkit logs`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import click

from patchkit.cli.cluster.cluster_options import cluster_option
from patchkit.cli.out import LaidOut, record_fields, style
from patchkit.cli.render import Block, Record, rendered
from patchkit.cluster.launch.cluster import Cluster, read_group_journal
from patchkit.cluster.ssh.node import all_of
from patchkit.errors import UsageError
from patchkit.runtime.rules.secret_texts import mask_secrets


@click.command("logs")
@cluster_option
@click.option("-f", "--follow", is_flag=True, help="Go on as lines come, until Ctrl-C.")
@click.option("--node", "nodes", multiple=True, metavar="N", help="This node's alone; repeat.")
@click.option("--since", default="", metavar="WHEN", help="As journalctl takes it: '10 min ago'.")
@click.option("-n", "--lines", type=click.IntRange(1), default=100, show_default=True)
@rendered
def command(
    *, cluster: Cluster, follow: bool, nodes: tuple[str, ...], since: str, lines: int
) -> Iterator[Block]:
    """Show what all ranks wrote, merged by time, by this machine's clock.

    Each node's journal keeps it; --json prints a line of JSON for each. --since is by each node's
    own clock. The exit code is 9 if a node is silent.
    """
    known = [node.destination for node in cluster.nodes]
    if strange := [node for node in nodes if node not in known]:
        raise UsageError(f"--node {strange[0]}: no such node", hint=f"one of {', '.join(known)}")
    width = max(map(len, known))
    newest = 0 if since else lines
    journal = read_group_journal(cluster, since=since, lines=newest, nodes=nodes, follow=follow)
    for node, raw in journal.lines:
        line = replace(raw, text=mask_secrets(raw.text))
        yield Record({"node": node, **record_fields(line)}, line=True)
        clock = time.strftime("%H:%M:%S", time.localtime(line.time / 1e6))
        head = style(f"{clock} {node.ljust(width)} ", dim=True)
        yield LaidOut(head + line.text)
    all_of(list(journal.silent.values()))
