"""Look at the machines of a cluster and write its file: `patchkit cluster`, `cluster init`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import click

from patchkit.cli.cluster.cluster_options import FILE_OPTION
from patchkit.cli.cluster.install import command as install
from patchkit.cli.next_step import next_step, program, spelled
from patchkit.cli.out import style
from patchkit.cli.render import (
    GOOD,
    Block,
    Data,
    ExitCode,
    Record,
    VerbGroup,
    counted_noun,
    finding_blocks,
    rendered,
)
from patchkit.cli.runtime.node_options import TOPOLOGIES
from patchkit.cluster.agent.node_facts import NodeFacts
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.cluster_file import ClusterFile, ClusterNode, new_cluster_text
from patchkit.cluster.launch.plan import node_addresses
from patchkit.cluster.launch.survey import survey_nodes
from patchkit.errors import HostError
from patchkit.finding import Finding, Level, worst
from patchkit.runtime.envfile.write import write
from patchkit.runtime.host.hardware import target_of
from patchkit.units import KIB_PER_GIB


@click.group(cls=VerbGroup)
def command() -> None:
    """Set up several machines to serve a model, by systemd and ssh.

    \b
      patchkit cluster init spark-1 spark-2
      patchkit cluster install
      patchkit up openai/gpt-oss-120b
      patchkit status
      patchkit down

    The first machine is the head. systemd on each keeps the ranks: the head's unit starts and
    watches the others, comes back after a crash, four times an hour at most, and after a reboot.
    """


command.add_command(install)


@command.command("init")
@click.argument("nodes", nargs=-1, required=True, metavar="HOST...")
@FILE_OPTION
@click.option("--topology", type=click.Choice(TOPOLOGIES))
@click.option("--head-ip", "address", default="", metavar="A", help="The head's IPv4 address.")
@click.option("--target", default="", metavar="NAME", help="Instead of the probed GPU.")
@click.option("--dry-run", is_flag=True, help="Print the file, and write nothing.")
@click.option("--force", is_flag=True, help="Replace a file that says something else.")
@rendered
def init(
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
    head, *workers = nodes
    members = (ClusterNode(ssh=head, address=address), *(ClusterNode(ssh=it) for it in workers))
    cluster = Cluster(ClusterFile(node=members))
    facts = cluster.facts()
    found = list(survey_nodes(nodes, facts))
    kinds = {target_of(it.host) for it in facts}
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
        cures = [check.hint for check in found if check.level is Level.ERROR and check.hint]
        if cures:
            yield style("next:", bold=True) + f" {spelled(cures[0])}"
        elif all(it.host.versions["vllm"] for it in facts):
            yield next_step(*program(), "up", "MODEL")
        else:
            yield next_step(*program(), "cluster", "install")
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
        by_cable = replace(worker, peer=f"{user}{where}")
        trouble = _link_trouble(cluster.file, worker, where)
        if trouble and not _link_trouble(cluster.file, by_cable, where):
            worker = by_cable
        elif trouble:
            found.append(_finding(trouble, worker.ssh, "link", trouble.what))
        kept.append(worker)
    return tuple(kept), found


def _link_trouble(file: ClusterFile, worker: ClusterNode, where: str) -> HostError | None:
    """Return why the head does not reach a worker, None if it does."""
    try:
        Cluster(replace(file, node=(file.head, worker))).links([where])
    except HostError as error:
        return error
    return None


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
