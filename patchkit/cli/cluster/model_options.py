"""Say on which nodes the models lie: those of cluster.toml, or the ones that are named."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from patchkit.cluster.launch.cluster_file import FILE, MODELS, VENV, ClusterFile, read_cluster_file
from patchkit.cluster.models.names import split_revision
from patchkit.cluster.models.sync import ModelNode
from patchkit.cluster.ssh.ssh import HERE
from patchkit.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNodes:
    """The nodes, the head first; ``python`` is the one with vLLM, and ``file`` pins models."""

    nodes: tuple[ModelNode, ...]
    python: str
    file: Path | None
    cluster: ClusterFile | None

    @property
    def head(self) -> ModelNode:
        return self.nodes[0]

    def wanted(self, spec: str) -> tuple[str, str]:
        """Return repository and commit of ``REPO[@COMMIT]``; the pinned one if none is named."""
        repo, commit = split_revision(spec)
        if not commit and self.cluster:
            commit = self.cluster.models.get(repo, "")
        return repo, commit


def node_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add --file, --here, --node, --models and --python; hand them on as ``place``."""

    @functools.wraps(command)
    def wrapped(
        file: Path | None,
        here: bool,
        nodes: tuple[str, ...],
        models: str | None,
        python: str | None,
        **rest: Any,
    ) -> None:
        named = (HERE,) if here else nodes
        command(place=_nodes(file, named, models, python), **rest)

    for option in (
        click.option("--python", metavar="PATH", help="The Python that has vLLM, there."),
        click.option("--models", metavar="DIR", help=f"The folder of models.  [default: {MODELS}]"),
        click.option(
            "--node",
            "nodes",
            multiple=True,
            metavar="SSH[=PEER]",
            help="A node, as ssh reaches it from here, and from the other nodes; repeat. Without "
            "it those of the cluster file; without a file this machine.",
        ),
        click.option(
            "--file",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help=f"The cluster, and the pinned commits.  [default: {FILE}, if it is there]",
        ),
        click.option("--here", is_flag=True, help="This machine alone."),
    ):
        wrapped = option(wrapped)
    return wrapped


def _nodes(
    named_file: Path | None, named: tuple[str, ...], models: str | None, python: str | None
) -> ModelNodes:
    file = named_file or (FILE if FILE.exists() else None)
    read = read_cluster_file(file) if file else None
    folder = models or (read.model_folder if read else MODELS)
    known = {node.ssh: node.from_head for node in read.node} if read else {}
    if not named:
        named = tuple(known) or (HERE,)
    nodes = []
    for word in named:
        ssh, _, peer = word.partition("=")
        if not ssh:
            raise UsageError(f"--node {word}: names no node", hint="--node spark-1")
        nodes.append(ModelNode(ssh=ssh, peer=peer or known.get(ssh, ssh), models=folder))
    default = f"{read.venv if read else VENV}/bin/python"
    return ModelNodes(nodes=tuple(nodes), python=python or default, file=file, cluster=read)
