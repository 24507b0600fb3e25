"""Plans for networks that owners have: what works is kept, and only what disturbs is changed."""

import functools
from ipaddress import IPv4Interface, IPv4Network, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchkit.cluster.net import conflicts
from patchkit.cluster.net.numbers import beside, next_to
from patchkit.cluster.net.plan import Given, NetPlanOptions
from patchkit.cluster.net.planner import make_plan
from patchkit.cluster.net.remarks import plan_remarks
from patchkit.errors import UsageError
from patchkit.runtime.host.probe import probe
from support import networks
from support.networks import A0, A1, B0, B1


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("networks")

    @functools.cache
    def probed(name):
        return probe(networks.build(folder, name), environment={})

    return probed


def planned(host, **changes):
    """What the plan changes, and what it remarks: rows of text."""
    options = NetPlanOptions(**changes)
    plan = make_plan(host, options)
    conflicts.check(host, plan, options, given=Given(), files=())
    rows = [
        f"{line.action} {line.netdev} {', '.join(map(str, line.addresses))} MTU {line.mtu}"
        for line in plan.changes
    ]
    notes = plan_remarks(host, plan, options)
    return rows, [f"{note.level} {note.where}: {note.about}" for note in notes]


def peers(*addresses):
    return {"peers": tuple(map(IPv4Interface, addresses))}


FINE = {  # nothing changes, with or without a role; what is remarked
    "playbook": [],
    "thirteen": [],
    "bare_half": ["note cage 0: one-twin-address", "note cage 1: IPv4"],
    "set_link_local": ["note cage 1: one-twin-address"],
    "drawn_pair": ["warning cage 1: link-local-twins"],
    "second_cable": [f"warning {A1}, {B1}: cage 1"],
    "small_mtu": ["note cage 0: one-twin-address", f"note {A0}: MTU"],
    "ring": ["note this node: cabling"],
    "pair_and_switch": [],
    "same_subnet": ["warning cage 0: same-subnet"],
    "two_in_one_subnet": [
        "warning this node: shared-network",
        "note cage 0: one-twin-address",
        "note cage 1: one-twin-address",
        f"note {A1}: MTU",
    ],
    "kernel7": ["error this node: kernel-reserve"],
}


@pytest.mark.parametrize("node", [None, 1, 2])
@pytest.mark.parametrize("name", FINE)
def test_a_network_that_works_is_kept(machine, name, node):
    assert planned(machine(name), node=node) == ([], FINE[name])


@pytest.mark.parametrize("nodes", [4, 16])
def test_two_cages_in_use_on_many_nodes_are_not_taken_for_a_ring(machine, nodes):
    assert planned(machine("pair_and_switch"), nodes=nodes) == ([], [])
    plan = make_plan(machine("ring"), NetPlanOptions(nodes=nodes))
    assert plan.topology == "as found"
    with pytest.raises(UsageError, match="where do the two cables lead"):
        make_plan(machine("fresh_both"), NetPlanOptions(node=2, nodes=nodes))


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        # A drawn address beside a set one is replaced, whichever half has drawn it.
        ("random_twin", {}, [f"replace {B0} 192.168.101.10/24 MTU 9000"]),
        ("drawn_first", {}, [f"replace {A1} 10.100.1.1/24 MTU 9000"]),
        # The other half gets one only where it is asked for, with the MTU of the first.
        ("bare_half", {"twins": True}, [f"add {B0} 192.168.11.11/24 MTU 9000"]),
        (
            "set_link_local",
            {"twins": True, "node": 1},
            [f"replace {A1} 192.168.100.10/24 MTU 9000", f"add {B1} 192.168.101.10/24 MTU 9000"],
        ),
        ("small_mtu", {"twins": True}, [f"add {B0} 10.0.2.1/24 MTU 1500"]),
        ("small_mtu", {"mtu": 9000}, [f"mtu {A0} 10.0.1.1/24 MTU 9000"]),
        ("pair_and_switch", {"twins": True}, [f"add {B1} 10.10.101.10/24 MTU 9000"]),
        # Beside the other end's: what the head's plan says to run on the worker.
        ("playbook", peers("192.168.100.11/24", "192.168.101.11"), []),
        (
            "bare_half",
            peers("192.168.10.10/24", "192.168.77.10/24"),
            [f"add {B0} 192.168.77.11/24 MTU 9000"],
        ),
        ("fresh", peers("192.168.10.10/24"), [f"add {A0} 192.168.10.11/24 MTU 9000"]),
        (
            "fresh",
            {**peers("192.168.10.10/24"), "twins": True},
            [f"add {A0} 192.168.10.11/24 MTU 9000", f"add {B0} 192.168.11.11/24 MTU 9000"],
        ),
        (
            "fresh_port1",
            {"node": 2, **peers("192.168.11.13/24", "192.168.12.13/24")},
            [f"add {A1} 192.168.11.14/24 MTU 9000", f"add {B1} 192.168.12.14/24 MTU 9000"],
        ),
        (
            "fresh",
            {"node": 1, **peers("10.10.200.0/31", "10.10.201.0/31")},
            [f"add {A0} 10.10.200.1/31 MTU 9000", f"add {B0} 10.10.201.1/31 MTU 9000"],
        ),
        (
            "fresh",
            {"node": 5, "nodes": 16, **peers("10.10.100.10/24")},
            [f"add {A0} 10.10.100.14/24 MTU 9000"],
        ),
        ("fresh", peers("169.254.207.1/16"), [f"add {A0} 169.254.207.2/16 MTU 9000"]),
        # A third node: the cage in use is kept, the other one is a link of the ring.
        (
            "second_cable",
            {"node": 1, "nodes": 3},
            [f"add {A1} 192.168.104.10/24 MTU 9000", f"add {B1} 192.168.105.10/24 MTU 9000"],
        ),
        # Link-local addresses go where other ones are asked for.
        (
            "drawn_pair",
            {"node": 1, "network": IPv4Network("192.168.100.0/24")},
            [
                f"replace {A1} 192.168.100.10/24 MTU 9000",
                f"replace {B1} 192.168.101.10/24 MTU 9000",
            ],
        ),
    ],
)
def test_what_has_to_change(machine, name, options, expected):
    assert planned(machine(name), **options)[0] == expected


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        (
            "playbook",
            peers("10.0.5.1/24"),
            "10.0.5.1 is in none of 192.168.100.0/24",
        ),
        ("playbook", peers("192.168.100.10/24"), "192.168.100.10 is what this node has"),
        ("fresh", peers("10.1.0.1/24", "10.2.0.1/24", "10.3.0.1/24"), "10.3.0.1 is in none of"),
        ("fresh", {"nodes": 4, **peers("10.1.0.1/24")}, "missing --node"),
        ("fresh", peers("10.1.0.1/32"), None),  # a prefix is taken for granted
    ],
)
def test_peers_that_do_not_fit(machine, name, options, says):
    if says is None:
        assert planned(machine(name), **options)[0] == [f"add {A0} 10.1.0.2/24 MTU 9000"]
        return
    with pytest.raises(UsageError, match=says):
        planned(machine(name), **options)


def test_the_mtu_of_a_half_without_an_address_is_not_patchkits(machine):
    notes = planned(machine("small_mtu"), mtu=9000)[1]
    assert f"warning {B0}: MTU" in notes


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [(3, "note this ring: cabling"), (4, "warning this ring: NCCL")],
)
def test_what_is_known_of_rings(machine, nodes, expected):
    notes = planned(machine("fresh_both"), node=1, nodes=nodes, topology="ring")[1]
    assert notes == [expected, "note the other nodes: IPv4"]


NETWORKS = st.builds(
    lambda base, prefix: ip_network((base, prefix), strict=False),
    st.integers(0x0A000000, 0x0AFFFFFF),  # 10.0.0.0/8
    st.integers(16, 31),
)


@given(network=NETWORKS, theirs=st.integers(0, 300), node=st.integers(1, 16), own=st.integers(0, 9))
def test_an_address_beside_anothers_is_a_host_of_its_network(network, theirs, node, own):
    edge = 1 if network.num_addresses > 2 else 0  # a /31 has neither network nor broadcast address
    numbers = range(edge, network.num_addresses - edge)
    peer = IPv4Interface(f"{network[numbers[theirs % len(numbers)]]}/{network.prefixlen}")
    found = beside(peer, node, own or None)
    assert found.network == network
    assert found.ip != peer.ip
    assert int(found.ip) - int(network[0]) in numbers


@given(network=NETWORKS, taken=st.lists(NETWORKS, max_size=4))
def test_a_network_next_to_another_is_free_and_as_large(network, taken):
    found = next_to(IPv4Interface(f"{network[1]}/{network.prefixlen}"), [network, *taken])
    if found is None or found not in IPv4Network("10.0.0.0/8"):
        assert any(each.prefixlen < network.prefixlen for each in taken)
        return
    assert found.network.prefixlen == network.prefixlen
    assert not any(found.network.overlaps(each) for each in [network, *taken])
    assert found.ip == found.network[1]


@pytest.mark.parametrize(
    ("own", "taken", "expected"),
    [
        ("10.9.9.7/8", [], "192.168.100.7/24"),
        ("200.1.1.1/24", ["192.168.100.0/24"], "10.100.0.1/24"),
        ("10.9.9.0/8", [], "None"),
        ("10.9.9.7/8", ["192.168.0.0/16", "172.16.0.0/12", "10.0.0.0/8"], "None"),
    ],
)
def test_beside_some_networks_there_is_nothing_of_ours(own, taken, expected):
    assert str(next_to(IPv4Interface(own), map(IPv4Network, taken))) == expected
