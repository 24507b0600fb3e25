"""Say what makes a figure: the machine, the software and the settings, without private names."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from patchkit import __version__
from patchkit.doctor.peers.report import NodeReport
from patchkit.doctor.report.bundle import private_names
from patchkit.doctor.report.redaction import Redactor
from patchkit.measure.bench.planned import PlannedVariant
from patchkit.measure.bench.variants import BenchLoad
from patchkit.units import KIB_PER_GIB

_PACKAGES = ("vllm", "torch", "triton", "transformers", "flashinfer-python", "ray")


def redactor_of(variants: Sequence[PlannedVariant]) -> Redactor:
    """Return what takes names of people and machines, addresses and secrets out of texts."""
    reports = [report for each in variants for report in each.reports]
    return Redactor(private_names((each.node, each.facts) for each in reports))


def digest(
    model: str,
    variants: Sequence[PlannedVariant],
    loads: Sequence[BenchLoad],
    tool: str,
    redactor: Redactor,
) -> dict[str, Any]:
    """Return what JSON takes; values that name people, machines or secrets are placeholders."""
    found = {
        "patchkit": __version__,
        "tool": tool,
        "model": model,
        "model_files": _model(model),
        "machine": _machine(variants[0].report),
        **({"workers": workers} if (workers := _workers(variants[0])) else {}),
        "loads": {each.name: asdict(each) for each in loads},
        "variants": {each.variant.name: _variant(each) for each in variants},
    }
    redactor.learn(found)
    clean: dict[str, Any] = redactor.value(found)
    return clean


def _workers(variant: PlannedVariant) -> list[dict[str, Any]]:
    return [_machine(each) for each in variant.reports[1:]]


def _machine(report: NodeReport) -> dict[str, Any]:
    if report.facts is None:
        return {}
    host, state = report.facts.host, report.health.gpu if report.health else None
    system = host.system
    return {
        "gpu": ", ".join(f"{each.name} ({each.capability})" for each in host.gpus),
        "driver": next((each.driver for each in host.gpus if each.driver), ""),
        "cpu": f"{system.cpu}, {system.cores} cores",
        "machine": f"{system.vendor} {system.product}".strip(),
        "bios": system.bios,
        "kernel": system.kernel,
        "os": system.os,
        "memory": f"{host.memory.total / KIB_PER_GIB:.0f} GiB" if host.memory else "",
        "power_limit": f"{state.limit:.0f} W" if state and state.limit else "",
        "firmware": dict(report.health.firmware) if report.health else {},
    }


def _variant(planned: PlannedVariant) -> dict[str, Any]:
    contents = planned.report.contents
    versions = contents.versions if contents else {}
    return {
        "command": list(planned.words[1:]),
        "variables": dict(planned.variables),
        "versions": {name: versions[name] for name in _PACKAGES if name in versions},
        "files": dict(contents.digests) if contents else {},
        "nccl": asdict(contents.nccl) if contents else {},
    }


def _model(model: str) -> Mapping[str, str]:
    """Return digests of a folder's small files, which say which weights they belong to."""
    folder = Path(model)
    if not folder.is_dir():
        return {}
    return {
        each.name: hashlib.sha256(each.read_bytes()).hexdigest()
        for each in sorted(folder.glob("*.json"))
        if each.stat().st_size < 32 << 20
    }
