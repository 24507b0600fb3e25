"""Make findings about one node: texts and thresholds are data, recipes/doctor/machine.toml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from patchkit.cluster.agent.node_facts import NodeFacts
from patchkit.cluster.health.node_health import NodeHealth
from patchkit.doctor.peers.report import NodeReport
from patchkit.doctor.peers.situation import driver_of
from patchkit.finding import Finding, finding_from_text, fine_from_text
from patchkit.paths import RECIPES
from patchkit.records import read_toml

_FILE = "machine.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLimits:
    """Thresholds; ``drivers`` and ``assemblers`` are the oldest by CUDA's release and by target."""

    left_gib: int
    threads: int
    shm_mib: int
    stuck_mhz: int
    busy_percent: int
    drivers: Mapping[str, str]
    assemblers: Mapping[str, str]


@cache
def limits() -> MachineLimits:
    """Return the thresholds."""
    return read_toml(MachineLimits, RECIPES / "doctor" / _FILE, key="limits")


@dataclass(frozen=True, slots=True)
class NodeJudge:
    """A node that answered, and how findings about it are made."""

    report: NodeReport
    facts: NodeFacts
    health: NodeHealth

    @property
    def node(self) -> str:
        return self.report.node

    @property
    def driver(self) -> str:
        """Return the version of the GPU's driver, "" if none says one."""
        return driver_of(self.facts)

    @property
    def vllm(self) -> str:
        """Return the version of the vLLM that is installed, "" for none."""
        software = self.facts.host.software
        return software.vllm if software else ""

    def say(self, about: str, **fields: object) -> Finding:
        """Return what is wrong, or worth knowing."""
        return finding_from_text(_FILE, about, self.node, **fields)

    def fine(self, about: str, **fields: object) -> Finding:
        """Return that a check found nothing wrong, with what was seen."""
        return fine_from_text(_FILE, about, self.node, **fields)
