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
    def pins(self) -> dict[str, str]:
        return dict(self.cluster.models) if self.cluster else {}

    def find_commit(self, spec: str) -> tuple[str, str]:
        """Return repository and commit of ``REPO[@COMMIT]``; the pinned one if none is named."""
        repo, commit = split_revision(spec)
        return repo, commit or self.pins.get(repo, "")


def node_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --file, --node, --models and --python; hand them on as ``place``."""

    @functools.wraps(command)
    def with_nodes(
        file: Path | None,
        nodes: tuple[str, ...],
        models: str | None,
        python: str | None,
        **rest: Any,
    ) -> None:
        command(place=_read_nodes(file, nodes, models, python), **rest)

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
    ):
        with_nodes = option(with_nodes)
    return with_nodes


def _read_nodes(
    file: Path | None, names: tuple[str, ...], models: str | None, python: str | None
) -> ModelNodes:
    file = file or (FILE if FILE.exists() else None)
    cluster = read_cluster_file(file) if file else None
    folder = models or (cluster.model_folder if cluster else MODELS)
    peers = {node.ssh: node.from_head for node in cluster.node} if cluster else {}
    nodes = []
    for name in names or tuple(peers) or (HERE,):
        ssh, _, peer = name.partition("=")
        if not ssh:
            raise UsageError(f"--node {name}: names no node", hint="--node spark-1")
        nodes.append(ModelNode(ssh=ssh, peer=peer or peers.get(ssh, ssh), models=folder))
    python = python or f"{cluster.venv if cluster else VENV}/bin/python"
    return ModelNodes(nodes=tuple(nodes), python=python, file=file, cluster=cluster)
