"""Read what is known of Kubernetes on Sparks: recipes/env/kubernetes.toml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from patchkit.evidence import Established
from patchkit.paths import RECIPES
from patchkit.records import read_toml


@dataclass(frozen=True, slots=True, kw_only=True)
class PodNames:
    """Names and sizes in a pod: resources, folders, and what LWS calls its labels and variables."""

    gpu: str
    rdma: str
    cache: str
    shm: str
    set_label: str
    rank_label: str
    rank: str
    leader: str
    arch: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTimes:
    """Seconds of a probe; ``timeout`` is 0 for that of a start, whose own limit decides."""

    period: int
    failures: int
    timeout: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNeed:
    """What a cluster has to have; ``least`` is a version, "" where it is not about one."""

    what: str
    least: str
    why: str
    source: str
    evidence: Established

    @property
    def title(self) -> str:
        return f"{self.what} {self.least} or later" if self.least else self.what


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesFacts:
    """The tables of the file."""

    pods: PodNames
    probes: Mapping[str, ProbeTimes]
    need: tuple[ClusterNeed, ...]


@cache
def kubernetes_facts() -> KubernetesFacts:
    """Return what the file says."""
    return read_toml(KubernetesFacts, RECIPES / "env" / "kubernetes.toml")
