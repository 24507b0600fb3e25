"""Manifests of the machines of ``hosts``, and pods as a kubelet would start them from a text."""

from __future__ import annotations

import re

import yaml

from patchkit.cluster.launch.plan import planned_ranks, served_model
from patchkit.measure.fleet import equal_nodes
from patchkit.measure.kubernetes import KubernetesOptions, kubernetes_manifest
from support.clusters import cluster, node_facts

IMAGE = f"registry.example/vllm-gb10@sha256:{'ab' * 32}"
OPTIONS = KubernetesOptions(
    image=IMAGE,
    rdma="rdma/hca_shared_devices_a",
    cache="/var/cache/patchkit",
    selector={"kubernetes.io/arch": "arm64"},
)


def planned(folder, model, count=2, head="cable_port0", **serve):
    """Return cluster, ranks and model for nodes that are as one machine; vLLM 0.33.0 on all."""
    file = cluster(*(f"spark-{number + 1}" for number in range(count)), **serve)
    facts = equal_nodes(node_facts(folder, head, vllm="0.33.0"), count)
    served = served_model(file, model)
    return file, planned_ranks(file, facts, served), served


def manifest(plan, options=OPTIONS):
    """Return the text of a manifest."""
    return kubernetes_manifest(*plan, options)


class PodGroup:
    """The pods of a manifest's text, as LWS and a kubelet make them: rank 0 has the leader's."""

    def __init__(self, text):
        objects = {each["kind"]: each for each in yaml.safe_load_all(text)}
        self.scripts = objects["ConfigMap"]["data"]
        self.service = objects["Service"]
        self.lws = objects["LeaderWorkerSet"]
        template = self.lws["spec"]["leaderWorkerTemplate"]
        self.size = template["size"]
        self.templates = template["leaderTemplate"], template["workerTemplate"]

    def pod(self, rank):
        return self.templates[min(rank, 1)]["spec"]

    def container(self, rank, kind="containers"):
        return self.pod(rank)[kind][0]

    def variables(self, rank, address="127.0.0.1", leader="localhost", kind="containers"):
        """Return the environment of a rank's container; a secret has no value here."""
        found = {
            "LWS_LEADER_ADDRESS": leader,
            "LWS_GROUP_SIZE": str(self.size),
            "LWS_WORKER_INDEX": str(rank),
        }
        for each in self.container(rank, kind)["env"]:
            source = each.get("valueFrom", {})
            if source.get("fieldRef") == {"fieldPath": "status.hostIP"}:
                found[each["name"]] = address
            elif "value" in each:
                found[each["name"]] = expanded(each["value"], found)
        return found

    def command(self, rank, kind="containers", **where):
        variables = self.variables(rank, kind=kind, **where)
        return [expanded(each, variables) for each in self.container(rank, kind)["command"]]


def expanded(text, variables):
    """Return what Kubernetes makes of a text, by its rules: $(NAME), and $$ for a dollar sign.

    A name that it does not know stays as it is written, and so does any other dollar sign.
    """

    def found(match):
        if match[0] == "$$":
            return "$"
        return variables.get(match["name"], match[0])

    return re.sub(r"\$\$|\$\((?P<name>[^)]*)\)", found, text, flags=re.DOTALL)
