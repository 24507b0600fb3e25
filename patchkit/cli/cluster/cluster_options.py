"""Share options between the verbs of `patchkit cluster`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.cluster_file import (
    FILE,
    VENV,
    ClusterFile,
    ClusterNode,
    read_cluster_file,
)
from patchkit.cluster.ssh.ssh import HERE

F = TypeVar("F", bound=Callable[..., Any])


_FILE = click.option(
    "--file", type=click.Path(path_type=Path), default=FILE, show_default=True, help="The cluster."
)


BREAK_LOCK = click.option("--break-lock", is_flag=True, help="End another patchkit that is at it.")


def cluster_option(function: F) -> F:
    """Add ``--file`` and ``--break-lock``, and hand over the cluster that it names."""

    @_FILE
    @BREAK_LOCK
    @functools.wraps(function)
    def wrapped(*arguments: Any, file: Path, break_lock: bool, **options: Any) -> Any:
        cluster = replace(named(file), break_lock=break_lock)
        return function(*arguments, cluster=cluster, **options)

    return cast("F", wrapped)


def cluster_or_here(function: F) -> F:
    """Add ``--file`` and ``--here``, and hand over the cluster that they name."""

    @_FILE
    @click.option("--here", is_flag=True, help="This machine alone, as `patchkit up` has it.")
    @functools.wraps(function)
    def wrapped(*arguments: Any, file: Path, here: bool, **options: Any) -> Any:
        return function(*arguments, cluster=alone() if here else named(file), **options)

    return cast("F", wrapped)


def named(file: Path) -> Cluster:
    """Return the cluster of a file."""
    return Cluster(read_cluster_file(file))


def alone(venv: str | None = None, **choices: Any) -> Cluster:
    """Return this machine as a cluster of one; by default with the environment that runs this."""
    own = Path(sys.prefix)
    place = venv or (str(own) if (own / "bin" / "vllm").exists() else VENV)
    if not place.startswith("~"):
        place = str(Path(place).absolute())
    return Cluster(ClusterFile(node=(ClusterNode(ssh=HERE),), venv=place, **choices))
