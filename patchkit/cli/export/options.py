"""Share what `patchkit export kubernetes` and `export ray` ask: a model, and for which machines."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from patchkit.cli import complete
from patchkit.cli.out import data, say, style
from patchkit.cli.runtime.node_options import NCCL, TARGET, TRITON, VLLM
from patchkit.cluster.agent.node_facts import NodeFacts, model_on_node
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.cluster_file import (
    ClusterFile,
    ClusterNode,
    ServeChoices,
    read_cluster_file,
)
from patchkit.cluster.launch.plan import PlannedRank, ServedModel, planned_ranks, served_model
from patchkit.errors import UsageError
from patchkit.measure.fleet import equal_nodes, facts_of, with_versions
from patchkit.runtime.envfile.facts import nodes_max
from patchkit.runtime.envfile.write import write
from patchkit.runtime.host.machine_root import LIVE
from patchkit.runtime.host.probe import probe
from patchkit.runtime.node.lock_file import locked_versions

F = TypeVar("F", bound=Callable[..., Any])

_NODES = 2  # of a fleet whose number nobody says
_OPTIONS = (
    click.argument("model", shell_complete=complete.models),
    click.option(
        "--file",
        type=click.Path(path_type=Path),
        help="A cluster.toml: its [serve], and its nodes, asked by ssh; default: this machine.",
    ),
    click.option(
        "--nodes",
        type=click.IntRange(2, nodes_max()),
        metavar="N",
        help="So many machines that are as the first, which alone is asked; default: 2.",
    ),
    click.option(
        "--root",
        type=click.Path(path_type=Path, exists=True, file_okay=False),
        help="Instead of this machine: what `patchkit probe --save` wrote on the head.",
    ),
    click.option(
        "--lock",
        type=click.Path(path_type=Path, exists=True),
        metavar="WHEELHOUSE",
        help="The versions that will run: those of this wheelhouse.",
    ),
    VLLM,
    NCCL,
    TRITON,
    TARGET,
    click.option(
        "--head-ip",
        metavar="A",
        default="",
        help="The head's IPv4 address. On the LAN: control goes there, data over the cable.",
    ),
    click.option(
        "--topology", type=click.Choice(["auto", "roce", "socket", "ring", "hetero"]), default=None
    ),
    click.option("--port", type=click.IntRange(1, 65535), help="The server's.  [default: 8000]"),
    click.option("--with", "wanted", metavar="ID", multiple=True, help="Turn a rule on."),
    click.option("--without", "unwanted", metavar="ID", multiple=True, help="Turn a rule off."),
    click.option("--set", "extra", metavar="NAME=VALUE", multiple=True, help="Add a variable."),
    click.option(
        "-o",
        "--output",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="Write FILE, all or nothing; default: standard output.",
    ),
    click.option("--force", is_flag=True, help="Replace a FILE with another content."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A model planned for a cluster: what a manifest or a job is made of."""

    cluster: ClusterFile
    model: ServedModel
    ranks: tuple[PlannedRank, ...]


def exported(executor: str = "") -> Callable[[F], F]:
    """Add the options, and hand over the plan; ``executor`` is what starts the ranks, if given."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def wrapped(*, model: str, output: Path | None, force: bool, **options: Any) -> Any:
            given = {name: options.pop(name) for name in _ASKED}
            plan = _planned(model, given, executor)
            return function(plan=plan, output=output, force=force, **options)

        decorated = cast("F", wrapped)
        for option in reversed(_OPTIONS):
            decorated = option(decorated)
        return decorated

    return decorate


_ASKED = (
    *("file", "nodes", "root", "lock", "vllm", "nccl", "triton", "target"),
    *("head_ip", "topology", "port", "wanted", "unwanted", "extra"),
)


def _planned(name: str, options: Mapping[str, Any], executor: str) -> Exported:
    path: Path | None = options["file"]
    file = read_cluster_file(path) if path else None
    serve = _choices(file.serve if file else ServeChoices(), options, executor)
    named = file.node if file else (ClusterNode(ssh="head"),)
    head = replace(named[0], address=options["head_ip"] or named[0].address)
    cluster = replace(file or ClusterFile(node=named), node=(head, *named[1:]), serve=serve)
    model = served_model(cluster, name)
    versions = {key: options[key] for key in ("vllm", "nccl", "triton")}
    if options["lock"]:
        given = {key: value for key, value in versions.items() if value}
        versions = {**locked_versions(options["lock"]), **given}
    count = options["nodes"] or (len(named) if len(named) > 1 else _NODES)
    asked = _asked(file is not None and not options["root"], cluster, options, model)
    facts = [with_versions(each, versions) for each in asked]
    if len(facts) == 1:
        facts = equal_nodes(facts[0], count)
        others = (ClusterNode(ssh=f"worker-{number}") for number in range(1, count))
        cluster = replace(cluster, node=(head, *others))
    return Exported(cluster=cluster, model=model, ranks=tuple(planned_ranks(cluster, facts, model)))


def _asked(
    by_ssh: bool, cluster: ClusterFile, options: Mapping[str, Any], model: ServedModel
) -> list[NodeFacts]:
    """Return the facts of the machines that are asked: those of the file, or one of them."""
    models = [model.folder] if model.folder else []
    if by_ssh:
        asked = replace(cluster, node=cluster.node[:1]) if options["nodes"] else cluster
        return Cluster(asked).facts(models)
    root: Path = options["root"] or LIVE
    if root != LIVE and model.folder.startswith("~/"):
        raise UsageError(
            f"{model.folder} is in a home, and {root} does not say whose",
            hint='name the folder from /: model_folder = "/srv/models" in the file',
        )
    facts = facts_of(probe(root, environment=os.environ), str(Path.home()))
    here = {each: model_on_node(each) for each in models if root == LIVE}
    return [replace(facts, models=here)]


def _choices(serve: ServeChoices, options: Mapping[str, Any], executor: str) -> ServeChoices:
    """Return the choices of the file with those of the command line in their place."""
    extra = dict(map(_assignment, options["extra"]))
    return replace(
        serve,
        executor=cast("Any", executor or serve.executor),
        topology=options["topology"] or serve.topology,
        port=options["port"] or serve.port,
        target=options["target"] or serve.target,
        wanted=(*serve.wanted, *options["wanted"]),
        unwanted=(*serve.unwanted, *options["unwanted"]),
        set={**serve.set, **extra},
    )


def _assignment(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise UsageError(f"--set {text}: is not an assignment", hint="write it as --set NAME=VALUE")
    return name, value


def put(text: str, output: Path | None, *, force: bool, what: str, by: str) -> None:
    """Write the file and say so, or print the text."""
    if output is None:
        data(text)
        return
    outcome = write(output, text, force=force, private=False, by=by)
    say(style("✓", fg="green") + f" {output} {outcome}: {what}")


def tell_notes(plan: Exported, *more: str) -> None:
    """Print on standard error what a user should know of the plan."""
    env = plan.ranks[0].env
    for note in dict.fromkeys((*env.notes, *(plan.ranks[-1].env.notes), *more)):
        say(style("note", fg="yellow") + f" {note}", err=True)
    for each in env.advice:
        say(style("beware", fg="yellow") + f" {each.says}; instead: {each.instead}", err=True)
