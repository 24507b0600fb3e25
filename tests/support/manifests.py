"""Pods of a manifest, as LeaderWorkerSet and a kubelet are documented to start them."""

from __future__ import annotations

import re

import yaml

IMAGE = f"registry.example/vllm-gb10@sha256:{'ab' * 32}"
_REFERENCE = re.compile(r"\$\$|\$\((?P<name>[^)]*)\)", re.DOTALL)


class PodGroup:
    """The pods of one group: rank 0 is the leader's template, the others are the worker's."""

    def __init__(self, text):
        self.objects = list(yaml.safe_load_all(text))
        named = {
            (each["kind"], each["metadata"]["name"]): each for each in self.objects
        }
        self.named = named
        (self.lws,) = (
            each for each in self.objects if each["kind"] == "LeaderWorkerSet"
        )
        template = self.lws["spec"]["leaderWorkerTemplate"]
        self.size = template["size"]
        self.templates = template["leaderTemplate"], template["workerTemplate"]

    def pod(self, rank):
        return self.templates[min(rank, 1)]["spec"]

    def container(self, rank, kind="containers"):
        return self.pod(rank)[kind][0]

    def script(self, name):
        (scripts,) = (each for each in self.objects if name in each.get("data", {}))
        return scripts["data"][name]

    def variables(
        self, rank, address="127.0.0.1", leader="localhost", kind="containers"
    ):
        """Return the environment of a rank's container; a secret is not there."""
        values = {"LWS_LEADER_ADDRESS": leader, "LWS_WORKER_INDEX": str(rank)}
        container = self.container(rank, kind)
        for each in container.get("envFrom", ()):
            if "configMapRef" in each:
                values |= self.named["ConfigMap", each["configMapRef"]["name"]]["data"]
        for each in container["env"]:
            source = each.get("valueFrom", {})
            if source.get("fieldRef") == {"fieldPath": "status.hostIP"}:
                values[each["name"]] = address
            elif "value" in each:
                values[each["name"]] = expanded(each["value"], values)
        return values

    def command(self, rank, kind="containers", **where):
        variables = self.variables(rank, kind=kind, **where)
        return [
            expanded(each, variables) for each in self.container(rank, kind)["command"]
        ]


def expanded(text, variables):
    """Return what Kubernetes makes of a text: $(NAME), and $$ for a dollar sign.

    A name that is not there stays as it is written, and so does any other dollar sign.
    """

    def value(match):
        if match[0] == "$$":
            return "$"
        return variables.get(match["name"], match[0])

    return _REFERENCE.sub(value, text)
