"""Make the pod of a rank: its command, variables, probes, devices and folders. Pure.

Kubernetes puts ``$(NAME)`` into commands and values of variables; ``$$`` is a dollar sign. So every
text that is not meant so is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from patchkit.cluster.launch.plan import PlannedRank, cache_variables
from patchkit.cluster.launch.units import ASK_AGAIN, BURST, STOP
from patchkit.errors import UsageError
from patchkit.measure.manifest.kubernetes import ProbeTimes, kubernetes_facts

SCRIPTS = "/opt/patchkit"
ADDRESS = "HOST_IP"  # the node's own, by Kubernetes
OWN_DEVICE = "host"  # of PodOptions.rdma: the device of the host, in a privileged container
_SECRETS = ("VLLM_API_KEY", "HF_TOKEN")
_HERE = {"--host": ADDRESS}  # flag → the variable that stands for its value in a pod
_NAMES = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodOptions:
    """The choices about pods.

    ``rdma`` is the name of a device plugin's resource, ``host`` for the host's own device, "" for
    none; ``secret`` the Secret that holds keys and tokens; ``selector`` are labels of nodes.
    """

    image: str
    rdma: str
    cache: str
    secret: str
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

    @property
    def is_leader(self) -> bool:
        return self.seconds > 0


def escaped(text: str) -> str:
    """Return a text in which Kubernetes puts nothing."""
    return text.replace("$", "$$")


def pod_words(words: Sequence[str]) -> list[str]:
    """Return a rank's command with the variables that a pod has for the rank and addresses."""
    names = kubernetes_facts().pods
    there = {**_HERE, "--node-rank": names.rank, "--master-addr": names.leader}
    found: list[str] = []
    for before, word in zip(("", *words), words, strict=False):
        found.append(f"$({there[before]})" if before in there else escaped(word))
    return found


def pod_template(its: PodRank, options: PodOptions, scripts: str) -> dict[str, Any]:
    """Return a pod's template; ``scripts`` is the ConfigMap of what its probes run."""
    names = kubernetes_facts().pods
    mounts, volumes = _folders(its, options, scripts)
    begin = {
        "name": "begin",
        "image": options.image,
        "command": ["python3", "-I", f"{SCRIPTS}/pod.py", str(BURST), str(ASK_AGAIN)],
        "env": [{"name": "PATCHKIT_CACHE", "value": escaped(options.cache)}],
        "securityContext": _rights(rdma=""),
        "volumeMounts": [each for each in mounts if each["name"] in ("scripts", "cache")],
    }
    server = {
        "name": "vllm",
        "image": options.image,
        "command": pod_words(its.words),
        "env": list(_variables(its, options)),
        **({"ports": list(_ports(its)), **_probes(its.seconds)} if its.is_leader else {}),
        "resources": {"limits": _devices(options)},
        "securityContext": _rights(options.rdma),
        "volumeMounts": mounts,
    }
    return {
        "metadata": {"labels": {"app.kubernetes.io/name": "vllm"}},
        "spec": {
            "hostNetwork": True,
            "dnsPolicy": "ClusterFirstWithHostNet",
            # Else a Service called vllm sets VLLM_PORT=tcp://…, at which vLLM stops.
            "enableServiceLinks": False,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": STOP,
            "nodeSelector": dict(options.selector),
            "tolerations": [{"key": names.gpu, "operator": "Exists", "effect": "NoSchedule"}],
            **({"runtimeClassName": options.runtime_class} if options.runtime_class else {}),
            **(
                {"imagePullSecrets": [{"name": options.pull_secret}]} if options.pull_secret else {}
            ),
            "initContainers": [begin],
            "containers": [server],
            "volumes": volumes,
        },
    }


# Variables


def _variables(its: PodRank, options: PodOptions) -> Iterator[dict[str, Any]]:
    """Yield the node's address first: what follows may name it."""
    yield {"name": ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}
    address, given = its.rank.address, set()
    for each in its.rank.env.settings:
        _check_name(each.name)
        given.add(each.name)
        if not each.value:  # a secret: the plan of a node takes none with a value
            yield _secret(each.name, options.secret, optional=False)
        elif each.scope == "host" and each.value == address:
            yield {"name": each.name, "value": f"$({ADDRESS})"}
        else:
            yield {"name": each.name, "value": escaped(each.value)}
    home = {"HF_HOME": f"{options.cache}/huggingface"}
    for name, value in {**cache_variables(options.cache), **home}.items():
        if name not in given:
            yield {"name": name, "value": escaped(value)}
    for name in _SECRETS:
        if name not in given:
            yield _secret(name, options.secret, optional=True)
    if its.is_leader:
        yield {"name": "PATCHKIT_URL", "value": f"http://$({ADDRESS}):{its.port}"}


def _secret(name: str, secret: str, *, optional: bool) -> dict[str, Any]:
    reference = {"name": secret, "key": name, "optional": optional}
    return {"name": name, "valueFrom": {"secretKeyRef": reference}}


def _check_name(name: str) -> None:
    if not _NAMES.fullmatch(name):
        raise UsageError(f"{name!r} cannot be a variable of a pod")


# Devices, ports and probes


def _devices(options: PodOptions) -> dict[str, str]:
    named = options.rdma if options.rdma != OWN_DEVICE else ""
    return {kubernetes_facts().pods.gpu: "1", **({named: "1"} if named else {})}


def _rights(rdma: str) -> dict[str, Any]:
    # A device that no plugin gives is closed by the container's control group, however it is bound.
    if rdma == OWN_DEVICE:
        return {"privileged": True}
    added = {"add": ["IPC_LOCK"]} if rdma else {}
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"], **added}}


def _ports(its: PodRank) -> Iterator[dict[str, Any]]:
    """Yield the host's ports that a leader takes: no second pod with one gets onto the node."""
    yield {"name": "http", "containerPort": its.port}
    yield {"name": "ranks", "containerPort": its.master_port}


def _probes(seconds: int) -> dict[str, Any]:
    times = kubernetes_facts().probes
    return {
        "startupProbe": _probe("ready", times["startup"], seconds),
        "readinessProbe": _probe("token", times["readiness"]),
        "livenessProbe": _probe("token", times["liveness"]),
    }


def _probe(asks: str, times: ProbeTimes, seconds: int = 0) -> dict[str, Any]:
    return {
        "exec": {"command": ["python3", "-I", f"{SCRIPTS}/group.py", asks]},
        "periodSeconds": times.period,
        "timeoutSeconds": times.timeout or seconds,
        "failureThreshold": times.failures,
    }


# Folders


def _folders(
    its: PodRank, options: PodOptions, scripts: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the mounts and the volumes: shared memory, scripts, caches, the model, the device."""
    shared = {"medium": "Memory", "sizeLimit": kubernetes_facts().pods.shm}
    of_host = {"cache": options.cache}
    if its.folder:
        of_host["model"] = its.folder
    if options.rdma == OWN_DEVICE:
        of_host["infiniband"] = "/dev/infiniband"
    for path in of_host.values():
        _check_path(path)
    mounts: list[dict[str, Any]] = [
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - a pod's own
        {"name": "scripts", "mountPath": SCRIPTS, "readOnly": True},
        *({"name": name, "mountPath": path} for name, path in of_host.items()),
    ]
    volumes: list[dict[str, Any]] = [
        {"name": "shm", "emptyDir": shared},
        {"name": "scripts", "configMap": {"name": scripts}},
        # A folder that is not there says so at once; one that Kubernetes made would be root's.
        *(
            {"name": name, "hostPath": {"path": path, "type": "Directory"}}
            for name, path in of_host.items()
        ),
    ]
    for each in mounts:
        if each["name"] == "model":
            each["readOnly"] = True
    return mounts, volumes


def _check_path(path: str) -> None:
    """Raise UsageError for what Kubernetes takes for no path of a host, or splits."""
    parts = path.split("/")
    if not path.startswith("/") or not path.isprintable() or ":" in path or ".." in parts:
        raise UsageError(
            f"{path!r} cannot be mounted into a pod",
            why="it takes an absolute path without a colon and without ..",
            hint="a folder such as /srv/models/NAME, the same on every node",
        )
