"""Checks of one end and of both, and plans for networks that owners have, on probed machines."""

from dataclasses import replace
from ipaddress import IPv4Network

import pytest

from patchkit.cluster.net.addressing import NetPlanOptions, WrittenPlan, make_net_plan
from patchkit.cluster.net.checks import (
    choose_checked_cages,
    pair_checks,
    plan_remarks,
    verify_network,
)
from patchkit.cluster.net.netplan_file import PlanInputs, check_conflicts
from patchkit.errors import HostError, UsageError
from patchkit.finding import Level
from support.hosts import with_netdev


def host_checks(host, cages):
    """Return what `net verify` says without a peer."""
    checks = verify_network(host, cages, None, [], live=True)
    return [check for check in checks if check.about != "way to a peer"]


def notable(checks):
    """What is not ok: ``subject: what: state``."""
    return {
        f"{c.where}: {c.about}: {c.level}" for c in checks if c.level is not Level.OK
    }


A, B = "enp1s0f0np0", "enP2p1s0f0np0"
A1, B1 = "enp1s0f1np1", "enP2p1s0f1np1"
LOST = {
    it: f"{it} 192.168.{n}.0/24: peer's end: error" for it, n in ((A, 100), (B, 101))
}


@pytest.mark.parametrize(
    ("name", "number", "expected"),
    [
        ("cable_port0", 11, set()),
        ("renamed", 11, set()),
        ("no_rdma", 11, {f"{A}: RoCE v2 GID: unknown", f"{B}: RoCE v2 GID: unknown"}),
        ("wrong_mtu", 12, {"cage 0: twin-mtu: warning", f"{B}: MTU: note"}),
        ("two_addresses", 11, set()),
        ("same_subnet", 11, {f"{B}: networks: error"}),
        (
            "link_down",
            11,
            {f"{each}: {what}" for each in (A, B) for what in (
                "cable: error", "speed: unknown", "RoCE v2 GID: error")},
        ),
        (
            "ipv6_only",
            10,
            {f"{each}: {what}: error" for each in (A, B) for what in ("IPv4", "RoCE v2 GID")},
        ),
    ],
)  # fmt: skip
def test_one_end(machine, name, number, expected):
    host = machine(name, 1)
    checks = list(host_checks(host, choose_checked_cages(host)))
    assert (len(checks), notable(checks)) == (number, expected)


def test_the_warning_about_unequal_halves_names_the_command_that_sets_the_mtu(machine):
    host = machine("wrong_mtu", 1)
    checks = host_checks(host, choose_checked_cages(host))
    (warning,) = [check for check in checks if check.about == "twin-mtu"]
    command = "patchkit net plan --mtu 9000 -o 40-patchkit.yaml"
    assert warning.hint == f"on both nodes: `{command}`"
    assert planned(host, mtu=9000)[0] == [f"mtu {B} 192.168.101.11/24"]


OWNERS = {  # what is not ok of networks that worked for their owners, and of those that did not
    "playbook": set(),
    "thirteen": set(),
    "bare_half": {"cage 0: one-twin-address: note"},
    "set_link_local": {f"{A1}: IPv4: note", "cage 1: one-twin-address: note"},
    "drawn_pair": {"cage 1: link-local-twins: warning"},
    "random_twin": {"cage 0: random-twin: warning"},
    "drawn_first": {"cage 1: random-twin: warning"},
    "second_cable": {f"{A1}, {B1}: cage 1: warning"},
    "small_mtu": {
        f"{A}: MTU: note",
        f"{B}: MTU: note",
        "cage 0: one-twin-address: note",
    },
    "own_ring": set(),
    "pair_and_switch": {f"{A1}: speed: warning"},
    "two_in_one_subnet": {
        *(f"{A1}: networks: error", f"{A1}: MTU: note", f"{B1}: MTU: note"),
        *("cage 0: one-twin-address: note", "cage 1: one-twin-address: note"),
    },
    "kernel7": {"this node: kernel-reserve: error"},
    "kernel7_mended": set(),
}


@pytest.mark.parametrize("name", OWNERS)
def test_the_networks_of_owners(machine, name):
    """What works is kept, whichever node it is."""
    host = machine(name)
    checks = list(host_checks(host, choose_checked_cages(host)))
    assert notable(checks) == OWNERS[name]
    assert all(
        check.hint for check in checks if check.level in (Level.ERROR, Level.WARNING)
    )
    if name not in ("random_twin", "drawn_first"):
        assert [planned(host, node=node)[0] for node in (None, 1, 2)] == [[], [], []]


def planned(host, **changes):
    """Return what the plan changes and remarks: rows of text."""
    options = NetPlanOptions(**changes)
    plan = make_net_plan(host, options)
    check_conflicts(PlanInputs(host, plan, options, WrittenPlan(), {}))
    assert {line.mtu for line in plan.changes} <= {9000}
    rows = [f"{line.action} {line.netdev} {line.addresses[0]}" for line in plan.changes]
    return rows, [
        f"{note.level} {note.where}: {note.about}" for note in plan_remarks(host, plan)
    ]


TWINS = "one-twin-address"


@pytest.mark.parametrize(
    ("name", "options", "changes", "remarks"),
    [
        # A drawn address beside a set one is replaced, whichever half has drawn it.
        (
            "random_twin",
            {},
            [f"replace {B} 192.168.101.10/24"],
            ["warning cage 0: random-twin"],
        ),
        (
            "drawn_first",
            {},
            [f"replace {A1} 10.100.1.1/24"],
            ["warning cage 1: random-twin"],
        ),
        (
            "small_mtu",
            {"mtu": 9000},
            [f"mtu {A} 10.0.1.1/24"],
            [f"note cage 0: {TWINS}"],
        ),
        ("small_mtu", {}, [], [f"note cage 0: {TWINS}", f"note {A}: MTU"]),
        ("same_subnet", {}, [], ["warning cage 0: same-subnet"]),
        ("kernel7", {}, [], ["error this node: kernel-reserve"]),
        ("pair_and_switch", {"nodes": 4}, [], []),
        ("pair_and_switch", {"nodes": 16}, [], []),
        # A third node: the cage in use is kept, the other one is a link of the ring.
        (
            *("second_cable", {"node": 1, "nodes": 3}),
            [f"add {A1} 192.168.104.10/24", f"add {B1} 192.168.105.10/24"],
            ["note this ring: cabling"],
        ),
        # Link-local addresses go where other ones are asked for.
        (
            *("drawn_pair", {"node": 1, "network": IPv4Network("192.168.100.0/24")}),
            [f"replace {A1} 192.168.100.10/24", f"replace {B1} 192.168.101.10/24"],
            ["warning cage 1: link-local-twins"],
        ),
    ],
)
def test_what_has_to_change_and_what_is_remarked(
    machine, name, options, changes, remarks
):
    assert planned(machine(name), **options) == (changes, remarks)


def test_two_cages_in_use_on_many_nodes_are_not_taken_for_a_ring(machine):
    assert (
        make_net_plan(machine("own_ring"), NetPlanOptions(nodes=4)).topology
        == "as found"
    )
    with pytest.raises(UsageError, match="where do the two cables lead"):
        make_net_plan(machine("fresh_both"), NetPlanOptions(node=2, nodes=4))


def test_the_cure_of_a_drawn_address_can_be_pasted(machine):
    """For the half that has drawn it, whichever of both that is."""
    for name, netdev in (("random_twin", B), ("drawn_first", A1), ("drawn_pair", B1)):
        host = machine(name)
        checks = host_checks(host, choose_checked_cages(host))
        (hint,) = [each.hint for each in checks if each.level is Level.WARNING]
        profile = f'"$(nmcli -g GENERAL.CONNECTION device show {netdev})"'
        modify = f"sudo nmcli connection modify {profile} ipv4.method disabled"
        assert f"`{modify} && sudo nmcli device reapply {netdev}`" in hint


def test_a_machine_without_a_cage_a_network_of_the_lan_and_a_slow_cable(machine):
    host, spark = machine("thor", 1), machine("cable_port0", 1)
    assert notable(host_checks(host, choose_checked_cages(host, ["mgbe0_0"]))) == {
        *("mgbe0_0: speed: warning", "mgbe0_0: RoCE v2 GID: unknown"),
    }
    host = with_netdev(spark, "enP7s7", addresses=spark.netdev(B).addresses)
    checks = list(host_checks(host, choose_checked_cages(host)))
    assert notable(checks) == {f"{B}: networks: error"}
    assert "192.168.101.11/24 is in one network with enP7s7" in checks[-1].what
    assert checks[-1].hint.endswith(
        f": `sudo ip address del 192.168.101.11/24 dev {B}`"
    )
    host = with_netdev(spark, B, lanes=2, speed=100000)
    found = notable(host_checks(host, choose_checked_cages(host)))
    assert found == {"cage 0: lanes: warning", f"{B}: speed: warning"}


def test_two_addresses_of_one_half_in_one_network_are_no_fault(machine):
    """The other half, which comes last, has no address at all."""
    host = machine("cable_port0", 1)
    address = host.netdev(A).addresses[0]
    pair = (address, replace(address, address="192.168.100.99"))
    host = with_netdev(with_netdev(host, A, addresses=pair), B, addresses=())

    checks = list(host_checks(host, choose_checked_cages(host)))
    assert notable(checks) == {"cage 0: one-twin-address: note"}
    assert "networks" in {check.about for check in checks}


@pytest.mark.parametrize("kind", ["bond", "bridge"])
def test_parts_of_a_bond_or_bridge_take_no_address(machine, kind):
    host = machine(kind)
    assert {netdev.name for netdev in host.netdevs if netdev.master} == {A, B}
    checks = list(
        verify_network(
            host,
            choose_checked_cages(host),
            ("spark-2", machine(kind, 1)),
            [],
            live=False,
        )
    )
    about = {
        f"{check.about}: {check.level}"
        for check in checks
        if check.level is not Level.OK
    }
    assert about == {
        "part-of-master: warning",
        "same twin: unknown",
        "way to a peer: unknown",
    }
    (told,) = (check for check in checks if check.about == "part-of-master")
    assert (
        f"{A}, {B}: parts of {kind}0, which has their addresses (192.168.100.10/24)"
        in told.what
    )
    assert (
        "patchkit env --role head --topology socket --head-ip 192.168.100.10"
        in told.hint
    )

    for options in (NetPlanOptions(node=1), NetPlanOptions(node=1, netdevs=(A,))):
        with pytest.raises(HostError, match=f"parts of {kind}0") as caught:
            make_net_plan(host, options)
        assert caught.value.hint == told.hint
    named = make_net_plan(host, NetPlanOptions(node=1, netdevs=(f"{kind}0",)))
    assert not named.changes


# Both ends


def compared(ours, theirs):
    nodes = ("spark-1", "spark-2")
    return list(pair_checks(ours, choose_checked_cages(ours), theirs, nodes))


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ("cable_port0", "cable_port0", set()),
        ("cable_port0", "cable_port1", set()),
        ("renamed", "cable_port1", set()),
        ("cable_port0", "wrong_mtu", {"spark-2: mtu: error"}),
        ("cable_port0", "one_twin", {LOST[B]}),
        ("cable_port0", "single", {*LOST.values()}),
        ("cable_out", "cable_port0", {"both ends: common networks: error"}),
        ("bond", "bond", {"bond0 and bond0: same twin: unknown"}),
    ],
)
def test_both_ends(machine, ours, theirs, expected):
    assert notable(compared(machine(ours, 1), machine(theirs, 2))) == expected


@pytest.mark.parametrize(("one", "other"), [(0, 1), (1, 2), (2, 0)])
def test_neighbours_in_a_ring_share_one_link(machine, one, other):
    checks = compared(machine("ring", one), machine("ring", other))
    assert not notable(checks)
    assert len([check for check in checks if check.about == "peer's end"]) == 2
    assert (
        next(c.what for c in checks if c.about == "ports")
        == "port 0 here leads to port 1 there"
    )


def test_a_ring_whose_cable_joins_equal_ports(machine):
    """The other node has its two cables, with their addresses, the other way round."""
    peer = machine("ring", 1)
    turned = {A: A1, A1: A, B: B1, B1: B}
    for name, other in turned.items():
        given = machine("ring", 1).netdev(other).addresses
        peer = with_netdev(peer, name, addresses=given)
    assert notable(compared(machine("ring", 0), peer)) == {"both ends: ports: warning"}


def test_the_same_machine_twice(machine):
    found = compared(machine("cable_port0", 1), machine("cable_port1", 1))
    assert notable(found) == {"both ends: addresses: error"}
    assert found[-1].what.startswith("192.168.100.11, 192.168.101.11 on both")


def test_twins_crossed(machine):
    host = machine("cable_port0", 2)
    peer = with_netdev(host, A, addresses=host.netdev(B).addresses)
    peer = with_netdev(peer, B, addresses=host.netdev(A).addresses)
    assert notable(compared(machine("cable_port0", 1), peer)) == {
        f"{A} and {B}: same twin: warning",
        f"{B} and {A}: same twin: warning",
    }
