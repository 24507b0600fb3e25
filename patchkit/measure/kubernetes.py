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
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    cache_variables,
    served_words,
    start_limit,
)
from patchkit.cluster.launch.units import ASK_AGAIN, BURST, SCRIPT, STOP
from patchkit.errors import HostError, UsageError
from patchkit.measure import pod_script
from patchkit.paths import RECIPES
from patchkit.quoting import visible

SCRIPTS = "/opt/patchkit"
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
_NAME = re.compile(r"[a-z](?:[a-z0-9-]{0,29}[a-z0-9])?")  # of a Service; pods add -0-12 to it
_DIGEST = re.compile(r"(?P<name>[\w.-]+(?::\d+)?(?:/[\w.-]+)*)(?::[\w.-]+)?@sha256:[0-9a-f]{64}")
_TAG = re.compile(r"[\w.-]+(?::\d+)?(?:/[\w.-]+)*(?::[\w.-]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOptions:
    """The choices of a manifest; ``groups`` is how many times the model is served.

    ``rdma`` is the name of a device plugin's resource, ``host`` for the host's own device, "" for
    none; ``secret`` the Secret that holds keys and tokens; ``selector`` are labels of nodes.
    """

    image: str
    rdma: str
    cache: str
    secret: str
    name: str = "vllm"
    namespace: str = ""
    groups: int = 1
    runtime_class: str = ""
    pull_secret: str = ""
    selector: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRank:
    """A rank as a pod runs it; ``seconds`` is how long a start may take, 0 without a server."""

    rank: PlannedRank
    words: tuple[str, ...]
    folder: str
    port: int
    master_port: int
    seconds: int


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
    _check(cluster, ranks, options)
    leader, *workers = (_pod_rank(cluster, rank, ranks[0], model) for rank in ranks)
    if leader.port == leader.master_port:
        raise UsageError(
            f"port {leader.port} is that of the ranks' rendezvous",
            hint="take another one for the server: --port 8000",
        )
    _check_equal(workers)
    group = SCRIPT.read_text(encoding="utf-8")
    pod = Path(pod_script.__file__).read_text(encoding="utf-8")
    # Its name holds its digest, so that other scripts are other pods.
    scripts = f"{options.name}-scripts-{hashlib.sha256((group + pod).encode()).hexdigest()[:8]}"
    node, system = ranks[0].env.node, ranks[0].facts.host.system
    what = f"{model.name}, vLLM {node.vllm}, {len(ranks)} nodes, {node.topology};"
    what += f" interfaces as on {system.hostname or 'the head'}."
    return _fill(
        "kubernetes.yaml",
        what=visible(what).replace("\n", " "),
        scripts_metadata=_metadata(options, scripts),
        metadata=_metadata(options, options.name),
        service_metadata=_metadata(options, f"{options.name}-leader"),
        group=indent(group.rstrip(), "    "),
        pod=indent(pod.rstrip(), "    "),
        groups=options.groups,
        size=len(ranks),
        leader=indent(_pod(leader, options, scripts).rstrip(), "      "),
        worker=indent(_pod(workers[0], options, scripts).rstrip(), "      "),
        name=to_yaml(options.name),
        port=leader.port,
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
    return re.sub(r"[^\x20-\x7e]", _escape_character, text)


def _escape_character(character: re.Match[str]) -> str:
    code = ord(character[0])
    return f"\\U{code:08x}" if code > 0xFFFF else f"\\u{code:04x}"


def escape_dollars(text: str) -> str:
    """Return a text in which Kubernetes puts nothing."""
    return text.replace("$", "$$")


def _fill(file: str, **values: object) -> str:
    """Return a template with its values; a line that is one empty value is left out."""
    lines = (RECIPES / "export" / file).read_text(encoding="utf-8").splitlines()
    empty = {f"${name}" for name, value in values.items() if value == ""}
    text = "".join(f"{line}\n" for line in lines if line not in empty)
    return Template(text).substitute(values)


def _check(cluster: ClusterFile, ranks: Sequence[PlannedRank], options: KubernetesOptions) -> None:
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
                    "with `patchkit up`, where each node has its own file",
                )


def _of_template(worker: PodRank) -> dict[str, str]:
    """Return what a template holds of a worker: variables but for its own address, and words."""
    settings = worker.rank.env.settings
    own = {each.name: each.value for each in settings if each.value != worker.rank.address}
    return {**own, "the command": " ".join(pod_words(worker.words)), "the model": worker.folder}


def _metadata(options: KubernetesOptions, name: str) -> str:
    space = {"namespace": options.namespace} if options.namespace else {}
    labels = {"app.kubernetes.io/managed-by": "patchkit"}
    return to_yaml({"name": name, **space, "labels": labels})


def _pod(its: PodRank, options: KubernetesOptions, scripts: str) -> str:
    """Return a pod's template; ``scripts`` is the ConfigMap of what its probes run."""
    folders = {"cache": options.cache, **({"model": its.folder} if its.folder else {})}
    limits = {"nvidia.com/gpu": "1"}
    rights: dict[str, Any] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    if options.rdma == OWN_DEVICE:
        # A device that no plugin gives is closed by the container's control group.
        folders["infiniband"] = "/dev/infiniband"
        rights = {"privileged": True}
    elif options.rdma:
        limits[options.rdma] = "1"
        rights["capabilities"]["add"] = ["IPC_LOCK"]
    for path in folders.values():
        _check_path(path)
    mounts = [
        {"name": name, "mountPath": path, **({"readOnly": True} if name == "model" else {})}
        for name, path in folders.items()
    ]
    volumes = [
        {"name": name, "hostPath": {"path": path, "type": "Directory"}}
        for name, path in folders.items()
    ]
    optional: list[str] = []
    if options.runtime_class:
        optional.append(f"  runtimeClassName: {to_yaml(options.runtime_class)}")
    if options.pull_secret:
        optional.append(f"  imagePullSecrets: {to_yaml([{'name': options.pull_secret}])}")
    server = ""
    if its.seconds:
        ports = {"port": its.port, "master_port": its.master_port}
        server = _fill("server.yaml", folder=SCRIPTS, seconds=its.seconds, **ports)
        server = indent(server.rstrip(), "    ")
    return _fill(
        "pod.yaml",
        stop=STOP,
        selector=to_yaml(dict(options.selector)),
        optional="\n".join(optional),
        image=to_yaml(options.image),
        folder=SCRIPTS,
        starts=BURST,
        pause=ASK_AGAIN,
        escaped_cache=to_yaml(escape_dollars(options.cache)),
        cache=to_yaml(options.cache),
        command=_list_items(pod_words(its.words), "    "),
        env=_list_items(_variables(its, options), "    "),
        server=server,
        limits=to_yaml(limits),
        rights=to_yaml(rights),
        mounts=_list_items(mounts, "    "),
        scripts=to_yaml(scripts),
        volumes=_list_items(volumes, "  "),
    )


def _list_items(items: Iterable[object], margin: str) -> str:
    return "\n".join(f"{margin}- {to_yaml(item)}" for item in items)


def pod_words(words: Sequence[str]) -> list[str]:
    """Return a rank's command with the variables that a pod has for the rank and addresses."""
    return [
        f"$({_PLACED[before]})" if before in _PLACED else escape_dollars(word)
        for before, word in zip(("", *words), words, strict=False)
    ]


def _variables(its: PodRank, options: KubernetesOptions) -> Iterator[dict[str, Any]]:
    """Yield the node's address first: what follows may name it."""
    yield {"name": _ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}
    address, given = its.rank.address, set()
    for setting in its.rank.env.settings:
        if not _VARIABLE.fullmatch(setting.name):
            raise UsageError(f"{setting.name!r} cannot be a variable of a pod")
        given.add(setting.name)
        if not setting.value:  # a secret: the plan of a node takes none with a value
            yield _secret(setting.name, options.secret, optional=False)
        elif setting.scope == "host" and setting.value == address:
            yield {"name": setting.name, "value": f"$({_ADDRESS})"}
        else:
            yield {"name": setting.name, "value": escape_dollars(setting.value)}
    home = {"HF_HOME": f"{options.cache}/huggingface"}
    for name, value in {**cache_variables(options.cache), **home}.items():
        if name not in given:
            yield {"name": name, "value": escape_dollars(value)}
    for name in _SECRETS:
        if name not in given:
            yield _secret(name, options.secret, optional=True)
    if its.seconds:
        yield {"name": "PATCHKIT_URL", "value": f"http://$({_ADDRESS}):{its.port}"}


def _secret(name: str, secret: str, *, optional: bool) -> dict[str, Any]:
    reference = {"name": secret, "key": name, "optional": optional}
    return {"name": name, "valueFrom": {"secretKeyRef": reference}}


def _check_path(path: str) -> None:
    """Raise UsageError for what Kubernetes takes for no path of a host, or splits."""
    parts = path.split("/")
    if not path.startswith("/") or not path.isprintable() or ":" in path or ".." in parts:
        raise UsageError(
            f"{path!r} cannot be mounted into a pod",
            why="it takes an absolute path without a colon and without ..",
            hint="a folder such as /srv/models/NAME, the same on every node",
        )
