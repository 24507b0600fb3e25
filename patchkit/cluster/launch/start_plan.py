"""Plan the start of a model on a cluster; raise if a node, the model or a port is not ready."""

import re
from collections.abc import Sequence

from patchkit.cluster.agent.node_facts import ModelPrint, NodeFacts
from patchkit.cluster.agent.node_state import NAME, NodeState
from patchkit.cluster.agent.processes import strangers
from patchkit.cluster.launch.cluster import Cluster, stop_command
from patchkit.cluster.launch.ranks import (
    PlannedRank,
    ServedModel,
    model_folders,
    other_model,
    planned_ranks,
    refuse_ray,
    served_model,
)
from patchkit.cluster.launch.survey import SURVEY, survey_nodes
from patchkit.cluster.launch.units import GroupUnits, head_ports
from patchkit.cluster.ssh.node import Remote, require_all
from patchkit.cluster.ssh.ssh import make_finding, ssh_command
from patchkit.errors import HostError, UsageError
from patchkit.frozen import Texts, Values, frozen
from patchkit.quoting import quoted
from patchkit.runtime.memory.plan import SHARE
from patchkit.units import KIB_PER_GIB


@frozen
class GroupPlan:
    """The plan of a start: its units, and the files of each node, name to content.

    ``former`` are the files that each node has now, ``states`` the states of the nodes. All lists
    are by rank. ``notes`` say what was not checked.
    """

    units: GroupUnits
    files: Sequence[Values]
    former: Sequence[Values]
    states: list[NodeState]
    notes: Texts


def make_plan(cluster: Cluster, model: str) -> GroupPlan:
    """Return the plan of a model's start.

    Raises UsageError for Ray, an image that is not pinned, and a wrong name of a preset; HostError
    for a node without what the start needs, a model that is not whole or not the same everywhere,
    a node that others do not reach, and a port that is taken.
    """
    refuse_ray(cluster)
    serve = cluster.serve
    if serve.image and not serve.local_image:
        raise UsageError(
            f"{serve.image}: `image` in cluster.toml is not pinned, by @sha256:",
            why="a tag means another image tomorrow, and on another node",
            hint="patchkit cluster install",
        )

    served = served_model(cluster, model)
    facts = cluster.facts(model_folders(cluster, served))
    _require_ready(cluster, facts)
    if served.folder:
        _require_same_model(cluster, served, facts)

    ranks = planned_ranks(cluster, facts, served)
    addresses = [rank.address for rank in ranks]
    units = GroupUnits(
        cluster=cluster,
        model=served,
        ranks=tuple(ranks),
        links=tuple(link.words for link in cluster.links(addresses[1:])),
    )

    require_guards(units)
    if len(ranks) > 1:
        cluster.check_ports(addresses)
    _require_free_ports(cluster, units)
    states = require_all(cluster.states())
    notes = require_memory(cluster, ranks, states)
    return GroupPlan(
        units=units,
        files=units.node_files(),
        former=[node.files for node in facts],
        states=states,
        notes=notes,
    )


def _require_ready(cluster: Cluster, facts: Sequence[NodeFacts]) -> None:
    """Raise the first finding of the survey that is an obstacle."""
    names = [node.ssh for node in cluster.members]

    for finding in survey_nodes(names, facts):
        if finding.about in SURVEY["obstacles"]:
            raise finding.located_error()


def require_guards(units: GroupUnits) -> None:
    """Raise HostError for a node on which the memory guard could end nothing."""
    for node, rank in zip(units.cluster.members, units.ranks, strict=True):
        if units.memory_floor(rank) and not rank.facts.unified_groups:
            raise make_finding("groups", node.ssh).located_error()


def _require_same_model(
    cluster: Cluster,
    served: ServedModel,
    facts: Sequence[NodeFacts],
) -> None:
    """Raise HostError if the model's folder is not whole, or not the same, on every node."""
    silent = ModelPrint(
        folder=served.folder,
        problem="says nothing of it",
    )
    prints = {}
    for node, node_facts in zip(cluster.members, facts, strict=True):
        prints[node.ssh] = node_facts.models.get(served.folder, silent)

    broken = [
        f"{name}: {model.problem}" for name, model in prints.items() if model.problem
    ]

    stray = other_model(prints, cluster.models.get(served.name, ""))
    if broken:
        what = f"{served.name} is not whole: {'; '.join(broken)}"
        can_copy = len(broken) < len(prints)
    elif stray:
        what = f"{served.name} is not the same on every node: {stray[0]} {stray[1]}"
        # A copy needs a node that is right, and only a record of files says which one is.
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


def require_memory(
    cluster: Cluster, ranks: Sequence[PlannedRank], states: Sequence[NodeState]
) -> Texts:
    """Raise HostError for a node on which others leave too little memory for its rank.

    A former start of the same cluster is stopped first, so its node is not checked. Returns a note
    for each such node.
    """
    notes = []
    for node, rank, state in zip(cluster.nodes, ranks, states, strict=True):
        if state.left:
            text = f"its free memory was not checked: {state.left}"
            notes.append(f"{node.destination}: {text}, and is stopped first")
            continue

        memory = rank.facts.host.memory
        plan = rank.command.plan
        if plan is None or memory is None or not plan.pool.shared:
            continue

        free_gib = memory.available / KIB_PER_GIB - state.to_come
        free = f"and {free_gib:.0f} are free"
        if state.to_come:
            free += f" once the cluster {' and '.join(state.others)} has loaded"
        if plan.needed_gib > free_gib:
            what = f"needs {plan.needed_gib:.0f} GiB, even with a short context, {free}"
            raise _memory_error(node, state, what)
        if plan.is_whole and plan.taken_gib > free_gib:
            error = _memory_error(
                node, state, f"takes {plan.taken_gib:.0f} GiB, {free}"
            )
            if not plan.given_gib:
                share = f'"{SHARE}", "{plan.share_within(free_gib):.2f}"'
                error.hint += f"; or a smaller cache: {share} in `args` of [serve]"
            raise error
    return tuple(notes)


def _memory_error(node: Remote, state: NodeState, what: str) -> HostError:
    """Return the error of a node whose free memory is too small, with who may have the rest."""
    why = "page cache counts as free, so programs have the rest"
    hint = ssh_command(node.destination, "ps", "axo", "rss,user,comm", "--sort=-rss")
    if state.others:
        names = " and ".join(state.others)
        why = f"the cluster {names} serves there, and its memory is not free"
        stop = stop_command(node, min(state.others))
        hint = f"`{stop}` stops it; or take another node"

    return HostError(f"{node.destination}: the model {what}", why=why, hint=hint)


def _require_free_ports(cluster: Cluster, units: GroupUnits) -> None:
    """Raise HostError if a program of somebody else listens on the head at a port of the start."""
    head = cluster.head
    rank = units.ranks[0]
    urls = [units.url]
    if len(units.ranks) > 1:
        ports = head_ports(cluster.serve)
        urls += [f"http://{rank.address}:{port}" for port in ports]

    for url in urls:
        for listener in head.call(
            list[str],
            strangers,
            url=url,
            unit=cluster.unit,
            name=cluster.name,
        ):
            raise _taken_port_error(head, listener)


def _taken_port_error(head: Remote, listener: str) -> HostError:
    """Return the error of a port that a listener has, with the way to free it.

    ``listener`` is described as by ``strangers``; one of another cluster can be stopped by name.
    """
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
