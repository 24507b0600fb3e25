"""Say of a node which facts causes of symptoms hang on. Pure."""

from __future__ import annotations

import re

from patchkit.cluster.agent.node_facts import NodeFacts
from patchkit.doctor.peers.report import NodeReport
from patchkit.runtime.host.advice import remark
from patchkit.runtime.host.hardware import target_of

# The names of packages, by the fact that their version is.
_PACKAGES = {
    "flashinfer": "flashinfer-python",
    "transformers": "transformers",
}


def facts_for_causes(report: NodeReport) -> dict[str, str]:
    """Return the facts of a node that causes hang on; what is not known is left out."""
    if report.facts is None:
        return {}
    host = report.facts.host
    found = {
        **host.versions,
        "driver": driver_of(report.facts),
        "target": target_of(host) if host.gpus else "",
        "kernel": ".".join(re.findall(r"\d+", host.system.kernel)[:4]),
        "linger": "yes" if report.facts.linger else "no",
        **_memory_facts(report),
        **_software_facts(report),
    }
    if report.health and report.health.container:
        found["container"] = "yes" if report.health.container.kind else "no"
    found["memlock"] = _memlock_fact(report)
    if env := report.placed.env if report.placed else None:
        found |= {name: env.facts.get(name, "") for name in ("topology", "executor")}
    return {name: value for name, value in found.items() if value}


def _memory_facts(report: NodeReport) -> dict[str, str]:
    assert report.facts is not None
    host, health = report.facts.host, report.health
    if host.memory is None:
        return {}
    cache = health.page_cache if health else None
    large = "" if cache is None else "large" if cache * 4 > host.memory.total else "small"
    return {
        "kernel_reserve": "yes" if remark(host, "kernel-reserve") else "no",
        "memory": "short" if host.memory.available * 10 < host.memory.total else "enough",
        "page_cache": large,
    }


def _software_facts(report: NodeReport) -> dict[str, str]:
    assert report.facts is not None
    software = report.facts.host.software
    if software is None:
        return {}
    installed = report.health.packages if report.health else None
    versions = installed.versions if installed else {}
    packages = {fact: versions.get(name, "") for fact, name in _PACKAGES.items()}
    return {"ray": software.ray, "cuda": software.cuda, **packages}


def _memlock_fact(report: NodeReport) -> str:
    """Return whether a rank's memory that can be locked is limited: what runs, else what would."""
    facts, health = report.facts, report.health
    unit = health.unit if health else None
    process = health.process if health else None
    if unit and unit.known:
        return "unlimited" if unit.memlock is None or unit.locks else "limited"
    # In a container there is no manager: what is started there has the limits of what starts it.
    if process and process.known and health and health.container and health.container.kind:
        return "unlimited" if process.memlock is None or process.locks else "limited"
    if facts and facts.memlock is not None:
        return "limited"
    # No number is also what a manager says that does not answer.
    return "unlimited" if health and health.manager else ""


def driver_of(facts: NodeFacts) -> str:
    """Return the version of the GPU's driver, "" if none says one."""
    versions = (gpu.driver for gpu in facts.host.gpus)
    return next((each for each in versions if is_version(each)), "")


def is_version(text: str) -> bool:
    """Return whether this begins as a version does: ``580.142``."""
    return re.fullmatch(r"\d+(?:\.\d+)+.*", text) is not None
