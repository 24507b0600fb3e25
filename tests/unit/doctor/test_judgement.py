"""All findings about a cluster: each thing once, the first cause first."""

import json
from dataclasses import replace

import pytest

from patchkit.doctor.bundle import pack_report, private_names
from patchkit.doctor.judgement import cluster_findings
from patchkit.doctor.peers.node_report import NodeReport
from patchkit.doctor.visit import Visit
from patchkit.errors import HostError
from patchkit.finding import Level
from support import node_reports

WRONG = (Level.ERROR, Level.WARNING)


@pytest.fixture(scope="module")
def well(tmp_path_factory):
    return node_reports.reports(tmp_path_factory.mktemp("nodes"))


def changed(report, **changes):
    """The report with the interface of its address changed."""
    name, host = report.ways[0][1].netdev, report.facts.host
    netdevs = [replace(n, **changes) if n.name == name else n for n in host.netdevs]
    return replace(report, facts=replace(report.facts, host=replace(host, netdevs=tuple(netdevs))))


def said(file, nodes):
    found = cluster_findings(file, nodes)
    return [(each.about, each.where) for each in found if each.level in WRONG]


def test_nodes_that_are_well(well):
    file, nodes = well
    found = cluster_findings(file, nodes)
    assert said(file, nodes) == []
    assert ("roce-v2-gid", "spark-1") in {(each.about, each.where) for each in found}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"mtu": 1500}, [("mtu", "spark-2")]),
        ({"carrier": False, "state": "down"}, [("cable", "spark-2")]),
        ({"lanes": 2}, [("lanes", "spark-2")]),
    ],
)
def test_what_several_checks_find_is_said_once(well, change, expected):
    file, (head, worker) = well
    found = said(file, [head, changed(worker, **change)])
    assert found == expected


def test_the_first_cause_stands_first(well):
    """A node without lingering, whose rank is stopped, whose cable is out, and one that is off."""
    file, (head, worker) = well
    failed = node_reports.state(node_reports.unit("failed", "failed"))
    worker = replace(worker, state=failed, processes=())
    worker = changed(worker, carrier=False, state="down")
    worker = replace(worker, facts=replace(worker.facts, linger=False))
    assert [about for about, _ in said(file, [head, worker])] == ["linger", "cable", "unit"]
    silent = NodeReport(node="spark-2", silence=HostError("spark-2: no route"))
    assert said(file, [head, silent]) == [("ssh", "spark-2")]


def test_a_report_has_all_that_the_nodes_said_and_no_error_breaks_it(well):
    _, (head, worker) = well
    worker = replace(worker, no_address=HostError("spark-2 has no address"))
    parts = Visit(findings=(), reports=(head, worker), lines=(("spark-1", "one"),)).parts()
    report = json.loads(pack_report(parts, private_names([]))[0])
    for node in report["nodes"]:
        assert all(node[part] for part in ("facts", "contents", "state", "disks", "models"))
        assert any("VLLM_HOST_IP=" in text for text in node["facts"]["files"].values())
    assert report["journal"] == ["spark-1: one"]
