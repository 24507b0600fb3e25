"""Share options between the verbs that serve: which machines, and on whose behalf."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from patchkit.cli.out import PATH, record_fields
from patchkit.cli.render import gigabytes
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.cluster_file import (
    FILE,
    VENV,
    ClusterFile,
    ClusterNode,
    read_cluster_file,
)
from patchkit.cluster.ssh.rsync import Copied
from patchkit.cluster.ssh.ssh import HERE
from patchkit.errors import PatchkitError

F = TypeVar("F", bound=Callable[..., Any])

_FEW = 1e8  # bytes; a speed of less says nothing
FILE_OPTION = click.option(
    "--file", type=PATH, default=FILE, show_default=True, help="Its file."
)


def cluster_option(function: F) -> F:
    """Add ``--file`` and ``--here``, and hand over the cluster that they name."""

    @FILE_OPTION
    @click.option(
        "--here", is_flag=True, help="This machine; the default without cluster.toml."
    )
    @functools.wraps(function)
    def wrapped(*arguments: Any, file: Path, here: bool, **options: Any) -> Any:
        alone = here or (file == FILE and not file.exists())
        cluster = cluster_here() if alone else Cluster(read_cluster_file(file))
        return function(*arguments, cluster=cluster, **options)

    return cast("F", wrapped)


def cluster_here(venv: str | None = None, **choices: Any) -> Cluster:
    """Return this machine as a cluster of one; by default with the environment that runs this."""
    own = Path(sys.prefix)
    place = venv or (str(own) if (own / "bin" / "vllm").exists() else VENV)
    if not place.startswith("~"):
        place = str(Path(place).absolute())
    return Cluster(ClusterFile(node=(ClusterNode(ssh=HERE),), venv=place, **choices))


def node_fields(node: str, answer: object, **more: object) -> dict[str, object]:
    """Return what --json says of a node: its answer, or why it gave none."""
    if isinstance(answer, PatchkitError):
        return {
            "node": node,
            "error": answer.what,
            "why": answer.why,
            "next": answer.hint,
        }
    return {"node": node, **more, **record_fields(answer)}


def sent_amount(sent: Copied) -> str:
    """Return how much was copied, and how fast."""
    fast = (
        f", {sent.sent / 1e9 / max(sent.seconds, 1e-3):.2f} GB/s"
        if sent.sent >= _FEW
        else ""
    )
    return f"{gigabytes(sent.sent)} in {sent.seconds:,.1f} s{fast}"
