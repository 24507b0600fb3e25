"""Hold what the nodes of a cluster said when doctor asked them; what a node did not say is None."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from patchkit.cluster.agent.examination import ModelPrint, PythonContents, UnitFile
from patchkit.cluster.agent.links import PeerLink, Way
from patchkit.cluster.agent.node_facts import DiskRoom, NodeFacts
from patchkit.cluster.agent.unit_state import GroupProcess, Listener, NodeState
from patchkit.cluster.health.node_health import NodeHealth
from patchkit.doctor.peers.check import require
from patchkit.doctor.peers.placed_files import PlacedFiles
from patchkit.errors import PatchkitError
from patchkit.runtime.host.advice import remark
from patchkit.runtime.host.hardware import target_of
from patchkit.runtime.host.host import Host
from patchkit.runtime.node.env_file import EnvFile


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """Seconds that a node's clock is ahead of the launcher's, and how wrong that may be."""

    ahead: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaidParts:
    """What a node says of itself; ``links`` are how a head reaches each worker by ssh."""

    facts: NodeFacts | None = None
    health: NodeHealth | None = None
    state: NodeState | None = None
    unit_file: UnitFile | None = None
    contents: PythonContents | None = None
    processes: tuple[GroupProcess, ...] | None = None
    listeners: tuple[Listener, ...] | None = None
    disks: tuple[DiskRoom, ...] | None = None
    models: tuple[ModelPrint, ...] | None = None
    links: tuple[PeerLink, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport(SaidParts):
    """What a node said. ``silence`` is why it said nothing at all, None if it answered.

    ``address`` is its IPv4 address in the cluster: what it has now, else what cluster.toml or the
    last start say, "" if nobody does; ``no_address`` is why it has none now. ``ways`` are the
    addresses that a node tried, each with the node that has it. ``ports_tried`` says that a head
    tried the ports between all nodes, ``blocked`` what was wrong with them. ``placed`` is what the
    last `up` left, None for nothing. ``missing`` has the error of each part that it did not say.
    """

    node: str
    silence: PatchkitError | None = None
    address: str = ""
    no_address: PatchkitError | None = None
    clock: ClockOffset | None = None
    placed: PlacedFiles | None = None
    ways: tuple[tuple[str, Way], ...] | None = None
    ports_tried: bool = False
    blocked: PatchkitError | None = None
    missing: Mapping[str, PatchkitError] = field(default_factory=dict)

    def why_not(self, part: str) -> str:
        """Return why a part of the report is missing."""
        if self.silence:
            return f"{self.node} did not answer"
        error = self.missing.get(part)
        return error.what if error else "the node did not say"

    @property
    def known_facts(self) -> NodeFacts:
        """Return the facts. Raises NotCheckedError if the node said none."""
        return require(self.facts, self.why_not("facts"))

    @property
    def host(self) -> Host:
        """Return the facts of the machine. Raises NotCheckedError if the node said none."""
        return self.known_facts.host

    @property
    def env(self) -> EnvFile | None:
        """Return the env file that the last `up` left."""
        return self.placed.env if self.placed else None

    def health_fact(self, name: str) -> Any:
        """Return a fact of the node's health. Raises NotCheckedError if it is not known."""
        health = require(self.health, self.why_not("health"))
        return require(getattr(health, name), health.why_not(name))

    @property
    def driver(self) -> str:
        """Return the version of the GPU's driver, "" if none says one."""
        versions = (gpu.driver for gpu in self.facts.host.gpus) if self.facts else ()
        return next((each for each in versions if re.match(r"\d+(?:\.\d+)+", each)), "")


def facts_for_causes(report: NodeReport) -> dict[str, str]:
    """Return the facts of a node that causes of symptoms hang on; the unknown ones are left out."""
    if report.facts is None:
        return {}
    host, health = report.facts.host, report.health or NodeHealth()
    packages = health.packages.versions if health.packages else {}
    found = {
        **host.versions,
        "driver": report.driver,
        "target": target_of(host) if host.gpus else "",
        "kernel": ".".join(re.findall(r"\d+", host.system.kernel)[:4]),
        "linger": "yes" if report.facts.linger else "no",
        "memlock": _memlock_fact(report.facts, health),
        "flashinfer": packages.get("flashinfer-python", ""),
        "transformers": packages.get("transformers", ""),
    }
    if memory := host.memory:
        found["kernel_reserve"] = "yes" if remark(host, "kernel-reserve") else "no"
        found["memory"] = "short" if memory.available * 10 < memory.total else "enough"
        if health.page_cache is not None:
            found["page_cache"] = "large" if health.page_cache * 4 > memory.total else "small"
    if software := host.software:
        found |= {"ray": software.ray, "cuda": software.cuda}
    if health.container:
        found["container"] = "yes" if health.container.kind else "no"
    if report.env:
        found |= {name: report.env.facts.get(name, "") for name in ("topology", "executor")}
    return {name: value for name, value in found.items() if value}


def _memlock_fact(facts: NodeFacts, health: NodeHealth) -> str:
    """Return whether a rank's memory that can be locked is limited: what runs, else what would."""
    process = health.unit
    # In a container there is no manager: what is started there has the limits of what starts it.
    if not process and health.container and health.container.kind:
        process = health.process
    if process:
        return "unlimited" if process.memlock is None or process.locks else "limited"
    if facts.memlock is not None:
        return "limited"
    # No number is also what a manager says that does not answer.
    return "unlimited" if health.manager else ""
