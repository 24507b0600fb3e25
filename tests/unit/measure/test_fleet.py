"""Facts of a fleet from those of one node."""

import pytest

from patchkit.errors import UsageError
from patchkit.measure.fleet import equal_nodes, with_versions
from patchkit.runtime.host.hardware import target_of
from support.clusters import node_facts
from support.manifests import planned


@pytest.mark.parametrize("count", [2, 100, 200])
def test_each_node_has_addresses_of_its_own_in_the_heads_networks(count, tmp_path):
    head = node_facts(tmp_path)
    nodes = equal_nodes(head, count)
    assert nodes[0] == head
    for number, netdev in enumerate(head.host.netdevs):
        if netdev.kind == "loopback":
            continue
        for place, own in enumerate(netdev.ipv4):
            others = [each.host.netdevs[number].ipv4[place] for each in nodes]
            assert len({each.ip for each in others}) == count
            assert {each.network for each in others} == {own.network}
            edges = (own.network.network_address, own.network.broadcast_address)
            assert not set(edges) & {each.ip for each in others}
    assert {target_of(each.host) for each in nodes} == {"gb10"}


def test_what_joins_two_is_another_cable_for_the_next_two(tmp_path):
    """One of sixteen: cage 0 leads to one neighbour, cage 1 to a switch that joins them all."""
    _file, ranks, _model = planned(tmp_path, "openai/gpt-oss-120b", 16, "pair_and_switch")
    assert [each.address for each in ranks] == [f"10.10.100.{10 + each}" for each in range(16)]
    cables = [each.facts.host.netdev("enp1s0f0np0").ipv4[0] for each in ranks]
    assert len({each.network for each in cables}) == 8


def test_versions_are_the_images_first_and_vllms_has_to_be_named(tmp_path):
    facts = with_versions(node_facts(tmp_path, vllm="0.25.1"), {"vllm": "0.33.0", "nccl": "2.30.4"})
    found = facts.host.versions
    assert (found["vllm"], found["triton"], found["nccl"]) == ("0.33.0", "3.6.0", "2.30.4")
    with pytest.raises(UsageError, match="which vLLM"):
        with_versions(node_facts(tmp_path, vllm=""), {})
