"""Look at the machines of a cluster and write its file: `patchkit cluster init`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import click

from patchkit.cli.next_step import next_step, program, spelled
from patchkit.cli.out import style
from patchkit.cli.render import (
    GOOD,
    Block,
    Data,
    ExitCode,
    Record,
    counted_noun,
    finding_blocks,
    rendered,
)
from patchkit.cluster.agent.node_facts import NodeFacts
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.cluster_file import (
    FILE,
    ClusterFile,
    ClusterNode,
    new_cluster_text,
)
from patchkit.cluster.launch.plan import node_addresses
from patchkit.cluster.launch.survey import survey_nodes
from patchkit.errors import HostError
from patchkit.finding import Finding, Level, worst
from patchkit.runtime.envfile.write import write
from patchkit.runtime.host.hardware import target_of
from patchkit.units import KIB_PER_GIB


@click.command("init")
@click.argument("nodes", nargs=-1, required=True, metavar="HOST...")
@click.option(
    "--file", type=click.Path(path_type=Path), default=FILE, show_default=True, metavar="FILE"
)
@click.option("--topology", type=click.Choice(["auto", "roce", "socket", "ring", "hetero"]))
@click.option("--head-ip", "address", default="", metavar="A", help="The head's IPv4 address.")
@click.option("--target", default="", metavar="NAME", help="Instead of the probed GPU.")
@click.option("--dry-run", is_flag=True, help="Print the file, and write nothing.")
@click.option("--force", is_flag=True, help="Replace a file that says something else.")
@rendered
def command(
    nodes: Sequence[str],
    *,
    file: Path,
    topology: str | None,
    address: str,
    target: str,
    dry_run: bool,
    force: bool,
) -> Iterator[Block]:
    """Look at each machine by ssh, and write cluster.toml; the first is the head.

    \b
      patchkit cluster init spark-1 spark-2
      patchkit cluster init localhost spark-2

    HOST is as for ssh; localhost is this machine, without it. Nothing has to be installed there
    but Python 3.11 and systemd. Cables, versions and limits are checked.
    """
    members = tuple(
        ClusterNode(ssh=each, address=address if not n else "") for n, each in enumerate(nodes)
    )
    cluster = Cluster(ClusterFile(node=members))
    facts = cluster.facts()
    found = list(survey_nodes(nodes, facts))
    kinds = {target_of(each.host) for each in facts}
    # A Spark beside a Thor: tensor parallelism, the default, is not for two kinds.
    chosen = {"topology": topology or ("hetero" if len(kinds) > 1 else ""), "target": target}
    choices = {name: value for name, value in chosen.items() if value}
    members, linked = _linked(cluster, facts, choices)
    found += linked
    text = new_cluster_text(members, choices)
    outcome = "not written"
    if not dry_run:
        outcome = str(write(file, text, force=force, private=False, by="patchkit cluster init"))
    yield Record({"file": file, "outcome": outcome, "text": text, "findings": found})
    yield from (_node_line(*row) for row in zip(nodes, facts, strict=True))
    yield from finding_blocks(check for check in found if check.level is not Level.OK)
    if dry_run:
        yield Data(text)
    else:
        yield GOOD + f"{file} {outcome}"
        verb = ("up", "MODEL")
        if not all(each.host.versions["vllm"] for each in facts):
            verb = ("cluster", "install")
        cures = [check.hint for check in found if check.level is Level.ERROR and check.hint]
        yield (
            style("next:", bold=True) + f" {spelled(cures[0])}"
            if cures
            else next_step(*program(), *verb)
        )
    yield ExitCode(worst(found))


def _linked(
    cluster: Cluster, facts: Sequence[NodeFacts], choices: dict[str, str]
) -> tuple[tuple[ClusterNode, ...], list[Finding]]:
    """Return the nodes with the names by which the head reaches them, and what is in the way.

    A name that leads to a worker from here may lead nowhere from the head: then the address on the
    cable is taken.
    """
    nodes = cluster.file.node
    try:
        addresses = node_addresses(cluster.file, facts, choices)
    except HostError as error:
        where, _, what = error.what.partition(": ")
        return nodes, [_finding(error, where, "address", what)]
    kept, found = [nodes[0]], []
    for worker, where in zip(nodes[1:], addresses[1:], strict=True):
        user = f"{worker.ssh.partition('@')[0]}@" if "@" in worker.ssh else ""
        failed: list[HostError] = []
        for candidate in (worker, replace(worker, peer=f"{user}{where}")):
            try:
                Cluster(replace(cluster.file, node=(nodes[0], candidate))).links([where])
            except HostError as error:
                failed.append(error)
            else:
                kept.append(candidate)
                break
        else:
            kept.append(worker)
            found.append(_finding(failed[0], worker.ssh, "link", failed[0].what))
    return tuple(kept), found


def _finding(error: HostError, where: str, about: str, what: str) -> Finding:
    return Finding(
        kind=HostError, where=where, about=about, what=what, why=error.why, hint=error.hint
    )


def _node_line(name: str, facts: NodeFacts) -> str:
    host = facts.host
    gpu = host.gpus[0].name if host.gpus else "no GPU"
    memory = f"{host.memory.total / KIB_PER_GIB:.0f} GiB" if host.memory else "? GiB"
    vllm = f"vLLM {host.versions['vllm']}" if host.versions["vllm"] else "no vLLM yet"
    cables = f"{counted_noun(len(host.cabled), 'QSFP cage')} cabled"
    return style(name, bold=True) + f"  {gpu}, {memory}, {cables}, {vllm}"
