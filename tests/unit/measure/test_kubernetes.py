"""Manifests for LeaderWorkerSet: what they hold, and what a container gets of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from patchkit.cluster.launch.plan import planned_ranks, served_model
from patchkit.cluster.launch.units import GroupUnits
from patchkit.errors import HostError, UsageError
from patchkit.measure.kubernetes import escape_dollars, to_yaml
from support.clusters import cluster, node_facts
from support.manifests import OPTIONS, PodGroup, expanded, manifest, planned
from tools import golden_manifests

LARGE = "openai/gpt-oss-120b"
TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)
_SIGNS = "$(reboot) $(HOST_IP) $$(HOST_IP) $ $$ a$( # ` ! % @ | > \\ {a} [a] &a *a ~ .inf"
_MEANT = "y no 1e3 0x1f 012 null true 2001-01-01 1_000 0b1 1:30"
_TEXTS = ("x: y", "- a", "'\"", " lead", "trail ", "", "é", "\u2028", "\U0001f600", "\ufeff")
HOSTILE = [*_SIGNS.split(), *_MEANT.split(), *_TEXTS]


@pytest.mark.parametrize("case", golden_manifests.CASES)
def test_texts_are_those_of_the_golden(case, tmp_path):
    stored = golden_manifests.DATA / f"{case}.yaml"
    found = golden_manifests.short(golden_manifests.manifest(case, tmp_path))
    assert found == stored.read_text(), "look at it, then run tools/golden_manifests.py"


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_get_the_command_and_variables_of_their_unit(count, tmp_path):
    """But for addresses, which a pod has from Kubernetes."""
    file, ranks, model = plan = planned(tmp_path, LARGE, count)
    group = PodGroup(manifest(plan))
    links = (("ssh",),) * (count - 1)
    units = GroupUnits(cluster=file, ranks=tuple(ranks), model=model, links=links)
    assert group.size == count
    for number in range(count):
        own = ranks[number].address
        got = group.command(number, address=own, leader=ranks[0].address)
        there = list(units.words(number))
        there[0] = "vllm"
        if number == 0:
            there[there.index("127.0.0.1")] = own  # listens at the node's address
        assert got == there
        values = {each.name: each.value for each in ranks[number].env.settings}
        values["VLLM_HOST_IP"] = own
        assert values.items() <= group.variables(number, address=own).items()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return planned(tmp_path_factory.mktemp("pair"), LARGE)


@given(words=st.lists(TEXTS | st.sampled_from(HOSTILE), max_size=6))
@settings(max_examples=30, deadline=None)
def test_every_word_reaches_the_container_as_it_is(words, pair):
    file, ranks, model = pair
    file = replace(file, serve=replace(file.serve, args=("--", *words)))
    group = PodGroup(manifest((file, ranks, model)))
    for rank in (0, 1):
        got = group.command(rank)
        assert got[got.index("--") + 1 :] == words


@given(value=TEXTS | st.sampled_from([*HOSTILE, "=", "<<"]))  # two that PyYAML would not read back
def test_every_value_survives(value):
    written = {"env": [{"name": "A", "value": escape_dollars(value)}], value: "key"}
    read = yaml.safe_load(to_yaml(written))
    assert read == written
    assert expanded(read["env"][0]["value"], {"HOST_IP": "x", "": "x"}) == value


@pytest.mark.parametrize("name", ["/srv/$(id)", '/srv/a" #x'])
def test_a_hostile_folder_is_mounted_by_its_name(name, tmp_path):
    group = PodGroup(manifest(planned(tmp_path, name)))
    for rank in (0, 1):
        assert group.command(rank)[2] == name
        mounts = {each["name"]: each for each in group.container(rank)["volumeMounts"]}
        assert (mounts["model"]["mountPath"], mounts["model"]["readOnly"]) == (name, True)
        (volume,) = [each for each in group.pod(rank)["volumes"] if each["name"] == "model"]
        assert volume["hostPath"] == {"path": name, "type": "Directory"}


@pytest.mark.parametrize(
    ("model", "serve", "says"),
    [
        ("/srv/a:b", {}, "cannot be mounted"),
        ("/srv/a\nb", {}, "is not a model"),
        (LARGE, {"host": "0.0.0.0"}, "one machine's address"),
        (LARGE, {"port": 29501}, "rendezvous"),
        (LARGE, {"executor": "ray"}, "no Ray"),
        (LARGE, {"set": {"HF_TOKEN": "hf_abc"}}, "value of a secret"),
    ],
)
def test_what_is_refused(model, serve, says, tmp_path):
    with pytest.raises(UsageError) as error:
        manifest(planned(tmp_path, model, **serve))
    assert says in str(error.value)
    assert "hf_abc" not in f"{error.value} {error.value.hint}"


def test_secrets_are_referred_to(tmp_path):
    """That of a gated model has to be there, others may."""
    gated = planned(tmp_path, "meta-llama/Llama-3.3-70B-Instruct", set={"HF_TOKEN": ""})
    for plan, needed in ((gated, True), (planned(tmp_path, LARGE), False)):
        env = PodGroup(manifest(plan)).container(1)["env"]
        given = {each["name"]: each.get("valueFrom") for each in env}
        for name, optional in (("VLLM_API_KEY", True), ("HF_TOKEN", not needed)):
            source = {"name": "vllm-secrets", "key": name, "optional": optional}
            assert given[name] == {"secretKeyRef": source}


def _of_ports(tmp_path, *ports):
    """A plan for three nodes, each with its cable in that port."""
    file = cluster("spark-0", "spark-1", "spark-2")
    facts = [node_facts(tmp_path, f"cable_port{port}", node) for node, port in enumerate(ports)]
    model = served_model(file, LARGE)
    return file, planned_ranks(file, facts, model), model


def test_a_head_may_be_cabled_otherwise_and_workers_have_one_template(tmp_path):
    group = PodGroup(manifest(_of_ports(tmp_path, 1, 0, 0)))
    netdevs = [group.variables(rank)["NCCL_SOCKET_IFNAME"] for rank in range(3)]
    assert netdevs == ["enp1s0f1np1", "enp1s0f0np0", "enp1s0f0np0"]
    what = "^GLOO_SOCKET_IFNAME is enp1s0f0np0 on spark-1 and enp1s0f1np1"
    with pytest.raises(HostError, match=what):
        manifest(_of_ports(tmp_path, 0, 0, 1))


def test_the_hosts_devices_take_all_rights_of_the_server_alone(pair):
    """The golden texts have those with a device plugin, and without RDMA."""
    group = PodGroup(manifest(pair, replace(OPTIONS, rdma="host")))
    server = group.container(1)
    assert server["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert server["securityContext"]["privileged"] is True
    assert "infiniband" in [each["name"] for each in group.pod(1)["volumes"]]
    assert "privileged" not in group.container(1, "initContainers")["securityContext"]
