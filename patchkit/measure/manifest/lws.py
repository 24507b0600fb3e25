"""Make the objects of a manifest for Kubernetes' LeaderWorkerSet: vLLM's own way over nodes. Pure.

One pod a node; a rank that ends takes its group with it, as the units of `patchkit cluster` do.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from typing import Any

from patchkit.cluster.launch.cluster_file import ClusterFile
from patchkit.cluster.launch.plan import (
    PlannedRank,
    ServedModel,
    absolute,
    served_words,
    start_limit,
)
from patchkit.cluster.launch.units import SCRIPT
from patchkit.errors import HostError, UsageError
from patchkit.measure.manifest import pod_script
from patchkit.measure.manifest.kubernetes import kubernetes_facts
from patchkit.measure.manifest.pod import PodOptions, PodRank, pod_template, pod_words

_WIDTH = 98  # columns of a comment
_NAME = re.compile(r"[a-z](?:[a-z0-9-]{0,29}[a-z0-9])?")  # of a Service; pods add -0-12 to it
_DIGEST = re.compile(r"(?P<name>[\w.-]+(?::\d+)?(?:/[\w.-]+)*)(?::[\w.-]+)?@sha256:[0-9a-f]{64}")
_TAG = re.compile(r"[\w.-]+(?::\d+)?(?:/[\w.-]+)*(?::[\w.-]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class LwsOptions:
    """``name`` of the set, ``groups`` how many times the model is served, ``namespace`` or ""."""

    pods: PodOptions
    name: str = "vllm"
    namespace: str = ""
    groups: int = 1


def check_image(image: str, *, tag: bool) -> None:
    """Raise UsageError for an image that is not named by its digest, unless a ``tag`` will do."""
    if _DIGEST.fullmatch(image) or (tag and _TAG.fullmatch(image)):
        return
    if not _TAG.fullmatch(image):
        raise UsageError(f"{image!r} names no image", hint="as REGISTRY/NAME@sha256:DIGEST")
    raise UsageError(
        f"{image} is not one image: its tag can be moved",
        why="ranks of two images do not understand each other, and each node pulls by itself",
        hint="name it by its digest, REGISTRY/NAME@sha256:DIGEST; or say --allow-tag",
    )


def lws_objects(
    cluster: ClusterFile, ranks: Sequence[PlannedRank], model: ServedModel, options: LwsOptions
) -> list[dict[str, Any]]:
    """Return the ConfigMap of scripts, the LeaderWorkerSet, and the Service of its leaders.

    Raises UsageError for Ray, and a name or a path that Kubernetes does not take; HostError for
    workers that need different variables: they have one template.
    """
    _check(cluster, ranks, options)
    leader, *workers = (_pod_rank(cluster, each, ranks[0], model) for each in ranks)
    _check_ports(leader)
    _check_equal(workers)
    config = _scripts(options)
    scripts = str(config["metadata"]["name"])
    spec = {
        "replicas": options.groups,
        # A worker's pod is made beside its leader's: one waits for the other in the rendezvous.
        "startupPolicy": "LeaderCreated",
        "leaderWorkerTemplate": {
            "size": len(ranks),
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": pod_template(leader, options.pods, scripts),
            "workerTemplate": pod_template(workers[0], options.pods, scripts),
        },
    }
    return [
        config,
        {
            "apiVersion": "leaderworkerset.x-k8s.io/v1",
            "kind": "LeaderWorkerSet",
            "metadata": _metadata(options, options.name),
            "spec": spec,
        },
        _service(options, leader.port),
    ]


def _check(cluster: ClusterFile, ranks: Sequence[PlannedRank], options: LwsOptions) -> None:
    if len(ranks) == 1:
        raise UsageError(
            "one node is no group", hint="say how many with --nodes, the head included"
        )
    if ranks[0].env.node.executor.name == "ray":
        raise UsageError(
            "a LeaderWorkerSet needs no Ray: vLLM's own --nnodes joins its pods",
            hint='executor = "mp" in [serve]; an existing Ray cluster: `patchkit export ray`',
        )
    if cluster.serve.host:
        raise UsageError(
            f"host = {cluster.serve.host} in [serve] is one machine's address",
            why="the server of a pod listens at the address of the node that it is on",
            hint="leave it out",
        )
    if not _NAME.fullmatch(options.name):
        raise UsageError(
            f"{options.name!r} cannot name a Service",
            hint="a-z, 0-9 and -, beginning with a letter, 31 at most, no - at the end",
        )


def _pod_rank(
    cluster: ClusterFile, rank: PlannedRank, head: PlannedRank, model: ServedModel
) -> PodRank:
    assert rank.command is not None
    words = served_words(cluster, rank.command, model)
    ports = dict(pairwise(words))
    return PodRank(
        rank=rank,
        words=words,
        folder=absolute(model.folder, rank.facts),
        port=int(ports.get("--port", cluster.serve.port)),
        master_port=int(ports["--master-port"]),
        seconds=start_limit(cluster, head) if rank is head else 0,
    )


def _check_ports(leader: PodRank) -> None:
    if leader.port == leader.master_port:
        raise UsageError(
            f"port {leader.port} is that of the ranks' rendezvous",
            hint="take another one for the server: --port 8000",
        )


def _check_equal(workers: Sequence[PodRank]) -> None:
    """Raise HostError where one template does not fit all workers."""
    first, *others = (_of_template(each) for each in workers)
    for worker, its in zip(workers[1:], others, strict=True):
        for name in {**first, **its}:
            here, there = first.get(name), its.get(name)
            if here != there:
                raise HostError(
                    f"{name} is {here} on {workers[0].rank.ssh} and {there} on {worker.rank.ssh}",
                    why="the workers of a LeaderWorkerSet have one template",
                    hint="cable the same port on every node, with the same software; or serve "
                    "with `patchkit cluster up`, where each node has its own file",
                )


def _of_template(worker: PodRank) -> dict[str, str]:
    """Return what a template holds of a worker: variables but for its own address, and words."""
    settings = worker.rank.env.settings
    own = {each.name: each.value for each in settings if each.value != worker.rank.address}
    return {**own, "the command": " ".join(pod_words(worker.words)), "the model": worker.folder}


def _scripts(options: LwsOptions) -> dict[str, Any]:
    """Return the ConfigMap; its name holds its digest, so that other scripts are other pods."""
    data = {
        "group.json": json.dumps({"url": "http://127.0.0.1:8000"}) + "\n",
        "group.py": SCRIPT.read_text(encoding="utf-8"),
        "pod.py": Path(pod_script.__file__).read_text(encoding="utf-8"),
    }
    digest = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:8]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(options, f"{options.name}-scripts-{digest}"),
        "immutable": True,
        "data": data,
    }


def _service(options: LwsOptions, port: int) -> dict[str, Any]:
    names = kubernetes_facts().pods
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(options, f"{options.name}-leader"),
        "spec": {
            "selector": {names.set_label: options.name, names.rank_label: "0"},
            "ports": [{"name": "http", "port": port, "targetPort": port}],
        },
    }


def _metadata(options: LwsOptions, name: str) -> dict[str, Any]:
    space = {"namespace": options.namespace} if options.namespace else {}
    return {"name": name, **space, "labels": {"app.kubernetes.io/managed-by": "patchkit"}}


def comments(ranks: Sequence[PlannedRank], model: ServedModel) -> Iterator[str]:
    """Yield what stands above a manifest: what it serves, where its values are from, its needs."""
    node = ranks[0].env.node
    yield f"Written by patchkit: {model.name}, vLLM {node.vllm}, {len(ranks)} nodes,"
    yield f"{node.topology}; interfaces as on {ranks[0].facts.host.system.hostname or 'the head'}."
    yield "Not tried on a GB10. What the cluster has to have:"
    for each in kubernetes_facts().need:
        yield from wrap(f"- {each.title}: {each.why}.", _WIDTH, subsequent_indent="  ")
