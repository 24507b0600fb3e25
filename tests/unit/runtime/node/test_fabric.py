"""Check which cage carries the data, for clusters of every size and way to name the head."""

from dataclasses import replace

import pytest

from patchkit.runtime.node.topology import Attachment, choose_attachment, find_fabric
from support.hosts import with_netdev

FIRST, SECOND = ("rocep1s0f0", "roceP2p1s0f0"), ("rocep1s0f1", "roceP2p1s0f1")


@pytest.mark.parametrize(
    ("name", "nodes", "head", "devices"),
    [
        ("cable_port0", 2, "", FIRST),
        ("cable_port1", 4, "", SECOND),  # a switch
        ("cable_port0", 2, "10.0.0.10", FIRST),  # on the LAN: says nothing of the cage
        ("both_cables", 2, "", FIRST),
        ("both_cables", 2, "192.168.102.11", SECOND),
        ("ring", 3, "", ()),  # each cage leads to another node
        ("pair_and_switch", 3, "", SECOND[:1]),  # a /31 has room for two
        ("pair_and_switch", 16, "10.0.0.10", SECOND[:1]),
        ("pair_and_switch", 2, "10.10.100.11", SECOND[:1]),
        ("two_switches", 8, "", ()),
        ("two_switches", 8, "10.2.0.11", SECOND[:1]),
        ("two_in_one_subnet", 2, "10.0.0.11", FIRST[:1]),  # also that of the LAN port
        ("two_in_one_subnet", 2, "10.0.0.110", SECOND[:1]),  # this node's very own
        ("switch_in_the_lan", 2, "", FIRST[:1]),  # there is no other
        ("single", 2, "", ()),
    ],
)
def test_the_cage_that_joins_the_nodes(machine, name, nodes, head, devices):
    found = find_fabric(machine(name), nodes, head).ports
    assert tuple(port.device.name for port in found) == devices


def _with_third_card(host, address):
    """Return the host with an RDMA card of another kind, which is in no cage."""
    first = host.netdev("enp1s0f0np0")
    card = replace(
        first,
        name="enP5p1s0",
        pci="0005:01:00.0",
        cage=None,
        twin="",
        speed=None,
        addresses=(replace(first.addresses[0], address=address, prefix=24),),
    )
    device = replace(
        host.rdma[0],
        name="rocep5s0",
        netdev=card.name,
        pci=card.pci,
        cage=None,
        twin="",
    )
    return replace(host, netdevs=(*host.netdevs, card), rdma=(*host.rdma, device))


@pytest.mark.parametrize("address", ["10.9.0.10", "10.1.0.99"])
def test_a_third_card_does_not_say_which_cage_leads_to_a_switch(machine, address):
    """It has a network of its own, or it is left out in that of the first cage."""
    host = _with_third_card(machine("two_switches"), address)
    fabric = find_fabric(host, 8, "")
    assert len({port.cage for port in fabric.spanning}) == 3
    assert fabric.ports == ()

    # A slower cage beside it leads to the switch.
    slower = with_netdev(host, "enp1s0f1np1", speed=100_000)
    devices = [port.device.name for port in find_fabric(slower, 8, "").ports]
    assert devices == [SECOND[0]]


def test_a_cage_that_is_left_out_does_not_say_which_cage_leads_to_a_switch(machine):
    """The second cage is in the network of the first one; a third card is not."""
    host = machine("two_switches")
    address = replace(host.netdev("enp1s0f1np1").addresses[0], address="10.1.0.110")
    host = _with_third_card(host, "10.9.0.10")
    shared = with_netdev(host, "enp1s0f1np1", addresses=(address,), speed=100_000)
    assert find_fabric(shared, 8, "").ports == ()


def attached(host, nodes, head="", role="head", topology="auto") -> Attachment:
    return choose_attachment(
        host, role=role, topology=topology, nodes=nodes, head=head, target="gb10"
    )


def test_a_switch_is_never_taken_for_a_ring(machine):
    for name, nodes, topology in (
        ("ring", 3, "ring"),
        ("cable_port0", 16, "roce"),
        ("pair_and_switch", 3, "roce"),
        ("two_switches", 2, "roce"),
    ):
        assert attached(machine(name), nodes).topology == topology


def test_link_local_networks_do_not_say_where_a_cable_leads(machine):
    """Every cage of NVIDIA's former automatic netplan is in 169.254.0.0/16."""
    host, drawn = machine("ring"), machine("link_local").netdev("enp1s0f0np0").addresses
    halves = tuple(
        each if each.cage is None else replace(each, addresses=drawn)
        for each in host.netdevs
    )
    assert attached(replace(host, netdevs=halves), 3).topology == "ring"


def test_a_slower_port_is_a_switch_s(machine):
    """Both networks have room for all, but a cable between two Sparks has its full speed."""
    host = with_netdev(machine("two_switches"), "enp1s0f1np1", speed=100_000)
    assert attached(host, 8).hcas == "rocep1s0f1,roceP2p1s0f1"


@pytest.mark.parametrize("head", ["", "10.1.0.77"])
def test_two_cages_in_one_network_lead_to_one_switch(machine, head):
    host = machine("two_switches")
    own = replace(host.netdev("enp1s0f1np1").addresses[0], address="10.1.0.110")
    moved = with_netdev(host, "enp1s0f1np1", addresses=(own,))
    for nodes in (3, 4, 8):
        found = attached(moved, nodes, head, "worker" if head else "head")
        assert (found.topology, found.data) == ("roce", "enp1s0f0np0")
