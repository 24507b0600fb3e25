"""Write a manifest for Kubernetes' LeaderWorkerSet: vLLM's own way over nodes. Pure.

One pod a node; a rank that ends takes its group with it, as the units of `patchkit cluster` do. The
templates are in recipes/export. What goes into them is JSON, which is YAML to every reader.

Kubernetes puts ``$(NAME)`` into commands and values of variables; ``$$`` is a dollar sign. So every
text that is not meant so is escaped.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from string import Template
from textwrap import indent
from typing import Any

from patchkit.cluster.launch.cluster_file import ClusterFile
from patchkit.cluster.launch.plan import (
    PlannedRank,
    ServedModel,
    absolute,
    served_words,
    start_limit,
)
from patchkit.cluster.launch.units import ASK_AGAIN, BURST, SCRIPT, STOP
from patchkit.errors import HostError, UsageError
from patchkit.measure import pod_script
from patchkit.quoting import visible
from patchkit.records import RECIPES
from patchkit.runtime.rules.variable_rules import cache_variables

OWN_DEVICE = "host"  # of KubernetesOptions.rdma: the host's device, in a privileged container
RDMA = "rdma/hca_shared_devices_a"  # the name in the RDMA shared device plugin's own examples
CACHE = "/var/cache/patchkit"  # on a disk of each node: compiled code and downloads
ARCH_LABELS = {"aarch64": "arm64", "x86_64": "amd64"}  # a target's CPU → kubernetes.io/arch
_ADDRESS = "HOST_IP"  # the node's own, by Kubernetes
# Flag → the variable that stands for its value in a pod; LWS sets the last two.
_PLACED = {
    "--host": _ADDRESS,
    "--node-rank": "LWS_WORKER_INDEX",
    "--master-addr": "LWS_LEADER_ADDRESS",
}
_SECRETS = ("VLLM_API_KEY", "HF_TOKEN")
_VARIABLE = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOptions:
    """The choices of a manifest; ``groups`` is how many times the model is served.

    ``rdma`` is the name of a device plugin's resource, ``host`` for the host's own device, "" for
    none; ``selector`` are labels of nodes.
    """

    image: str
    rdma: str
    cache: str = CACHE
    groups: int = 1
    selector: Mapping[str, str] = field(default_factory=dict)


def kubernetes_manifest(
    cluster: ClusterFile,
    ranks: Sequence[PlannedRank],
    model: ServedModel,
    options: KubernetesOptions,
) -> str:
    """Return the ConfigMap of scripts, the LeaderWorkerSet, and the Service of its leaders.

    Raises UsageError for Ray, and a name or a path that Kubernetes does not take; HostError for
    workers that need different variables: they have one template.
    """
    _check_cluster(cluster, ranks)
    leader, *workers = (_Pod(cluster, rank, model, options) for rank in ranks)
    for worker in workers[1:]:
        _check_equal(workers[0], worker)
    flags = dict(pairwise(leader.words))
    port, master_port = int(flags.get("--port", cluster.serve.port)), int(flags["--master-port"])
    if port == master_port:
        raise UsageError(
            f"port {port} is that of the ranks' rendezvous",
            hint="take another one for the server: port = 8000 in [serve] of a cluster.toml",
        )
    group = SCRIPT.read_text(encoding="utf-8")
    pod = Path(pod_script.__file__).read_text(encoding="utf-8")
    # Its name holds its digest, so that other scripts are other pods.
    digest = hashlib.sha256((group + pod).encode()).hexdigest()[:8]
    name, scripts = cluster.name, f"{cluster.name}-scripts-{digest}"
    server = {"seconds": start_limit(cluster, ranks[0]), "port": port, "master_port": master_port}
    url = {"name": "PATCHKIT_URL", "value": f"http://$({_ADDRESS}):{port}"}
    node, system = ranks[0].env.node, ranks[0].facts.host.system
    what = f"{model.name}, vLLM {node.vllm}, {len(ranks)} nodes, {node.attachment.topology};"
    what += f" interfaces as on {system.hostname or 'the head'}."
    labels = {"app.kubernetes.io/managed-by": "patchkit"}
    return _fill_template(
        "kubernetes.yaml",
        what=visible(what).replace("\n", " "),
        scripts_metadata={"name": scripts, "labels": labels},
        metadata={"name": name, "labels": labels},
        service_metadata={"name": f"{name}-leader", "labels": labels},
        group=group.rstrip(),
        pod=pod.rstrip(),
        groups=options.groups,
        size=len(ranks),
        leader=leader.template(scripts, _fill_template("server.yaml", **server).rstrip(), url),
        worker=workers[0].template(scripts),
        name=to_yaml(name),
        port=port,
    )


def to_yaml(value: object) -> str:
    """Return a value as JSON in ASCII, with YAML's escapes. Raises UsageError for no Unicode."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(
            "a name or a path is not Unicode", hint="Kubernetes takes none such: rename it"
        ) from None
    return "".join(c if " " <= c <= "~" else f"\\U{ord(c):08x}" for c in text)


def escape_dollars(text: str) -> str:
    """Return a text in which Kubernetes puts nothing."""
    return text.replace("$", "$$")


def _fill_template(file: str, **values: object) -> str:
    """Return a template with its values: texts as they are, all else as JSON.

    A line that is a value alone becomes its lines, or the items of its list, as far indented.
    """
    texts = {name: v if isinstance(v, str) else to_yaml(v) for name, v in values.items()}
    lines = []
    for line in (RECIPES / "export" / file).read_text(encoding="utf-8").splitlines():
        name = line.strip().removeprefix("$")
        if line.strip() != f"${name}" or name not in values:
            lines.append(Template(line).substitute(texts))
            continue
        value, text = values[name], texts[name]
        if isinstance(value, list):
            text = "\n".join(f"- {to_yaml(item)}" for item in value)
        if text:
            lines.append(indent(text, line.partition("$")[0]))
    return "\n".join(lines) + "\n"


def _check_cluster(cluster: ClusterFile, ranks: Sequence[PlannedRank]) -> None:
    if ranks[0].env.node.executor.name == "ray":
        raise UsageError(
            "a LeaderWorkerSet needs no Ray: vLLM's own --nnodes joins its pods",
            hint='executor = "mp" in [serve]',
        )
    if cluster.serve.host:
        raise UsageError(
            f"host = {cluster.serve.host} in [serve] is one machine's address",
            why="the server of a pod listens at the address of the node that it is on",
            hint="leave it out",
        )
    if cluster.name.endswith("-"):
        raise UsageError(f"{cluster.name!r} cannot name a Service", hint="no - at the end")


class _Pod:
    """A rank as a pod runs it; every text is escaped."""

    def __init__(
        self,
        cluster: ClusterFile,
        rank: PlannedRank,
        model: ServedModel,
        options: KubernetesOptions,
    ) -> None:
        assert rank.command is not None
        self.rank, self.options, self.secret = rank, options, f"{cluster.name}-secrets"
        self.words = served_words(cluster, rank.command, model)
        self.folder = absolute(model.folder, rank.facts)
        self.command = [
            f"$({_PLACED[before]})" if before in _PLACED else escape_dollars(word)
            for before, word in zip(("", *self.words), self.words, strict=False)
        ]

    def template(self, scripts: str, server: str = "", *more: dict[str, str]) -> str:
        """Return the pod's template; ``scripts`` is the ConfigMap of what its probes run."""
        options = self.options
        folders = {"cache": options.cache, **({"model": self.folder} if self.folder else {})}
        limits = {"nvidia.com/gpu": "1"}
        capabilities = {"drop": ["ALL"]}
        rights = {"allowPrivilegeEscalation": False, "capabilities": capabilities}
        if options.rdma == OWN_DEVICE:
            # A device that no plugin gives is closed by the container's control group.
            folders["infiniband"] = "/dev/infiniband"
            rights = {"privileged": True}
        elif options.rdma:
            limits[options.rdma] = "1"
            capabilities["add"] = ["IPC_LOCK"]
        mounts: list[dict[str, Any]] = []
        for name, path in folders.items():
            parts = path.split("/")
            if not path.startswith("/") or not path.isprintable() or ":" in path or ".." in parts:
                raise UsageError(
                    f"{path!r} cannot be mounted into a pod",
                    why="it takes an absolute path without a colon and without ..",
                    hint="a folder such as /srv/models/NAME, the same on every node",
                )
            mounts.append({"name": name, "mountPath": path})
            if name == "model":
                mounts[-1]["readOnly"] = True
        return _fill_template(
            "pod.yaml",
            stop=STOP,
            selector=dict(options.selector),
            image=to_yaml(options.image),
            starts=BURST,
            pause=ASK_AGAIN,
            escaped_cache=to_yaml(escape_dollars(options.cache)),
            cache=to_yaml(options.cache),
            command=self.command,
            env=[*self.variables(), *more],
            server=server,
            limits=limits,
            rights=rights,
            mounts=mounts,
            scripts=to_yaml(scripts),
            volumes=[
                {"name": name, "hostPath": {"path": path, "type": "Directory"}}
                for name, path in folders.items()
            ],
        ).rstrip()

    def variables(self) -> Iterator[dict[str, Any]]:
        """Yield the node's address first: what follows may name it."""
        yield {"name": _ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}
        cache = self.options.cache  # on the node, where the pod has none of its own folders
        settings = [each for each in self.rank.env.settings if each.rule != "caches"]
        for setting in settings:
            if not _VARIABLE.fullmatch(setting.name):
                raise UsageError(f"{setting.name!r} cannot be a variable of a pod")
            if not setting.value:  # a secret: the plan of a node takes none with a value
                yield self._secret_variable(setting.name, optional=False)
            elif setting.scope == "host" and setting.value == self.rank.address:
                yield {"name": setting.name, "value": f"$({_ADDRESS})"}
            else:
                yield {"name": setting.name, "value": escape_dollars(setting.value)}
        given = {setting.name for setting in settings}
        # What is compiled stays on a disk of the node.
        caches = cache_variables(cache, self.rank.env.node.vllm)
        caches["HF_HOME"] = f"{cache}/huggingface"
        for name, value in caches.items():
            if name not in given:
                yield {"name": name, "value": escape_dollars(value)}
        for name in _SECRETS:
            if name not in given:
                yield self._secret_variable(name, optional=True)

    def _secret_variable(self, name: str, *, optional: bool) -> dict[str, Any]:
        reference = {"name": self.secret, "key": name, "optional": optional}
        return {"name": name, "valueFrom": {"secretKeyRef": reference}}


def _check_equal(first: _Pod, worker: _Pod) -> None:
    """Raise HostError where one template does not fit both workers."""
    left, right = (  # what the template holds of a worker: no address
        {it.name: it.value for it in pod.rank.env.settings if it.value != pod.rank.address}
        | {"the command": " ".join(pod.command), "the model": pod.folder}
        for pod in (first, worker)
    )
    for name in {**left, **right}:
        here, there = left.get(name), right.get(name)
        if here != there:
            raise HostError(
                f"{name} is {here} on {first.rank.ssh} and {there} on {worker.rank.ssh}",
                why="the workers of a LeaderWorkerSet have one template",
                hint="cable the same port on every node, with the same software; or serve "
                "with `patchkit up`, where each node has its own file",
            )
