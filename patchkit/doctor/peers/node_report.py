"""Hold what nodes said when doctor asked them, and make checks of it that always answer.

What a node did not say is None. A check says what is wrong, that all is well, or why it was not
made; its texts are data, in recipes/doctor: it names one by its id, and has the fields of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from patchkit.cluster.agent.health import DiskRoom, NodeHealth
from patchkit.cluster.agent.image_facts import ImageFacts
from patchkit.cluster.agent.links import PeerLink, Way
from patchkit.cluster.agent.node_facts import ModelPrint, NodeFacts, PythonContents
from patchkit.cluster.agent.node_state import GroupProcess, NodeState
from patchkit.cluster.agent.processes import Listener
from patchkit.cluster.ssh.ssh import ssh_command
from patchkit.digests import digest
from patchkit.errors import PatchkitError
from patchkit.finding import Finding, Level, finding_from_text, finding_texts
from patchkit.runtime.envfile.env_file import EnvFile, env_file
from patchkit.runtime.host.advice import find_remark
from patchkit.runtime.host.host import Host

ENV, GROUP = "node.env", "group.json"
_FILES = (
    "peers.toml",
    "machine.toml",
    "images.toml",
    "nccl.toml",
    "server.toml",
    "gpu.toml",
)

_Value = TypeVar("_Value")
Outcome = Finding | Sequence[Finding] | Mapping[str, object]
"""State what a check returns: findings, or the fields of the text that says that all is well."""


class NotCheckedError(PatchkitError):
    """The reason why a check could not be made, and what would let it be made."""


def require(value: _Value | None, why: str) -> _Value:
    """Return a value that a check needs. Raises NotCheckedError for None."""
    if value is None:
        raise NotCheckedError(why)
    return value


def make_finding(about: str, where: str, **fields: object) -> Finding:
    """Return the finding of this id; its command is made there, if it names the words of one."""
    file = next(name for name in _FILES if about in finding_texts(name))
    if run := finding_texts(file)[about].run:
        fields = {
            "command": ssh_command(where, *(word.format_map(fields) for word in run)),
            **fields,
        }
    return finding_from_text(file, about, where, **fields)


def make_fine(about: str, where: str, **fields: object) -> Finding:
    """Return that a check found nothing wrong, with what was seen."""
    text = next(
        finding_texts(name)[about] for name in _FILES if about in finding_texts(name)
    )
    return Finding(
        level=Level.OK,
        where=where,
        about=about,
        what=text.fine.format_map(fields),
        source=text.source.format_map(fields),
    )


def unchecked(about: str, where: str, reason: str, hint: str = "") -> Finding:
    """Return that it was not looked at, with the reason."""
    what = f"not checked: {reason}"
    return Finding(level=Level.UNKNOWN, where=where, about=about, what=what, hint=hint)


def check(
    *names: str,
) -> Callable[[Callable[..., Outcome]], Callable[..., list[Finding]]]:
    """Make a function a check of these names, which returns findings whatever happens.

    Its first argument has the ``node`` that is checked. Where it raises NotCheckedError each of the
    names is unknown. Where it returns fields, the first name is fine.
    """
    return lambda function: partial(_run_check, names, function)


def _run_check(
    names: tuple[str, ...], function: Callable[..., Outcome], checked: Any, *args: Any
) -> list[Finding]:
    try:
        outcome = function(checked, *args)
    except NotCheckedError as error:
        return [unchecked(name, checked.node, error.what, error.hint) for name in names]
    if isinstance(outcome, Mapping):
        return [make_fine(names[0], checked.node, **outcome)]
    return [outcome] if isinstance(outcome, Finding) else list(outcome)


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
        edited=tuple(
            name for name in written if digest(files.get(name)) != written[name]
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAnswer:
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
class NodeReport(NodeAnswer):
    """What a node said; ``silence`` is why it said nothing at all.

    ``address`` is its IPv4 address in the cluster: what it has now, else what cluster.toml or the
    last start say, "" if nobody does; ``no_address`` is why it has none now. ``ways`` are the
    addresses that a node tried, each with the node that has it. ``placed`` is what the last `up`
    left. ``serving`` says what answers requests where the server is to listen.
    ``missing`` has the error of each part that it did not say.
    """

    node: str
    silence: PatchkitError | None = None
    address: str = ""
    no_address: PatchkitError | None = None
    placed: PlacedFiles | None = None
    serving: str = ""
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
    def engine(self) -> ImageFacts:
        """Return what containers get. Raises NotCheckedError if no engine said it."""
        image: ImageFacts = self.part("facts").image
        return require(
            image if image.version else None, image.said or "no engine is installed"
        )

    @property
    def driver(self) -> str:
        """Return the version of the GPU's driver. Raises NotCheckedError if none says one."""
        found = (gpu.driver for gpu in self.host.gpus if gpu.driver[:1].isdigit())
        return require(next(found, None), "no driver of a GPU says its version")

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
        "target": host.target if host.gpus else "",
        "linger": "yes" if report.facts.linger else "no",
    }
    if memory := host.memory:
        found["kernel_reserve"] = "yes" if find_remark(host, "kernel-reserve") else "no"
        found["memory"] = "short" if memory.available * 10 < memory.total else "enough"
        if health.page_cache is not None:
            found["page_cache"] = (
                "large" if health.page_cache * 4 > memory.total else "small"
            )
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
