"""Plans for the QSFP links, on probed machines; the file is read by PyYAML and by real netplan."""

import shutil
import subprocess
from ipaddress import IPv4Network
from pathlib import Path

import pytest
import yaml

from patchkit.cluster.net.addressing import NetPlanOptions, WrittenPlan, make_net_plan
from patchkit.cluster.net.netplan_file import (
    PlanInputs,
    check_conflicts,
    read_written_plan,
    render_netplan,
)
from patchkit.errors import HostError, UsageError
from support import write_files
from support.hosts import with_netdev

GOLDEN = Path(__file__).parents[3] / "data" / "netplan" / "worker_port1.yaml"
PORT0 = ("enp1s0f0np0", "enP2p1s0f0np0")
PORT1 = ("enp1s0f1np1", "enP2p1s0f1np1")
FIRST = {PORT0[0]: "100.10", PORT0[1]: "101.10"}
SECOND = {PORT1[0]: "100.10", PORT1[1]: "101.10"}
FOURTH = {PORT0[0]: "100.13", PORT0[1]: "101.13"}


def wish(node=1, **changes):
    return NetPlanOptions(node=node, **changes)


ANEW = {"network": IPv4Network("192.168.100.0/24")}


def addresses(plan):
    """Netdev → address, as PyYAML reads them from the file."""
    ethernets = yaml.safe_load(render_netplan(plan))["network"]["ethernets"]
    return {netdev: found["addresses"] for netdev, found in ethernets.items()}


def test_the_whole_file(machine):
    assert (
        render_netplan(make_net_plan(machine("fresh_port1"), wish(2)))
        == GOLDEN.read_text()
    )


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("fresh", {}, FIRST),
        ("fresh_port1", {}, SECOND),
        ("ipv6_only", {}, FIRST),
        ("fresh_both", {"netdevs": PORT1}, SECOND),
        ("fresh", {"node": 4, "nodes": 4}, FOURTH),
        ("cable_out", {"netdevs": PORT0}, FIRST),
        ("thor", {"netdevs": ("mgbe1_0",)}, {"mgbe1_0": "100.10"}),
    ],
)
def test_one_cable_or_a_switch(machine, name, changes, expected):
    plan = make_net_plan(machine(name), wish(**changes))
    assert addresses(plan) == {
        key: [f"192.168.{value}/24"] for key, value in expected.items()
    }
    assert plan.topology == ("switch" if plan.nodes > 2 else "cable")


RING = {
    1: ("100.10", "101.10", "104.10", "105.10"),
    2: ("102.11", "103.11", "100.11", "101.11"),
    3: ("104.12", "105.12", "102.12", "103.12"),
}


def test_ring_of_three(machine):
    """Both ends of each link share its two networks, and nobody else is in them."""
    users = {}
    for node, own in RING.items():
        plan = make_net_plan(machine("fresh_both"), wish(node, nodes=3))
        expected = dict(zip((*PORT0, *PORT1), own, strict=True))
        assert addresses(plan) == {
            key: [f"192.168.{value}/24"] for key, value in expected.items()
        }
        for line in plan.lines:
            users.setdefault(line.addresses[0].network, []).append((node, line.peer))
    assert len(users) == 6
    for (one, to_other), (other, to_one) in users.values():
        assert (to_other, to_one) == (other, one)


@pytest.mark.parametrize(
    ("name", "changes", "error", "says"),
    [
        ("cable_out", {}, HostError, "is cabled: cage 0: enp1s0f0np0, enP2p1s0f0np0; cage 1"),
        ("link_down", {}, HostError, "no QSFP cage is cabled"),
        ("thor", {}, HostError, "no QSFP cage that patchkit could recognise"),
        ("single", {}, HostError, "not on the PCI bus[^$]*plug the cable in[^$]*reboot"),
        ("fresh_both", {}, UsageError, r"lead\?.*enp1s0f1np1[^$]*--node 1 --netdev enp1s0f1np1 "),
        ("fresh_both", {"nodes": 4}, UsageError, "--node 1 --nodes 4 --netdev enp1s0f0np0 "),
        ("fresh", {"node": None}, UsageError, "missing --node or --role"),
        ("cable_port0", {"node": 3}, UsageError, "numbered from 1 to 2"),
        ("cable_port0", {"node": 0}, UsageError, "numbered from 1 to 2"),
        ("cable_port0", {"netdevs": ("eth7",)}, UsageError, "'eth7'"),
        ("cable_port0", {"network": IPv4Network("10.0.0.0/28"), "nodes": 6}, UsageError, "small"),
        ("cable_port0", {"network": IPv4Network("255.255.255.0/24")}, UsageError, "no room for 1"),
    ],
)  # fmt: skip
def test_refused(machine, name, changes, error, says):
    with pytest.raises(error, match=says):
        make_net_plan(machine(name), wish(**changes))


# What fights a plan


def clash(host, *, node=1, given=None, files=None, **changes):
    options = wish(node, **changes)
    given = given or WrittenPlan()
    plan = make_net_plan(host, options, written=given)
    check_conflicts(PlanInputs(host, plan, options, given, files or {}))
    return plan


@pytest.mark.parametrize("name", ["cable_port0", "link_local", "ipv6_only", "one_twin"])
def test_the_same_address_or_none_is_no_conflict(machine, name):
    clash(machine(name), **ANEW)


def test_an_address_that_somebody_gave_is_kept_unless_other_ones_are_asked_for(machine):
    """Then the message says who gave it, and every command in it does what it says."""
    host = machine("cable_port0")
    assert not clash(host, node=2).changes
    with pytest.raises(HostError) as refused:
        clash(host, node=2, **ANEW)
    assert (
        "enp1s0f0np0 has the address 192.168.100.10/24; planned is 192.168.100.11/24"
        in refused.value.what
    )
    assert (
        "keep it: patchkit net plan --node 2; or give it up: sudo nmcli"
        in refused.value.hint
    )
    text = "network:\n  ethernets:\n    enp1s0f0np0:\n      addresses: [192.168.100.10/24]\n"
    with pytest.raises(HostError) as refused:
        clash(host, node=2, files={"/etc/netplan/9.yaml": text}, **ANEW)
    assert "enp1s0f0np0 has the address 192.168.100.10/24; " in refused.value.what
    assert "/etc/netplan/9.yaml:3: also configures enp1s0f0np0" in refused.value.what
    aside = "sudo mv /etc/netplan/9.yaml /etc/netplan/9.yaml.off"
    assert f"put it aside, if nothing else needs it: {aside} && " in refused.value.hint


OURS = {PORT0[0]: ("192.168.100.10/24",), PORT0[1]: ("192.168.101.10/24",)}


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (None, {"keep 192.168.100.10/24", "keep 192.168.101.10/24"}),
        (1, {"keep 192.168.100.10/24", "keep 192.168.101.10/24"}),
        (2, {"replace 192.168.100.11/24", "replace 192.168.101.11/24"}),
    ],
)
def test_patchkits_own_addresses_stay_in_its_file_and_follow_the_node(
    machine, node, expected
):
    given = WrittenPlan(addresses=OURS, node=1)
    plan = clash(machine("cable_port0"), node=node, given=given)
    assert {f"{line.action} {line.addresses[0]}" for line in plan.written} == expected
    # They count while the cable is out, too.
    if node is None:
        plan = clash(machine("fresh"), node=None, given=given)
        assert addresses(plan) == {name: list(own) for name, own in OURS.items()}


def test_a_network_that_the_lan_or_docker_has(machine):
    host = machine("ipv6_only")
    for network, says in (
        ("10.0.0.0/24", r"planned for enp1s0f0np0, is also .* enP7s7 \(10.0.0.10/24\)"),
        (
            "172.16.255.0/24",
            r"172.17.0.0/24, planned for enP2p1s0f0np0, is also .* docker0",
        ),
    ):
        with pytest.raises(HostError, match=says) as refused:
            clash(host, network=IPv4Network(network))
        assert (
            ": patchkit net plan --node 1 --network 192.168.100.0/24"
            in refused.value.hint
        )
    clash(host, **ANEW)  # so the command of the hint works


OTHERS = [
    ("network:\n  ethernets:\n    enp1s0f0np0:\n      link-local: [ ipv4 ]\n", 3),
    ("network:\n  ethernets:\n    'enp1s0f0np0': {dhcp4: true}\n", 3),
    ("network:\n  ethernets:\n    enp1s0f0np0:\n      mtu: 1500\n", 3),
    ('network:\n  ethernets:\n    all:\n      match: {name: "en*"}\n', 4),
    (
        "network:\n  ethernets:\n    NM-1:\n      match:\n        name: enP2p1s0f0np0\n",
        5,
    ),
]


@pytest.mark.parametrize(("text", "line"), OTHERS)
def test_another_file_that_configures_the_same_interface(machine, text, line):
    files = {"/etc/netplan/50-x.yaml": text}
    with pytest.raises(
        HostError, match=f"/etc/netplan/50-x.yaml:{line}: also configures en"
    ):
        clash(machine("fresh"), files=files)
    # What is kept is in no file of patchkit's, whoever configures it.
    assert not clash(machine("playbook"), files=files).written


def test_files_about_others_are_none_of_ours(machine):
    others = [
        "    enP7s7:\n      dhcp4: true\n    #enp1s0f0np0:\n",
        "    enp1s0f0np01: {}\n",
    ]
    texts = [None, *(f"network:\n  ethernets:\n{other}" for other in others)]
    clash(
        machine("fresh"),
        files={f"/etc/netplan/{n}.yaml": text for n, text in enumerate(texts)},
    )


# The file, as the next plan and others read it


def test_what_the_file_gives_is_read_back_as_far_as_it_is_understood(machine, tmp_path):
    """So a third node adds its cage to what is there, also after somebody's edit."""
    file = tmp_path / "40-patchkit.yaml"
    assert read_written_plan(file) == WrittenPlan()
    host = machine("second_cable")
    given = WrittenPlan(
        addresses={PORT0[0]: ("10.0.1.2/24",), PORT0[1]: ("10.0.2.2/24",)}, node=1
    )
    text = render_netplan(make_net_plan(host, wish(nodes=3), given))
    file.write_text(text)
    found = read_written_plan(file)
    assert (len(found.addresses), found.node, found.mtu) == (4, 1, 9000)
    assert {**found.addresses, **given.addresses} == found.addresses
    file.write_text(text.replace("10.0.1.2/24", "10.0.1.2/240").replace("node 1", "us"))
    assert read_written_plan(file).addresses.keys() == {PORT0[1], *PORT1}
    assert read_written_plan(file).node == 0


@pytest.mark.parametrize(
    "name", ["on", "12", "0x1f", "1e3", "null", ".5", "a b", "-x", "ä", "x" * 16]
)
def test_any_name_is_read_back_or_refused(machine, name):
    plan = make_net_plan(with_netdev(machine("fresh"), PORT0[0], name=name), wish())
    if name in ("a b", "-x", "ä", "x" * 16):
        with pytest.raises(HostError, match="an interface is called"):
            render_netplan(plan)
    else:
        assert set(yaml.safe_load(render_netplan(plan))["network"]["ethernets"]) == {
            name,
            PORT0[1],
        }


@pytest.mark.skipif(not shutil.which("netplan"), reason="netplan is not installed")
def test_real_netplan_makes_of_it_for_networkd(machine, tmp_path):
    run = tmp_path / "run/systemd/network"
    plan = make_net_plan(machine("fresh_both"), wish(3, nodes=3))
    files = {"01-all.yaml": "network: {version: 2, renderer: networkd}\n"}
    write_files(
        tmp_path / "etc/netplan", {**files, "40-patchkit.yaml": render_netplan(plan)}
    )
    words = ["netplan", "generate", "--root-dir", str(tmp_path)]
    subprocess.run(words, check=True)
    for netdev, address in zip((*PORT0, *PORT1), RING[3], strict=True):
        lines = (run / f"10-netplan-{netdev}.network").read_text().splitlines()
        own = {f"Name={netdev}", f"Address=192.168.{address}/24", "MTUBytes=9000"}
        assert own | {"RequiredForOnline=no", "LinkLocalAddressing=no"} <= set(lines)
        assert not any(line.startswith(("DHCP=", "Gateway=")) for line in lines)
    assert len(list(run.glob("*.network"))) == 4
