"""Share options between the verbs about several machines, and read the cluster they name."""

import functools
import sys
from pathlib import Path
from typing import Any

from patchkit.cli.out import record_fields
from patchkit.cli.render import Verb, gigabytes, options_of
from patchkit.cluster.launch.cluster import Cluster, read_cluster_file
from patchkit.cluster.launch.cluster_file import (
    FILE,
    VENV,
    ClusterNode,
)
from patchkit.cluster.ssh.node import Copied
from patchkit.cluster.ssh.ssh import HERE
from patchkit.errors import PatchkitError
from patchkit.frozen import Fields

_RATE_BYTES = 1e8  # bytes; the speed of a smaller copy says nothing


def cluster_option(verb: Verb) -> Verb:
    """Add ``--file`` and ``--here``; the verb takes the cluster that they name."""

    @functools.wraps(verb)
    def wrapped(*arguments: Any, file: Path, here: bool, **options: Any) -> Any:
        is_missing = file == FILE and not file.exists()
        is_alone = here or is_missing
        cluster = cluster_here() if is_alone else read_cluster_file(file)
        return verb(*arguments, cluster=cluster, **options)

    return options_of("cluster")(wrapped)


def cluster_here(venv: str | None = None, **choices: Any) -> Cluster:
    """Return this machine as a cluster of one node; ``venv`` defaults to the one that runs this."""
    if not venv:
        own_vllm = Path(sys.prefix) / "bin/vllm"
        venv = sys.prefix if own_vllm.exists() else VENV
    if not venv.startswith("~"):
        venv = str(Path(venv).absolute())

    node = ClusterNode(ssh=HERE)
    return Cluster(members=(node,), venv=venv, **choices)


def node_fields(node: str, answer: object, **more: object) -> Fields:
    """Return the fields of a node for JSON: its answer, or the error if it gave none."""
    if isinstance(answer, PatchkitError):
        return {
            "node": node,
            "error": answer.what,
            "why": answer.why,
            "next": answer.hint,
        }
    return {
        "node": node,
        **more,
        **record_fields(answer),
    }


def sent_amount(sent: Copied) -> str:
    """Return a text that says how much was copied, and how fast."""
    text = f"{gigabytes(sent.sent)} in {sent.seconds:,.1f} s"
    if sent.sent >= _RATE_BYTES:
        text += f", {sent.sent / 1e9 / max(sent.seconds, 1e-3):.2f} GB/s"
    return text
