"""Nodes that try their GPUs: without one, without vLLM, without an answer."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from patchkit.doctor.gpu import cable_between, try_gpus
from patchkit.doctor.peers.report import NodeReport
from patchkit.doctor.smoke.smoke import smoke_steps
from patchkit.errors import HostError
from patchkit.finding import Level
from support.node_reports import reports


def without_torch(folder: Path, report: NodeReport) -> NodeReport:
    """Return a report of this machine, with a Python that has a torch which does not load."""
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        python.parent.mkdir(parents=True)
        (folder / "torch.py").write_text("raise ImportError('no torch')", encoding="utf-8")
        python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
        python.chmod(0o755)
    assert report.facts
    return replace(report, node="localhost", facts=replace(report.facts, venv=str(folder / "venv")))


def test_nodes_whose_gpus_are_not_reached_are_not_checked(tmp_path: Path) -> None:
    nodes = [without_torch(tmp_path, each) for each in reports(tmp_path / "hosts")[1]]
    found = [*try_gpus(nodes)]
    steps = [each.id for each in smoke_steps()]
    assert [each.about for each in found] == [*steps, *steps, "all-reduce"]
    assert {each.level for each in found} == {Level.UNKNOWN}
    assert {each.what for each in found[:-1]} == {"not checked: torch cannot be imported: no torch"}
    assert found[-1].what == "not checked: the GPU of localhost was not reached"


def test_a_node_that_does_not_answer_is_not_checked(tmp_path: Path) -> None:
    _, (head, worker) = reports(tmp_path)
    silent = [NodeReport(node=each.node, silence=HostError("no answer")) for each in (head, worker)]
    found = [*try_gpus(silent)]
    assert [(each.about, each.where, each.level) for each in found] == [
        ("gpu-smoke", "spark-1", Level.UNKNOWN),
        ("gpu-smoke", "spark-2", Level.UNKNOWN),
        ("all-reduce", "spark-1, spark-2", Level.UNKNOWN),
    ]


def test_the_cable_is_that_of_the_node_with_the_fewest_halves(tmp_path: Path) -> None:
    _, (head, worker) = reports(tmp_path)
    assert cable_between([head, worker]) == 23.125
    assert cable_between([head, replace(worker, address="10.0.0.1")]) is None
    assert cable_between([head, replace(worker, facts=None)]) is None
