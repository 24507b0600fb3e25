"""Clusters of the machines of ``hosts``, as their nodes would describe themselves."""

from dataclasses import replace

from patchkit.cluster.agent.node_facts import NodeFacts
from patchkit.cluster.launch.cluster_file import ClusterFile, ClusterNode, ServeChoices
from patchkit.cluster.launch.plan import planned_ranks, served_model
from patchkit.cluster.launch.units import GroupUnits
from patchkit.runtime.host.host import Nccl, Software
from patchkit.runtime.host.probe import probe
from support import hosts

VENV = "/home/spark/.local/share/patchkit/venv"


def node_facts(folder, name="cable_port0", node=0, vllm="0.25.1", **changes):
    """Return the facts of a node with this vLLM installed; "" for none."""
    root = folder / f"{name}-{node}"
    host = probe(root if root.exists() else hosts.build(folder, name, node=node), environment={})
    software = Software(
        python=f"{VENV}/bin/python",
        vllm=vllm,
        torch="2.11.0",
        triton="3.6.0",
        torch_nccl=Nccl(path=f"{VENV}/libnccl.so.2", version="2.30.7", why="torch's"),
    )
    made = NodeFacts(
        host=replace(host, software=software if vllm else None),
        user="spark",
        home="/home/spark",
        python="3.12.3",
        venv=VENV if vllm else "",
        linger=True,
        memlock=None,
        systemd=255,
        persistent_journal=True,
        has=("rsync", "ssh", "systemctl"),
    )
    return replace(made, **changes)


def cluster(*nodes, **serve):
    """Return a cluster file's content for nodes of these names."""
    members = tuple(ClusterNode(ssh=name) for name in nodes)
    return ClusterFile(node=members, serve=ServeChoices(**serve))


def units_of(file, facts, model):
    """Return the units for a model, as if the head reached each worker by its own name."""
    served = served_model(file, model)
    ranks = planned_ranks(file, facts, served)
    links = [("ssh", "-T", "--", each.from_head) for each in file.node[1:]]
    return GroupUnits(cluster=file, model=served, ranks=tuple(ranks), links=tuple(links))
