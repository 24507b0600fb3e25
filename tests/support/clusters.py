"""Clusters of the machines of ``hosts``, as their nodes would describe themselves when well."""

from dataclasses import replace

from patchkit.cluster.agent.health import DiskRoom, NodeTroubles
from patchkit.cluster.agent.image_facts import ImageFacts
from patchkit.cluster.agent.node_facts import (
    ModelPrint,
    NodeFacts,
    PeerLink,
    PythonContents,
    Way,
)
from patchkit.cluster.agent.node_state import NodeState, UnitState
from patchkit.cluster.agent.processes import Listener, Process
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.cluster_file import ClusterNode, ServeChoices
from patchkit.cluster.launch.ranks import planned_ranks, served_model
from patchkit.cluster.launch.units import GroupUnits
from patchkit.doctor.peers.node_report import NodeReport, placed_files
from patchkit.runtime.host.host import Memory, Nccl, Software
from patchkit.runtime.host.probe import probe
from support import hosts

MODEL = "openai/gpt-oss-120b"
NAMES = ("spark-1", "spark-2")
ADDRESSES = ("192.168.100.10", "192.168.100.11")
VENV = "/home/spark/.local/share/patchkit/venv"


def image_facts(engine="docker", **changes):
    """Return what a node says of an image that it has."""
    made = ImageFacts(
        program=f"/usr/bin/{engine}",
        user="1000:1000",
        login="spark",
        version="29.7.2",
        storage=DiskRoom(
            folder="/var/lib/docker", free=10**11, total=10**12, files=10**6
        ),
        spec="/var/run/cdi/nvidia.yaml",
        driver="580.95.05",
        cpu="arm64",
        cuda="13.0",
        infiniband=True,
        id=f"sha256:{'0123456789abcdef' * 4}",
        content="c" * 64,
    )
    return replace(made, **changes)


def node_facts(folder, name="cable_port0", node=0, vllm="0.25.1", **changes):
    """Return the facts of a node with this vLLM installed; "" for none."""
    root = folder / f"{name}-{node}"
    host = probe(
        root if root.exists() else hosts.build(folder, name, node=node), environment={}
    )
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
        venv=VENV if vllm else "",
        linger=True,
        memlock=None,
        systemd=True,
        persistent_journal=True,
        installation="",
        ptxas="",
        rsync=True,
        files={},
        models={},
        image=None,
    )
    return replace(made, **changes)


def cluster(*nodes, **serve):
    """Return a cluster file's content for nodes of these names."""
    members = tuple(ClusterNode(ssh=name) for name in nodes)
    return Cluster(members=members, serve=ServeChoices(**serve))


def units_of(file, facts, model):
    """Return the units for a model, as if the head reached each worker by its own name."""
    served = served_model(file, model)
    ranks = planned_ranks(file, facts, served)
    links = [("ssh", "-T", "--", each.from_head) for each in file.members[1:]]
    return GroupUnits(
        cluster=file, model=served, ranks=tuple(ranks), links=tuple(links)
    )


def unit(active="active", sub="running", **changes):
    made = UnitState(
        unit="patchkit-vllm.service",
        active=active,
        sub=sub,
        result="success",
        status="0",
        restarts=0,
        since="Mon 2026-11-23 03:00:00 UTC",
        invocation="1",
        description="vLLM",
        text="",
        drop_ins=(),
        changed=False,
    )
    return replace(made, **changes)


def state(found=None, **changes):
    made = NodeState(
        units=(found or unit(),),
        processes=(10,),
        starts=1,
        memory=Memory(total=128 << 20, available=64 << 20),
        strangers=(),
        containers=(),
        others={},
        start="",
        model="",
        members=(),
        successor="",
        image=None,
        frozen="",
        memory_stop=None,
        memory_floor=0.0,
        troubles=NodeTroubles(disks=(), killed=(), addresses=(), lost=""),
        celsius=None,
        watts=None,
    )
    return replace(made, **changes)


def contents(**changes):
    made = PythonContents(
        versions={
            "vllm": "0.25.1",
            "torch": "2.11.0",
            "triton": "3.6.0",
            "numpy": "2.3.1",
        },
        digests={"vllm": "a" * 64, "torch": "b" * 64},
        nccl=dict.fromkeys(("vllm", "torch"), ("2.30.7", "c" * 64)),
        lost=(),
    )
    return replace(made, **changes)


def model(**changes):
    made = ModelPrint(
        folder="/home/spark/models/m", problem="", commit="c" * 40, digest="d" * 64
    )
    return replace(made, **changes)


def reports(folder):
    """The two nodes of a cluster that serves, the head first."""
    listener = Listener(address="127.0.0.1", port=8000, pid=10, name="vllm")
    facts = [node_facts(folder, node=number) for number in (0, 1)]
    file = cluster(*NAMES)
    placed = units_of(file, facts, MODEL).node_files()
    made = []
    for number, name in enumerate(NAMES):
        its = replace(facts[number], files=placed[number])
        netdev = its.host.netdev_of(ADDRESSES[number]).name
        way = Way(
            address=ADDRESSES[1 - number],
            netdev=netdev,
            mtu=9000,
            plain="answers",
            full="answers",
        )
        made.append(
            NodeReport(
                node=name,
                address=ADDRESSES[number],
                facts=its,
                state=state(),
                contents=contents(),
                disks=(
                    DiskRoom(folder="/", free=10**12, total=2 * 10**12, files=10**6),
                ),
                processes=(Process(pid=10, name="vllm", state="S"),),
                listeners=(listener,) * (number == 0),
                models=(model(),),
                placed=placed_files(its.files, "patchkit-vllm.service"),
                links=(PeerLink(words=("ssh",), error={}),) if number == 0 else None,
                ways=((NAMES[1 - number], way),),
            )
        )
    return file, made
