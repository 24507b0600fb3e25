"""Make the facts of a fleet from those of one node: all are as the head but for their addresses.

So a plan for a hundred nodes needs one probe. What is made here is never written: a pod gets its
address from Kubernetes, a node of Ray from its own env file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from ipaddress import IPv4Interface

from patchkit.cluster.agent.node_facts import NodeFacts
from patchkit.errors import UsageError
from patchkit.runtime.host.host import Address, Gid, Host, Nccl, Software


def facts_of(host: Host, home: str) -> NodeFacts:
    """Return what a plan asks of a node, of a machine that runs what Kubernetes or Ray start."""
    return NodeFacts(
        host=host,
        user="",
        home=home,
        python="",
        venv="",
        linger=True,
        memlock=None,
        systemd=0,
        persistent_journal=True,
    )


def with_versions(facts: NodeFacts, versions: Mapping[str, str]) -> NodeFacts:
    """Return facts with the versions of vLLM, triton and NCCL that an image or a cluster has.

    Those that are not given are the node's own. Raises UsageError if nobody names a vLLM.
    """
    own = facts.host.versions
    vllm = versions.get("vllm") or own["vllm"]
    if not vllm:
        raise UsageError(
            "nothing says which vLLM will run",
            hint="name the wheelhouse that it comes from, --lock wheelhouse; or --vllm 0.33.0",
        )
    nccl = versions.get("nccl") or own["nccl"]
    software = Software(
        python="",
        vllm=vllm,
        torch=own["torch"],
        triton=versions.get("triton") or own["triton"],
        torch_nccl=Nccl(path="", version=nccl, why="") if nccl else None,
    )
    return replace(facts, venv=facts.venv or "/", host=replace(facts.host, software=software))


def equal_nodes(head: NodeFacts, count: int) -> list[NodeFacts]:
    """Return the facts of ``count`` nodes that are as the head, which is the first of them."""
    return [head, *(replace(head, host=_moved(head.host, by)) for by in range(1, count))]


def _moved(host: Host, by: int) -> Host:
    """Return a host whose IPv4 addresses are as many further on, each in its own network."""
    moved = {
        str(own.ip): _next(own, by)
        for netdev in host.netdevs
        if netdev.kind != "loopback"
        for own in netdev.ipv4
    }

    def address(each: Address) -> Address:
        return replace(each, address=moved.get(each.address, each.address))

    def gid(each: Gid) -> Gid:
        return replace(each, address=moved.get(each.address, each.address))

    return replace(
        host,
        netdevs=tuple(
            replace(each, addresses=tuple(map(address, each.addresses))) for each in host.netdevs
        ),
        rdma=tuple(replace(each, gids=tuple(map(gid, each.gids))) for each in host.rdma),
    )


def _next(own: IPv4Interface, by: int) -> str:
    """Return the address that a node so many further on has in the same network.

    In one that has no room for it, a cable's between two nodes, it is that of another cable.
    """
    first, size = own.network.network_address, own.network.num_addresses
    room = size - 2  # its first and its last address are no node's
    if by >= room:
        return str(own.ip + by)
    return str(first + 1 + (int(own.ip) - int(first) - 1 + by) % room)
