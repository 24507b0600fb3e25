"""Hold what the nodes of a cluster said when doctor asked them; what a node did not say is None.

And read the files that `up` placed on a node, as far as nodes are compared by them. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from patchkit.cluster.agent.examination import ModelPrint, PythonContents
from patchkit.cluster.agent.health import NodeHealth
from patchkit.cluster.agent.links import PeerLink, Way
from patchkit.cluster.agent.node_facts import DiskRoom, NodeFacts
from patchkit.cluster.agent.unit_state import GroupProcess, Listener, NodeState
from patchkit.digests import digest
from patchkit.doctor.peers.check import make_finding, require
from patchkit.errors import PatchkitError
from patchkit.finding import Finding
from patchkit.runtime.envfile.env_file import EnvFile, env_file
from patchkit.runtime.host.advice import remark
from patchkit.runtime.host.hardware import target_of
from patchkit.runtime.host.host import Host

ENV, GROUP = "node.env", "group.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedFiles:
    """A node's part of a start; ``env`` is None where it is damaged.

    ``id`` is that of the start, "" if ``group.json`` says none, ``edited`` are the files that are
    not as it says; ``folder`` is that of the model which its rank serves, "" for none.
    """

    id: str
    model: str
    url: str
    folder: str
    env: EnvFile | None
    edited: tuple[str, ...]


def placed_files(files: Mapping[str, str], unit: str) -> PlacedFiles | None:
    """Return what an earlier `up` left, None where there is nothing of one."""
    if not {ENV, GROUP, unit} & files.keys():
        return None
    env = None
    with suppress(PatchkitError):
        env = env_file(files.get(ENV, ""), ENV, accept_edited=True)
    try:
        group = json.loads(files.get(GROUP, ""))
    except (ValueError, RecursionError):
        group = {}
    group = group if isinstance(group, dict) else {}
    written = group.get("files")
    written = written if isinstance(written, dict) else {GROUP: ""}
    return PlacedFiles(
        **{name: str(group.get(name, "")) for name in ("id", "model", "url", "folder")},
        env=env,
        edited=tuple(name for name in written if digest(files.get(name)) != written[name]),
    )


def url_of(placed: PlacedFiles | None, port: int) -> str:
    """Return where a node's server listens: as `up` placed it, else on this port of its own."""
    return placed.url if placed and placed.url else f"http://127.0.0.1:{port}"


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
    addresses that a node tried, each with the node that has it. ``placed`` is what the last `up`
    left, None for nothing. ``missing`` has the error of each part that it did not say.
    """

    node: str
    silence: PatchkitError | None = None
    address: str = ""
    no_address: PatchkitError | None = None
    clock: ClockOffset | None = None
    placed: PlacedFiles | None = None
    ways: tuple[tuple[str, Way], ...] | None = None
    missing: Mapping[str, PatchkitError] = field(default_factory=dict)

    def why_not(self, part: str) -> str:
        """Return why a part of the report is missing."""
        if self.silence:
            return f"{self.node} did not answer"
        error = self.missing.get(part)
        return error.what if error else "the node did not say"

    def part(self, name: str) -> Any:
        """Return a part of the report. Raises NotCheckedError if the node did not say it."""
        return require(getattr(self, name), self.why_not(name))

    @property
    def host(self) -> Host:
        """Return the facts of the machine. Raises NotCheckedError if the node said none."""
        host: Host = self.part("facts").host
        return host

    @property
    def env(self) -> EnvFile | None:
        """Return the env file that the last `up` left."""
        return self.placed.env if self.placed else None

    def health_fact(self, name: str) -> Any:
        """Return a fact of the node's health. Raises NotCheckedError if it is not known."""
        health = self.part("health")
        return require(getattr(health, name), health.why_not(name))

    def find(self, about: str, **fields: object) -> Finding:
        """Return the finding of this id, about this node."""
        return make_finding(about, self.node, **fields)


def facts_for_causes(report: NodeReport) -> dict[str, str]:
    """Return the facts of a node that causes of symptoms hang on; the unknown ones are left out."""
    if report.facts is None:
        return {}
    host, health = report.facts.host, report.health or NodeHealth()
    found = {
        **host.versions,
        "target": target_of(host) if host.gpus else "",
        "linger": "yes" if report.facts.linger else "no",
    }
    if memory := host.memory:
        found["kernel_reserve"] = "yes" if remark(host, "kernel-reserve") else "no"
        found["memory"] = "short" if memory.available * 10 < memory.total else "enough"
        if health.page_cache is not None:
            found["page_cache"] = "large" if health.page_cache * 4 > memory.total else "small"
    # What runs is limited, else what would; in a container what starts it, which has no manager.
    process = health.unit
    if health.container:
        found["container"] = "yes" if health.container.kind else "no"
        process = process or (health.process if health.container.kind else None)
    if process:
        free = process.memlock is None or process.locks
        found["memlock"] = "unlimited" if free else "limited"
    elif report.facts.memlock is not None:
        found["memlock"] = "limited"
    elif health.manager:  # no number is also what a manager says that does not answer
        found["memlock"] = "unlimited"
    if report.env:
        found["topology"] = report.env.facts.get("topology", "")
    return {name: value for name, value in found.items() if value}
