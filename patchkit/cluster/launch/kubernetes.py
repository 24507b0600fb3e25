"""Write a manifest for Kubernetes: the ranks that `patchkit up` plans, as pods.

All nodes are taken to be like one host. Values become JSON, which is YAML. Kubernetes replaces
$(NAME) in commands, where $$ is a dollar sign; it leaves the values of a ConfigMap alone.
"""

import json
import re
from dataclasses import replace
from ipaddress import IPv4Address
from itertools import pairwise, zip_longest

from patchkit.cluster.agent.group_script import NOT_HERE, QUESTIONS
from patchkit.cluster.agent.image_facts import ImageFacts
from patchkit.cluster.agent.node_facts import NodeFacts, model_print
from patchkit.cluster.launch.cluster_file import ClusterFile, ClusterNode
from patchkit.cluster.launch.ranks import (
    model_folders,
    planned_ranks,
    refuse_ray,
    served_model,
)
from patchkit.cluster.launch.units import GroupUnits, fill_template
from patchkit.cluster.ssh.answer import encoded
from patchkit.digests import digest
from patchkit.records import RECIPES, read_json, read_toml
from patchkit.runtime.host.host import Host, Nccl, Software
from patchkit.runtime.rules.rule import CACHES, cache_variables

# Flag or variable → the value that each pod gives it.
_POD_VALUES = read_toml(dict[str, str], RECIPES / "export/pods.toml")
# A folder of each node, the home of its pods: compiled code, downloads, the times of starts.
_HOME = "/var/cache/patchkit"


def plan_pods(
    cluster: ClusterFile,
    host: Host,
    model: str,
    nodes: int,
    vllm: str,
    triton: str = "",
    nccl: str = "",
) -> GroupUnits:
    """Return the units of ``nodes`` nodes like ``host``, by the choices of a cluster file.

    The versions are those in the image, "" if unknown. A whole folder of the model on this machine
    counts for all nodes. Raises what ``refuse_ray`` and ``planned_ranks`` raise.
    """
    refuse_ray(cluster)
    workers = [ClusterNode(ssh=f"rank-{number}") for number in range(1, nodes)]
    # Each pod listens at its node's address, not at this host's.
    serve = replace(cluster.serve, listen="local")
    cluster = replace(cluster, members=(cluster.members[0], *workers), serve=serve)
    served = served_model(cluster, model)

    software = Software(
        python="",
        vllm=vllm,
        triton=triton,
        torch_nccl=Nccl(path="", version=nccl, why=""),
    )
    facts = NodeFacts(
        host=replace(host, software=software),
        user="",
        home=_HOME,
        venv="",
        linger=True,
        memlock=None,
        systemd=False,
        persistent_journal=True,
        image=ImageFacts(),
        models={
            files.folder: files
            for files in map(model_print, model_folders(cluster, served))
            if not files.problem
        },
    )
    ranks = planned_ranks(cluster, [facts], served)

    if address := ranks[0].address:
        # A worker is like the head, but for the address.
        other = IPv4Address(int(IPv4Address(address)) ^ 1)
        text = encoded(facts).replace(f'"{address}"', f'"{other}"')
        worker = read_json(NodeFacts, text)
        ranks = planned_ranks(cluster, [facts, *[worker] * (nodes - 1)], served)
    return GroupUnits(cluster=cluster, model=served, ranks=tuple(ranks), links=())


def kubernetes_manifest(units: GroupUnits, groups: int) -> str:
    """Return the manifest that serves a model from ``groups`` groups of nodes."""
    head = units.ranks[0]
    request = head.command.request
    node = head.env.node

    folder = f"{_HOME}/{CACHES}"
    variables = dict(cache_variables(folder, node.vllm, units.model.name))
    for setting in head.env.settings:
        if setting.name not in _POD_VALUES:
            variables[setting.name] = setting.value

    values = {
        "groups": groups,
        "nodes": len(units.ranks),
        "home": _HOME,
        "variables": variables,
        "questions": QUESTIONS,
        "not_here": NOT_HERE,
        "port": request.port,
        "master_port": request.master_port,
        "image": units.cluster.serve.image,
        "leader": _pod_words(units.words(0)),
        "worker": _pod_words(units.words(-1)),
        # The startup probe asks every 30 seconds.
        "tries": units.start_seconds() // 30,
        "hub": variables.get("HF_HOME", ""),
        **dict(
            zip_longest(("folder", "drafter"), units.model_folders(head), fillvalue="")
        ),
    }
    # A line of the template with an empty value is left out: some values only keep lines.
    texts = {name: value and _yaml_text(value) for name, value in values.items()}
    texts |= {
        "name": units.cluster.name,
        "digest": digest(str(variables))[:8],
        "several": head.address and "several nodes",
        "rdma": node.attachment.hcas and "RDMA",
    }
    template = (RECIPES / "export/kubernetes.yaml").read_text(encoding="utf-8")
    return fill_template(template, texts)


def _pod_words(words: tuple[str, ...]) -> list[str]:
    """Return the words of a rank's command, with the pod's own values."""
    return [
        _POD_VALUES.get(flag) or word.replace("$", "$$")
        for flag, word in pairwise(("", *words))
    ]


def _yaml_text(value: object) -> str:
    """Return a value as JSON in ASCII, with YAML's escapes, an item on a line of the template."""
    text = json.dumps(value, ensure_ascii=False, separators=(",\n            ", ": "))
    return re.sub(r"[^\n -~]", lambda sign: f"\\U{ord(sign[0]):08x}", text)
