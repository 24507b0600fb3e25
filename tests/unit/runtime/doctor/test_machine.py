"""A machine that is well, each thing that can be wrong with it, and what cannot be looked at."""

from __future__ import annotations

from dataclasses import replace

import pytest

from patchkit.finding import Level
from patchkit.runtime.doctor.machine import facts_for_causes, machine_findings
from patchkit.runtime.health.closer import NodeHealth
from patchkit.runtime.health.compilers import Compilers, JitCache
from patchkit.runtime.health.limits import ContainerLimits, ProcessLimits
from patchkit.runtime.host.host import Gpu
from patchkit.runtime.host.nvml import GpuState
from patchkit.runtime.host.probe import probe
from patchkit.runtime.peers.report import NodeReport
from support import clusters, hosts, node_reports

WELL = NodeHealth(
    page_cache=1 << 20,
    guards=("earlyoom",),
    synced=True,
    gpu=GpuState(50, 60.0, 140.0, 2400, 0, (10,)),
    process=ProcessLimits(known=True),
    unit=ProcessLimits(known=True),
    compilers=Compilers(programs=(("cc", "/usr/bin/cc"),), python_h="/usr/include/Python.h"),
    pins={"torch": "2.11.0", "triton": "3.6.0"},
)
XID = "2026-11-23T03:00:00+0000 s kernel: NVRM: Xid (PCI:000f): 79, GPU has fallen off the bus."


@pytest.fixture(scope="module")
def well(tmp_path_factory):
    _, (head, _worker) = node_reports.reports(tmp_path_factory.mktemp("nodes"))
    return replace(head, health=WELL)


def judged(report, **changes):
    health = replace(report.health, **changes)
    return list(machine_findings(replace(report, health=health)))


def wrong(findings):
    return {each.about: each for each in findings if each.level in (Level.ERROR, Level.WARNING)}


def with_memory(report, **changes):
    host = report.facts.host
    memory = replace(host.memory, **changes)
    return replace(report, facts=replace(report.facts, host=replace(host, memory=memory)))


def with_driver(report, driver):
    host = report.facts.host
    gpus = (Gpu(name="NVIDIA GB10", capability="12.1", driver=driver),)
    return replace(report, facts=replace(report.facts, host=replace(host, gpus=gpus)))


def test_a_machine_that_is_well(well):
    found = judged(well)

    assert wrong(found) == {}
    assert {each.about for each in found if each.level is Level.OK} >= {"memory", "gpu-state"}


@pytest.mark.parametrize(
    ("about", "changes"),
    [
        ("clock-sync", {"synced": False}),
        ("gpu-throttled", {"gpu": GpuState(95, 60.0, 140.0, 900, 0x40, (10,))}),
        ("gpu-others", {"gpu": GpuState(50, 60.0, 140.0, 2400, 0, (10, 4711))}),
        ("unit-memlock", {"unit": ProcessLimits(known=True, memlock=8 << 20)}),
        ("container-pids", {"container": ContainerLimits(kind="podman", pids=2048, verbs_open=9)}),
        (
            "container-shm",
            {"container": ContainerLimits(kind="docker", shm=64 << 20, verbs_open=9)},
        ),
        ("container-rdma", {"container": ContainerLimits(kind="docker", verbs=4, verbs_open=0)}),
        ("python-pins", {"pins": {"torch": "2.10.0"}}),
        ("gpu-off-the-bus", {"kernel": (XID,)}),
    ],
)
def test_each_fault_is_found_and_nothing_else(well, about, changes):
    found = wrong(judged(well, **changes))

    assert list(found) == [about]
    assert found[about].where.startswith("spark-1")
    assert found[about].hint


@pytest.mark.parametrize(
    ("about", "change"),
    [
        ("memory-left", lambda well: with_memory(well, available=4 << 20)),
        ("driver", lambda well: with_driver(well, "570.86.15")),
    ],
)
def test_faults_that_facts_show(well, about, change):
    report = change(well)
    software = replace(report.facts.host.software, cuda="13.0")
    facts = replace(report.facts, host=replace(report.facts.host, software=software))

    assert about in wrong(judged(replace(report, facts=facts)))


def test_what_is_only_worth_knowing(well):
    stopped = with_memory(replace(well, processes=()), available=20 << 20, swap_total=0)
    cache = JitCache(owner="flashinfer", folder="/c", names=("0.6.1", "0.6.8", "0.6.8/121a"))
    contents = replace(stopped.contents, versions={"flashinfer-python": "0.6.8"})
    found = judged(
        replace(stopped, contents=contents),
        page_cache=90 << 20,
        guards=(),
        compilers=replace(WELL.compilers, caches=(cache,)),
    )

    notes = {each.about for each in found if each.level is Level.NOTE}
    assert notes >= {"memory-taken", "page-cache", "memory-guard", "jit-cache"}


def test_what_could_not_be_read_is_not_fine(well):
    unread = dict.fromkeys(("kernel", "gpu", "synced", "page_cache"), "only root may")
    found = {each.about: each for each in judged(well, unread=unread)}

    for about in ("kernel-log", "gpu-state", "clock-sync", "memory"):
        assert (found[about].level, found[about].what) == (
            Level.UNKNOWN,
            "not checked: only root may",
        )


def test_a_node_that_said_nothing():
    (found,) = machine_findings(NodeReport(node="spark-3"))

    assert (found.level, found.where) == (Level.UNKNOWN, "spark-3")


@pytest.mark.parametrize("kind", ["single", "kernel7", "kernel7_mended", "thor", "missing_files"])
def test_machines_and_the_facts_that_causes_hang_on(tmp_path, kind):
    facts = clusters.node_facts(tmp_path, node=0)
    host = probe(hosts.build(tmp_path / kind, kind, node=0), python=None, environment={})
    report = NodeReport(node="spark-1", facts=replace(facts, host=host), health=WELL)

    assert wrong(machine_findings(report)) == {}
    if kind.startswith("kernel7"):
        known = facts_for_causes(report)
        assert known["kernel_reserve"] == ("yes" if kind == "kernel7" else "no")
        assert known["kernel"] == "7.0.0.1019"
        assert known["target"] == "gb10"
