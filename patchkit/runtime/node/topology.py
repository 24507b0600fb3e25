"""Choose how a node is attached to its cluster: topology, interfaces and address.

Pure: the facts of one host and what was asked for in, one answer or one error out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from ipaddress import IPv4Address

from patchkit.runtime.host import hardware
from patchkit.runtime.host.host import Host, Rdma
from patchkit.runtime.node.address import (
    PLAN,
    OwnAddress,
    devices_of,
    lacking,
    named_address,
    own_address,
    usable_rdma,
)
from patchkit.runtime.node.attachment import WAYS, Attachment
from patchkit.runtime.node.fabric import check_chosen, fabric


def attach(
    host: Host, *, role: str, topology: str, nodes: int, head: str, target: str
) -> Attachment:
    """Return how a head or a worker is attached.

    ``topology`` may be ``auto``; ``head`` is the head's IPv4 address, which the head itself may
    leave empty. Raises HostError if the hardware is not what the request needs, or if it can be
    meant in two ways, UsageError without a head.
    """
    head = named_address(head) if head else ""
    devices = fabric(host, nodes, head)
    chosen = _topology(host, topology, nodes, devices, target)
    own = own_address(host, chosen, role, head, devices)
    attached = WAYS[chosen](host, own, nodes, devices)
    return replace(
        attached,
        topology=chosen,
        address=own.address,
        netdev=own.netdev.name,
        notes=(*attached.notes, *_about(own)),
    )


def _topology(host: Host, asked: str, nodes: int, devices: Sequence[Rdma], target: str) -> str:
    usable = usable_rdma(host)
    if asked in ("roce", "ring") and not usable:
        raise lacking(
            host,
            f"{asked} needs an RDMA device that is active and has an IPv4 address; "
            f"here: {devices_of(host)}",
            why="the cable is out, the interface has no address, or, in a container, "
            "/dev/infiniband is missing",
            hint=f"see `patchkit probe`; {PLAN}; or sockets on every node, the head "
            "first: --topology socket",
        )
    if asked == "roce":
        check_chosen(host, nodes, devices)
    if asked != "auto":
        return asked
    if target == "thor":
        return "hetero"
    if not usable:
        return "socket"
    # Two cages in use, and neither is a switch's: each leads to another neighbour.
    if not devices and nodes <= hardware.facts()["connectx"]["ring_nodes"]:
        return "ring"
    check_chosen(host, nodes, devices)
    return "roce"


def _about(own: OwnAddress) -> Iterator[str]:
    if IPv4Address(own.address).is_link_local:
        yield f"{own.address} is link-local and changes at a boot: write this file anew then"
    others = [str(each.ip) for each in own.netdev.ipv4 if str(each.ip) != own.address]
    if others:
        yield f"{own.netdev.name} has {', '.join(others)} as well; {own.address} is taken"
