"""Plans for networks that owners have: what works is kept, and only what disturbs is changed."""

from ipaddress import IPv4Network

import pytest

from patchkit.cluster.net.checks import plan_remarks
from patchkit.cluster.net.netplan_file import check_conflicts
from patchkit.cluster.net.plan import Given, NetPlanOptions, make_net_plan
from patchkit.errors import UsageError
from support.networks import A0, A1, B0, B1


def planned(host, **changes):
    """Return what the plan changes and remarks: rows of text."""
    options = NetPlanOptions(**changes)
    plan = make_net_plan(host, options)
    check_conflicts(host, plan, options, Given(), {})
    rows = [
        f"{line.action} {line.netdev} {', '.join(map(str, line.addresses))} MTU {line.mtu}"
        for line in plan.changes
    ]
    notes = plan_remarks(host, plan)
    return rows, [f"{note.level} {note.where}: {note.about}" for note in notes]


FINE = (
    *("playbook", "thirteen", "bare_half", "set_link_local", "drawn_pair", "second_cable"),
    *("small_mtu", "own_ring", "pair_and_switch", "same_subnet", "two_in_one_subnet", "kernel7"),
)


@pytest.mark.parametrize("node", [None, 1, 2])
@pytest.mark.parametrize("name", FINE)
def test_a_network_that_works_is_kept(machine, name, node):
    assert planned(machine(name), node=node)[0] == []


@pytest.mark.parametrize("nodes", [4, 16])
def test_two_cages_in_use_on_many_nodes_are_not_taken_for_a_ring(machine, nodes):
    assert planned(machine("pair_and_switch"), nodes=nodes) == ([], [])
    plan = make_net_plan(machine("own_ring"), NetPlanOptions(nodes=nodes))
    assert plan.topology == "as found"
    with pytest.raises(UsageError, match="where do the two cables lead"):
        make_net_plan(machine("fresh_both"), NetPlanOptions(node=2, nodes=nodes))


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        # A drawn address beside a set one is replaced, whichever half has drawn it.
        ("random_twin", {}, [f"replace {B0} 192.168.101.10/24 MTU 9000"]),
        ("drawn_first", {}, [f"replace {A1} 10.100.1.1/24 MTU 9000"]),
        ("small_mtu", {"mtu": 9000}, [f"mtu {A0} 10.0.1.1/24 MTU 9000"]),
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
    ("name", "options", "expected"),
    [
        ("fresh_both", {"node": 1, "nodes": 3}, ["note this ring: cabling"]),
        ("small_mtu", {}, ["note cage 0: one-twin-address", f"note {A0}: MTU"]),
        ("same_subnet", {}, ["warning cage 0: same-subnet"]),
        ("kernel7", {}, ["error this node: kernel-reserve"]),
    ],
)
def test_what_is_remarked(machine, name, options, expected):
    assert planned(machine(name), **options)[1] == expected
