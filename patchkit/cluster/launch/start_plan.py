"""Plan the start of a model on a cluster; refuse nodes, models and ports that are not ready."""

from __future__ import annotations

import re
from collections.abc import Sequence

from patchkit.cluster.agent.node_facts import ModelPrint, NodeFacts
from patchkit.cluster.agent.node_state import NAME
from patchkit.cluster.agent.processes import strangers
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.ranks import (
    ServedModel,
    other_model,
    planned_ranks,
    served_model,
)
from patchkit.cluster.launch.stop import stop_command
from patchkit.cluster.launch.survey import IMAGE_DISK_FULL, survey_nodes
from patchkit.cluster.launch.units import GroupUnits, head_ports
from patchkit.cluster.ssh.node import Remote
from patchkit.cluster.ssh.ssh import ssh_command
from patchkit.errors import HostError, UsageError
from patchkit.frozen import frozen
from patchkit.quoting import quoted

# Findings of a survey that keep a start from being tried.
_OBSTACLES = (
    "systemd",
    "linger",
    "memlock",
    "installation",
    "engine-missing",
    "engine-refuses",
    "engine-stopped",
    "image-missing",
    "image-silent",
    IMAGE_DISK_FULL,
    "image-other",
    "images",
)


@frozen
class GroupPlan:
    """The units and files of a start; ``files``, and the ``former`` ones there, are by node."""

    units: GroupUnits
    files: list[dict[str, str]]
    former: list[dict[str, str]]


def make_plan(cluster: Cluster, model: str) -> GroupPlan:
    """Return the plan for a model. Raises HostError for a node that is not ready for it."""
    serve = cluster.file.serve
    if serve.image and not serve.local_image:
        raise UsageError(
            f"{serve.image}: `image` in cluster.toml is not pinned, by @sha256:",
            why="a tag means another image tomorrow, and on another node",
            hint="patchkit cluster install",
        )

    served = served_model(cluster.file, model)
    facts = cluster.facts([served.folder] if served.folder else [])
    _require_ready(cluster, facts)
    if served.folder:
        _require_same_model(cluster, served, facts)

    ranks = planned_ranks(cluster.file, facts, served)
    addresses = [rank.address for rank in ranks]
    units = GroupUnits(
        cluster=cluster.file,
        model=served,
        ranks=tuple(ranks),
        links=tuple(link.words for link in cluster.links(addresses[1:])),
    )

    if len(ranks) > 1:
        cluster.check_ports(addresses)
    _require_free_ports(cluster, units)
    former = [node.files for node in facts]
    return GroupPlan(
        units=units,
        files=units.node_files(),
        former=former,
    )


def _require_ready(cluster: Cluster, facts: Sequence[NodeFacts]) -> None:
    """Raise the first error of a node that keeps a start from being tried."""
    names = [node.ssh for node in cluster.file.node]

    for finding in survey_nodes(names, facts):
        if finding.about in _OBSTACLES:
            what = f"{finding.where}: {finding.what}"
            raise finding.kind(
                what,
                why=finding.why,
                hint=finding.hint,
            )


def _require_same_model(
    cluster: Cluster,
    served: ServedModel,
    facts: Sequence[NodeFacts],
) -> None:
    """Raise HostError for a node whose folder is not whole, or holds another model."""
    silent = ModelPrint(
        folder=served.folder,
        problem="says nothing of it",
    )
    prints = {}
    for node, node_facts in zip(cluster.file.node, facts, strict=True):
        prints[node.ssh] = node_facts.models.get(served.folder, silent)

    broken = [
        f"{name}: {model.problem}" for name, model in prints.items() if model.problem
    ]

    stray = other_model(prints, cluster.file.models.get(served.name, ""))
    if broken:
        what = f"{served.name} is not whole: {'; '.join(broken)}"
        can_copy = len(broken) < len(prints)
    elif stray:
        what = f"{served.name} is not the same on every node: {stray[0]} {stray[1]}"
        # Without any record nobody knows which node is right.
        can_copy = any(model.commit for model in prints.values())
    else:
        return

    hint = quoted("patchkit", "model", "sync" if can_copy else "get", served.name)
    if served.name == served.folder:
        hint = "copy it there, to the same path on every node"
    why = f"{served.folder} has to hold the same files on every node"
    raise HostError(
        what,
        why=why,
        hint=hint,
    )


def _require_free_ports(cluster: Cluster, units: GroupUnits) -> None:
    """Raise HostError if somebody else listens at a port of the start, on the head."""
    head = cluster.head
    rank = units.ranks[0]
    urls = [units.url]
    if len(units.ranks) > 1:
        ports = head_ports(cluster.file.serve)[rank.env.node.executor.name]
        urls += [f"http://{rank.address}:{port}" for port in ports]

    name = cluster.file.name
    unit = cluster.file.unit
    for url in urls:
        for listener in head.call(
            list[str],
            strangers,
            url=url,
            unit=unit,
            name=name,
        ):
            raise _taken_port_error(head, listener)


def _taken_port_error(head: Remote, listener: str) -> HostError:
    """Return the error of a port that ``listener`` has; another cluster of the user is named."""
    why = "it would answer instead of the model, or instead of the head's rank"
    look = ssh_command(head.destination, "ss", "-ltnp")
    hint = f"end it, or set another `port`; {look}"
    if cluster := re.search(f" of the cluster ({NAME.pattern})$", listener):
        name = cluster[1]
        why = f"cluster.toml had another `name` when {name} was started, or both serve at once"
        hint = f"`{stop_command(head, name)}` stops it; or set another `port`"
    what = f"{head.destination}: a port of the start is taken: {listener}"
    return HostError(
        what,
        why=why,
        hint=hint,
    )
