"""Make a job for an existing Ray cluster: a body of Ray's own REST API for jobs. Pure.

JSON, and not a line for `ray job submit`: older releases of that quote a command by the rules of
Windows, and then give it to a shell.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from patchkit.cluster.launch.cluster_file import ClusterFile
from patchkit.cluster.launch.plan import PlannedRank, ServedModel, served_words
from patchkit.errors import UsageError


def ray_job(
    cluster: ClusterFile, ranks: Sequence[PlannedRank], model: ServedModel
) -> dict[str, Any]:
    """Return the job: its command, and the variables that are the same on every node.

    Raises UsageError for a plan without Ray. A secret, which has no value in a plan, is left out:
    everybody who sees the cluster sees its jobs.
    """
    head = ranks[0]
    if head.env.node.executor.name != "ray" or head.command is None:
        raise UsageError("this plan has no Ray", hint='executor = "ray" in [serve]')
    return {
        "entrypoint": shlex.join(served_words(cluster, head.command, model)),
        "submission_id": cluster.name,
        "runtime_env": {"env_vars": _shared(ranks)},
        "metadata": {"model": model.name, "vllm": head.env.node.vllm},
    }


def _shared(ranks: Sequence[PlannedRank]) -> dict[str, str]:
    """Return the variables that all nodes have alike; a node's own address is none of them."""
    nodes = [{each.name: each.value for each in rank.env.settings} for rank in ranks]
    return {
        name: value
        for name, value in nodes[0].items()
        if value and all(each.get(name) == value for each in nodes)
    }


def own_variables(ranks: Sequence[PlannedRank]) -> list[str]:
    """Return the variables that each node has to have before `ray start`."""
    shared = _shared(ranks)
    names = (each.name for rank in ranks for each in rank.env.settings)
    return [name for name in dict.fromkeys(names) if name not in shared]


def job_text(job: dict[str, Any]) -> str:
    """Return the file."""
    return json.dumps(job, indent=1) + "\n"
