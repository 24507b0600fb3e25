"""Hold the reports of nodes, and turn functions into checks of reports.

A part of a report that a node did not send is None. A check returns what is wrong, that all is
well, or why the check was not made. The texts of findings are data in recipes/doctor: a check
gives the id of a text and the values of its fields.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from functools import partial
from typing import Any, TypeVar

from patchkit.cluster.agent.health import DiskRoom, NodeHealth
from patchkit.cluster.agent.image_facts import ImageFacts
from patchkit.cluster.agent.node_facts import (
    ModelPrint,
    NodeFacts,
    PeerLink,
    PythonContents,
    Way,
)
from patchkit.cluster.agent.node_state import NodeState
from patchkit.cluster.agent.processes import Listener, Process
from patchkit.cluster.ssh.ssh import make_finding, make_fine, ssh_command, unchecked
from patchkit.digests import digest
from patchkit.errors import PatchkitError
from patchkit.finding import Finding
from patchkit.frozen import Fields, Texts, Values, frozen
from patchkit.records import read_json
from patchkit.runtime.envfile.env_file import EnvFile, parse_env_file
from patchkit.runtime.host.advice import find_remark
from patchkit.runtime.host.host import Host

_ENV = "node.env"
_GROUP = "group.json"
_Value = TypeVar("_Value")
Outcome = Finding | Sequence[Finding] | Mapping[str, object]
"""The result of a check: findings, or the fields for the text of a check that passed."""


class NotCheckedError(PatchkitError):
    """The reason why a check could not be made, and what would let it be made."""


def require(value: _Value | None, reason: str) -> _Value:
    """Return a value that a check needs. Raise NotCheckedError for None."""
    if value is None:
        raise NotCheckedError(reason)
    return value


def check(
    *names: str,
) -> Callable[[Callable[..., Outcome]], Callable[..., list[Finding]]]:
    """Return a decorator that makes a function a check of these names, which returns findings.

    The function's first argument has an attribute ``node``: the checked node's name. If the
    function raises NotCheckedError, the check returns an unknown finding for each name. If the
    function returns fields, the check returns an OK finding for the first name.
    """
    return lambda function: partial(_run_check, names, function)


def _run_check(
    names: Texts,
    function: Callable[..., Outcome],
    checked: Any,
    *args: Any,
) -> list[Finding]:
    try:
        outcome = function(checked, *args)
    except NotCheckedError as error:
        return [unchecked(name, checked.node, error.what, error.hint) for name in names]

    if isinstance(outcome, Mapping):
        return [make_fine(names[0], checked.node, report=checked, **outcome)]
    return [outcome] if isinstance(outcome, Finding) else list(outcome)


@frozen
class PlacedFiles:
    """The files that a start by `up` left on a node; ``env`` is None if node.env is damaged.

    ``id`` names the start, "" if ``group.json`` has no id. ``edited`` are the files that differ
    from their digests in ``group.json``. ``folder`` is the folder of the model that the node's
    rank serves, "" if it has none. ``modules`` are patterns of FlashInfer's modules.
    """

    id: str
    model: str
    url: str
    folder: str
    modules: str
    env: EnvFile | None
    edited: Texts


def placed_files(files: Values, unit: str) -> PlacedFiles | None:
    """Return what an earlier `up` left on a node, None if it left no files.

    ``files`` is name → content, ``unit`` the name of the unit's file. A damaged file does not
    raise; a ``group.json`` without digests counts as edited.
    """
    if files.keys().isdisjoint((_ENV, _GROUP, unit)):
        return None

    env = None
    with suppress(PatchkitError):
        env = parse_env_file(files.get(_ENV, ""), _ENV, accept_edited=True)

    group: Fields = {}
    with suppress(ValueError):
        group = read_json(Fields, files.get(_GROUP, ""))

    digests = group.get("files")
    if not isinstance(digests, dict):
        digests = {_GROUP: ""}

    edited = [name for name in digests if digest(files.get(name)) != digests[name]]
    names = ("id", "model", "url", "folder", "modules")
    texts = {name: str(group.get(name, "")) for name in names}
    return PlacedFiles(env=env, edited=tuple(edited), **texts)


@frozen
class NodeAnswer:
    """What a node sends about itself; ``links`` says whether a head reaches each worker by ssh."""

    facts: NodeFacts | None = None
    health: NodeHealth | None = None
    state: NodeState | None = None
    contents: PythonContents | None = None
    processes: tuple[Process, ...] | None = None
    listeners: tuple[Listener, ...] | None = None
    disks: tuple[DiskRoom, ...] | None = None
    models: tuple[ModelPrint, ...] | None = None
    links: tuple[PeerLink, ...] | None = None


@frozen
class NodeReport(NodeAnswer):
    """All that is known of a node; ``silence`` is why the node sent nothing at all.

    ``address`` is the node's IPv4 address in the cluster: the current one, else that of
    cluster.toml or the last start, "" for none. ``no_address`` is why a start would find no
    address now. ``ways`` are pairs: the name of another node, and the way to one of its addresses.
    ``placed`` is what the last `up` left. ``serving`` describes what answers requests at the
    server's port. ``missing`` is part → the error that the node sent instead of the part.
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
        """Return a part of the report. Raise NotCheckedError if the node did not send it."""
        return require(getattr(self, name), self.why_not(name))

    @property
    def host(self) -> Host:
        """Return the facts of the machine. Raise NotCheckedError if the node sent none."""
        host: Host = self.part("facts").host
        return host

    @property
    def engine(self) -> ImageFacts:
        """Return the facts of the container engine. Raise NotCheckedError without one."""
        image: ImageFacts = self.part("facts").image
        if not image.version:
            raise NotCheckedError(image.said or "no engine is installed")

        return image

    @property
    def driver(self) -> str:
        """Return the version of the GPU's driver. Raise NotCheckedError if none is known."""
        for gpu in self.host.gpus:
            if gpu.driver[:1].isdigit():
                return gpu.driver

        raise NotCheckedError("no driver of a GPU says its version")

    @property
    def env(self) -> EnvFile | None:
        """Return the env file that the last `up` left."""
        return self.placed.env if self.placed else None

    def health_fact(self, name: str) -> Any:
        """Return a fact of the node's health. Raise NotCheckedError if it is not known."""
        health = self.part("health")

        return require(getattr(health, name), health.why_not(name))

    def find(self, about: str, **fields: object) -> Finding:
        """Return the finding with the id ``about``, about this node.

        Its text may use fields of this report, such as {report.facts}.
        """
        return make_finding(about, self.node, report=self, **fields)

    def command(self, *words: str) -> str:
        """Return the text of a command that runs ``words`` on this node, through ssh if remote."""
        return ssh_command(self.node, *words)


Reports = Sequence[NodeReport]
"""Those of a cluster's nodes, the head first."""


def facts_for_causes(report: NodeReport) -> Values:
    """Return the known facts that decide causes of symptoms: name → value."""
    if report.facts is None:
        return {}

    host = report.facts.host
    health = report.health or NodeHealth()

    facts = {
        **host.versions,
        "target": host.target if host.gpus else "",
        "linger": _yes_or_no(report.facts.linger),
        "memlock": _memlock(report.facts, health),
    }
    if health.container:
        facts["container"] = _yes_or_no(health.container.kind)

    if report.env:
        facts["topology"] = report.env.facts.get("topology", "")

    if memory := host.memory:
        is_short = memory.available * 10 < memory.total
        facts["memory"] = "short" if is_short else "enough"
        facts["kernel_reserve"] = _yes_or_no(find_remark(host, "kernel-reserve"))
        if health.page_cache is not None:
            is_large = health.page_cache * 4 > memory.total
            facts["page_cache"] = "large" if is_large else "small"

    return {name: value for name, value in facts.items() if value}


def _yes_or_no(value: object) -> str:
    return "yes" if value else "no"


def _memlock(facts: NodeFacts, health: NodeHealth) -> str:
    """Return "limited" or "unlimited" for the memory that a rank may lock, "" if not known.

    The limit is that of the unit's process, if one runs. A container has no service manager, so
    there the limit of the process that starts ranks counts. Otherwise the limit that the service
    manager gives to its units counts.
    """

    process = health.unit
    if process is None and health.container and health.container.kind:
        process = health.process

    if process:
        is_free = process.memlock is None or process.locks
        return "unlimited" if is_free else "limited"

    if facts.memlock is not None:
        return "limited"

    # No number means no limit, but only if the service manager answered at all.
    return "unlimited" if health.manager else ""
