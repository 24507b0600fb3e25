"""Look for what nodes lack, before anything is written."""

from dataclasses import replace

import pytest

from patchkit.cluster.launch.survey import survey_nodes
from patchkit.finding import Level
from support.clusters import node_facts

LACKS = {
    "linger": (
        {"linger": False},
        Level.ERROR,
        "ssh -t spark-1 'loginctl enable-linger'",
    ),
    "memlock": ({"memlock": 8 << 20}, Level.ERROR, "LimitMEMLOCK=infinity"),
    "journal": (
        {"persistent_journal": False},
        Level.WARNING,
        "mkdir -p /var/log/journal",
    ),
    "groups": (
        {"unified_groups": False},
        Level.WARNING,
        "systemd.unified_cgroup_hierarchy=1",
    ),
    "rsync": ({"rsync": False}, Level.ERROR, "sudo apt install rsync"),
    "systemd": ({"systemd": False}, Level.ERROR, "use DGX OS"),
}


@pytest.mark.parametrize(
    ("product", "cpu", "level"),
    [
        ("Dell Pro Max with GB10 FCM1253", "", Level.ERROR),
        ("80YX", "10 x Cortex-X925, 10 x Cortex-A725", Level.ERROR),
        ("ThinkPad", "16 x AMD Ryzen", None),
    ],
)
def test_a_spark_without_a_driver_is_no_machine_without_a_gpu(
    tmp_path, product, cpu, level
):
    facts = node_facts(tmp_path)
    system = replace(facts.host.system, product=product, cpu=cpu)
    host = replace(facts.host, system=system, gpus=(), notes=("no GPU is found",))
    found = [
        each.level for each in survey_nodes(["spark-1"], [replace(facts, host=host)])
    ]
    assert found == [level] * (level is not None)


@pytest.mark.parametrize("about", LACKS)
def test_what_a_node_lacks(about, tmp_path):
    changes, level, hint = LACKS[about]
    (found,) = survey_nodes(["spark-1"], [node_facts(tmp_path, **changes)])
    assert (found.about, found.level, found.where) == (about, level, "spark-1")
    assert hint in found.hint


def errors_of(*facts):
    """Return what is wrong with a pair, by what it is about."""
    found = survey_nodes(["a", "b"], facts)
    return {each.about: each for each in found if each.level is Level.ERROR}


def test_a_pair(tmp_path):
    head, worker = (node_facts(tmp_path, node=number) for number in (0, 1))
    assert errors_of(head, worker) == {}
    other = errors_of(
        replace(head, installation="x"), replace(worker, installation="y")
    )
    found = other["installation"]
    assert (found.where, found.hint) == ("a, b", "patchkit cluster install")
    assert " is x on a, and y on b" in found.what
    twin = replace(
        node_facts(tmp_path, "cable_port1", node=1).host, netdevs=head.host.netdevs
    )
    assert {
        each.where for each in errors_of(head, replace(worker, host=twin)).values()
    } == {"a, b"}
