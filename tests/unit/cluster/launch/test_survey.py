"""Look for what nodes lack, before anything is written."""

from dataclasses import replace

import pytest

from patchkit.cluster.launch.survey import survey_nodes
from patchkit.finding import Level
from support.clusters import node_facts

CURE = "patchkit cluster install"
LACKS = {
    "linger": ({"linger": False}, Level.ERROR, "ssh -t spark-1 'loginctl enable-linger'"),
    "memlock": ({"memlock": 8 << 20}, Level.ERROR, "LimitMEMLOCK=infinity"),
    "journal": ({"persistent_journal": False}, Level.WARNING, "mkdir -p /var/log/journal"),
    "rsync": ({"has": ("ssh", "systemctl")}, Level.ERROR, "sudo apt install rsync"),
    "systemd": ({"systemd": 0}, Level.ERROR, "use DGX OS"),
}


@pytest.mark.parametrize(
    ("product", "cpu", "level"),
    [
        ("NVIDIA_DGX_Spark", "", Level.ERROR),
        ("Dell Pro Max with GB10 FCM1253", "", Level.ERROR),
        ("80YX", "10 x Cortex-X925, 10 x Cortex-A725", Level.ERROR),
        ("ThinkPad", "16 x AMD Ryzen", None),
    ],
)
def test_a_spark_without_a_driver_is_no_machine_without_a_gpu(tmp_path, product, cpu, level):
    facts = node_facts(tmp_path)
    system = replace(facts.host.system, product=product, cpu=cpu)
    host = replace(
        facts.host, system=system, gpus=(), notes=("no GPU is found: nvidia-smi: is not installed",)
    )

    found = [each.level for each in survey_nodes(["spark-1"], [replace(facts, host=host)])]

    assert found == [level] * (level is not None)


@pytest.mark.parametrize("about", LACKS)
def test_what_a_node_lacks(about, tmp_path):
    changes, level, hint = LACKS[about]
    (found,) = survey_nodes(["spark-1"], [node_facts(tmp_path, **changes)])
    assert (found.about, found.level, found.where) == (about, level, "spark-1")
    assert hint in found.hint


def test_a_pair_that_fits(tmp_path):
    facts = [node_facts(tmp_path, node=number) for number in (0, 1)]
    assert [each for each in survey_nodes(["a", "b"], facts) if each.level is Level.ERROR] == []


def test_installations_that_differ(tmp_path):
    facts = [node_facts(tmp_path, node=n, installation=name) for n, name in enumerate("xy")]
    (found,) = [each for each in survey_nodes(["a", "b"], facts) if each.about == "installation"]
    assert (found.level, found.where, found.hint) == (Level.ERROR, "a, b", CURE)
    assert " is x on a, and y on b" in found.what
    same = [replace(each, installation="x") for each in facts]
    assert "installation" not in {each.about for each in survey_nodes(["a", "b"], same)}


def test_a_cable_whose_ends_are_in_different_networks(tmp_path):
    facts = [node_facts(tmp_path), node_facts(tmp_path, "cable_port1", node=1)]
    changed = replace(facts[1].host, netdevs=facts[0].host.netdevs)
    found = list(survey_nodes(["a", "b"], [facts[0], replace(facts[1], host=changed)]))
    assert {each.where for each in found if each.level is Level.ERROR} == {"a, b"}


def test_versions_that_differ(tmp_path):
    facts = [node_facts(tmp_path), node_facts(tmp_path, node=1, vllm="0.24.0")]
    found = [
        each for each in survey_nodes(["a", "b"], facts) if "vllm" in f"{each.about} {each.what}"
    ]
    assert [each.where for each in found] == ["a, b"]
