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
from patchkit.cluster.launch.plan import node_addresses, survey_nodes
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
@click.option("--force", is_flag=True, help="Replace a file that says something else.")
@rendered
def init(
    nodes: Sequence[str],
    *,
    file: Path,
    topology: str | None,
    address: str,
    target: str,
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
    members = [ClusterNode(ssh=head, address=address), *(ClusterNode(ssh=it) for it in workers)]
    cluster = Cluster(ClusterFile(node=tuple(members)))
    facts = cluster.facts()
    # A Spark beside a Thor: tensor parallelism, the default, is not for two kinds.
    kinds = {target_of(it.host) for it in facts}
    chosen = {"topology": topology or ("hetero" if len(kinds) > 1 else ""), "target": target}
    choices = {name: value for name, value in chosen.items() if value}
    members, linked = _link_nodes(cluster.file, facts, choices)
    found = [*survey_nodes(nodes, facts), *linked]
    text = new_cluster_text(members, choices)
    outcome = str(write(file, text, force=force, private=False, by="patchkit cluster init"))
    yield Record({"file": file, "outcome": outcome, "text": text, "findings": found})
    for name, its in zip(nodes, facts, strict=True):
        yield style(name, bold=True) + f"  {_describe_node(its)}"
    yield from finding_blocks(check for check in found if check.level is not Level.OK)
    yield GOOD + f"{file} {outcome}"
    cures = [check.hint for check in found if check.level is Level.ERROR and check.hint]
    if cures:
        yield style("next:", bold=True) + f" {spelled(cures[0])}"
    elif all(it.host.versions["vllm"] for it in facts):
        yield next_step(*program(), "up", "MODEL")
    else:
        yield next_step(*program(), "cluster", "install")
    yield ExitCode(worst(found))


def _link_nodes(
    file: ClusterFile, facts: Sequence[NodeFacts], choices: dict[str, str]
) -> tuple[list[ClusterNode], list[Finding]]:
    """Return the nodes with the names by which the head reaches them, and what is in the way.

    A name that leads to a worker from here may lead nowhere from the head: then the address on the
    cable is taken.
    """
    head, *workers = file.node
    try:
        addresses = node_addresses(file, facts, choices)
    except HostError as error:
        where, _, what = error.what.partition(": ")
        return [*file.node], [_as_finding(error, where, "address", what)]
    kept, found = [head], []
    for worker, where in zip(workers, addresses[1:], strict=True):
        user, at, _host = worker.ssh.rpartition("@")
        trouble = None
        for tried in (worker, replace(worker, peer=f"{user}{at}{where}")):
            try:
                Cluster(replace(file, node=(head, tried))).links([where])
                kept.append(tried)
                break
            except HostError as error:
                trouble = trouble or error
        else:
            assert trouble is not None
            kept.append(worker)
            found.append(_as_finding(trouble, worker.ssh, "link", trouble.what))
    return kept, found


def _as_finding(error: HostError, where: str, about: str, what: str) -> Finding:
    return Finding(
        kind=HostError, where=where, about=about, what=what, why=error.why, hint=error.hint
    )


def _describe_node(facts: NodeFacts) -> str:
    host = facts.host
    gpu = host.gpus[0].name if host.gpus else "no GPU"
    memory = f"{host.memory.total / KIB_PER_GIB:.0f} GiB" if host.memory else "? GiB"
    vllm = f"vLLM {host.versions['vllm']}" if host.versions["vllm"] else "no vLLM yet"
    cables = f"{counted_noun(len(host.cabled), 'QSFP cage')} cabled"
    return f"{gpu}, {memory}, {cables}, {vllm}"
