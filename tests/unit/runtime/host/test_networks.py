"""How the networks of a host's interfaces are compared, and the halves of a cage."""

from __future__ import annotations

import pytest

from patchkit.runtime.host.networks import overlaps, twin_state


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("cable_port0", "both", "both"),
        ("same_subnet", "both", "both"),
        ("one_twin", "bare", "both"),
        ("random_twin", "random", "random"),
        ("link_local", "link-local", "link-local"),
        ("link_down", "down", "down"),
    ],
)
def test_how_the_other_half_is_addressed(machine, name, first, second):
    found = machine(name)
    names = ("enp1s0f0np0", "enP2p1s0f0np0")
    assert [twin_state(found, found.netdev(each)) for each in names] == [first, second]


@pytest.mark.parametrize(
    ("name", "asked", "seen"),
    [
        ("two_in_one_subnet", {"enp1s0f1np1"}, [("enp1s0f1np1", "enP7s7")]),
        ("two_in_one_subnet", {"enp1s0f1np1", "enP7s7"}, []),  # among those asked for: not here
        ("switch_in_the_lan", {"enp1s0f0np0"}, [("enp1s0f0np0", "enP7s7")]),
        ("link_local", {"enp1s0f0np0"}, []),  # 169.254 is everybody's
    ],
)
def test_two_interfaces_in_one_network(machine, name, asked, seen):
    found = overlaps(machine(name), asked)
    assert [(each.netdev.name, each.other.name) for each in found] == seen
