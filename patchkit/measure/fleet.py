"""Plan a model for a fleet, from the facts of its nodes or of one that the others are as.

So a plan for a hundred nodes needs one probe. What is made here is never written: a pod gets its
address from Kubernetes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from patchkit.cluster.agent.node_facts import NodeFacts, model_on_node
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.cluster_file import ClusterFile, ClusterNode, read_cluster_file
from patchkit.cluster.launch.plan import PlannedRank, ServedModel, planned_ranks, served_model
from patchkit.errors import UsageError
from patchkit.runtime.host.host import Nccl, Software
from patchkit.runtime.host.machine_root import LIVE
from patchkit.runtime.host.probe import probe


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """A model planned for the nodes of a cluster."""

    cluster: ClusterFile
    model: ServedModel
    ranks: tuple[PlannedRank, ...]


def plan_fleet(
    name: str, file: Path | None, count: int | None, root: Path | None, versions: Mapping[str, str]
) -> FleetPlan:
    """Plan a model for the nodes of a file, asked by ssh, or for ``count`` that are as one machine.

    ``root`` has the files of that machine; ``versions`` are those that will run.
    """
    cluster = read_cluster_file(file) if file else ClusterFile(node=(ClusterNode(ssh="head"),))
    model = served_model(cluster, name)
    models = [model.folder] if model.folder else []
    if file and not root:
        asked = replace(cluster, node=cluster.node[:1]) if count else cluster
        facts = Cluster(asked).facts(models)
    else:
        root = root or LIVE
        if root != LIVE and any(folder.startswith("~/") for folder in models):
            raise UsageError(
                f"{models[0]} is in a home, and {root} does not say whose",
                hint='name the folder from /: model_folder = "/srv/models" in the file',
            )
        machine = NodeFacts(
            host=probe(root, environment=os.environ),
            user="",
            home=str(Path.home()),
            python="",
            venv="",
            linger=True,
            memlock=None,
            systemd=0,
            persistent_journal=True,
            models={folder: model_on_node(folder) for folder in models if root == LIVE},
        )
        facts = [machine]
    facts = [with_versions(each, versions) for each in facts]
    if len(facts) == 1:
        facts = equal_nodes(facts[0], count or max(2, len(cluster.node)))
        others = (ClusterNode(ssh=f"worker-{number}") for number in range(1, len(facts)))
        cluster = replace(cluster, node=(cluster.head, *others))
    return FleetPlan(
        cluster=cluster, model=model, ranks=tuple(planned_ranks(cluster, facts, model))
    )


def with_versions(facts: NodeFacts, versions: Mapping[str, str]) -> NodeFacts:
    """Return facts with the versions of vLLM, triton and NCCL that an image or a cluster has.

    Those that are not given are the node's own. Raises UsageError if nobody names a vLLM.
    """
    own = facts.host.versions
    found = {name: versions.get(name) or own[name] for name in ("vllm", "triton", "nccl")}
    if not found["vllm"]:
        raise UsageError(
            "nothing says which vLLM will run",
            hint="name the wheelhouse that it comes from, --lock wheelhouse; or --vllm 0.33.0",
        )
    software = Software(
        python="",
        vllm=found["vllm"],
        torch=own["torch"],
        triton=found["triton"],
        torch_nccl=Nccl(path="", version=found["nccl"], why="") if found["nccl"] else None,
    )
    return replace(facts, venv=facts.venv or "/", host=replace(facts.host, software=software))


def equal_nodes(head: NodeFacts, count: int) -> list[NodeFacts]:
    """Return the facts of ``count`` nodes that are as the head, which is the first of them.

    Each has the next IPv4 addresses, in the same networks. In a network that has no room for one,
    a cable's between two nodes, it is that of another cable.
    """
    nodes, host = [head], head.host
    real = [netdev for netdev in host.netdevs if netdev.kind != "loopback"]
    for by in range(1, count):
        moved = {}
        for own in chain.from_iterable(netdev.ipv4 for netdev in real):
            room = own.network.num_addresses - 2  # its first and its last address are no node's
            first = own.network.network_address + 1
            place = (int(own.ip) - int(first) + by) % room if room > by else 0
            moved[str(own.ip)] = str(first + place if room > by else own.ip + by)
        netdevs, devices = [], []
        for netdev in host.netdevs:
            its = (replace(a, address=moved.get(a.address, a.address)) for a in netdev.addresses)
            netdevs.append(replace(netdev, addresses=tuple(its)))
        for device in host.rdma:
            gids = (replace(g, address=moved.get(g.address, g.address)) for g in device.gids)
            devices.append(replace(device, gids=tuple(gids)))
        made = replace(host, netdevs=tuple(netdevs), rdma=tuple(devices))
        nodes.append(replace(head, host=made))
    return nodes
