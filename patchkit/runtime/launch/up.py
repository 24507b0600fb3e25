"""Bring a cluster to a model: plan, compare with what is there, write, start, wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from patchkit.durable.signals import committed
from patchkit.errors import HostError
from patchkit.quoting import quoted
from patchkit.runtime.launch.cluster import Cluster
from patchkit.runtime.launch.plan import (
    PlannedRank,
    ServedModel,
    group_units,
    planned_ranks,
    served_model,
)
from patchkit.runtime.launch.ports import check_ports
from patchkit.runtime.launch.start import Answered, waited
from patchkit.runtime.launch.stop import check_stopped, stopped
from patchkit.runtime.launch.units import GroupUnits
from patchkit.runtime.on_node.control import begin
from patchkit.runtime.on_node.unit_state import NodeState, UnitState
from patchkit.runtime.remote.everywhere import all_of

Tell = Callable[[UnitState, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """What a start would write and run; ``changed`` are the files that differ, by node."""

    model: ServedModel
    ranks: tuple[PlannedRank, ...]
    units: GroupUnits
    files: tuple[dict[str, str], ...]
    changed: tuple[tuple[str, ...], ...]

    @property
    def same(self) -> bool:
        """Return whether every node has exactly these files."""
        return not any(self.changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A start on its way: ``since`` is its time for the head's journal, "" if it was running."""

    plan: GroupPlan
    since: str
    running: bool = False


def make_plan(cluster: Cluster, model: str) -> GroupPlan:
    """Return the plan for a model. Raises HostError for a node that is not ready for it."""
    served = served_model(cluster.file, model)
    facts = cluster.facts([served.folder] if served.folder else [])
    if served.folder:
        _check_there(cluster, served, [each.models[served.folder].problem for each in facts])
    ranks = planned_ranks(cluster.file, facts, served)
    links = cluster.links([each.address for each in ranks[1:]])
    units = group_units(cluster.file, ranks, served, [each.words for each in links])
    files = units.files()
    return GroupPlan(
        model=served,
        ranks=tuple(ranks),
        units=units,
        files=tuple(files),
        changed=tuple(
            tuple(
                sorted(name for name in {*new, *its.files} if new.get(name) != its.files.get(name))
            )
            for new, its in zip(files, facts, strict=True)
        ),
    )


def _check_there(cluster: Cluster, model: ServedModel, problems: list[str]) -> None:
    """Raise HostError if the model is not whole on a node: before anything is started."""
    nodes = [each.ssh for each in cluster.file.node]
    wrong = {node: said for node, said in zip(nodes, problems, strict=True) if said}
    if not wrong:
        return
    verb = "get" if len(wrong) == len(nodes) else "sync"
    said = "; ".join(f"{node}: {problem}" for node, problem in wrong.items())
    raise HostError(
        f"{model.name} is not whole: {said}",
        why=f"{model.folder} has to hold the same files on every node",
        hint="copy it there, to the same path on every node"
        if model.name == model.folder
        else quoted("patchkit", "model", verb, model.name),
    )


def bring_up(cluster: Cluster, model: str, *, lasting: bool = True) -> Begun:
    """Write what differs and start; what runs with the same files is left alone.

    What is not ``lasting`` does not come back after a reboot.

    Raises BusyError while another patchkit changes the cluster; an error of a node before anything
    was written; HostError if what ran before does not stop.
    """
    with cluster.alone():
        plan = make_plan(cluster, model)
        states = all_of(cluster.states())
        runs = _runs(states[0], cluster.file.unit)
        if plan.same and runs:
            return Begun(plan=plan, since="", running=True)
        if runs or any(each.processes for each in states):
            check_stopped(cluster, stopped(cluster, disable=False))
        if len(plan.ranks) > 1:
            executor = plan.ranks[0].env.node.executor.name
            check_ports(cluster, [each.address for each in plan.ranks], executor)
        if not plan.same:
            cluster.put(plan.files)
            committed("the files of this start are on every node")
        how = {"restart": not plan.same, "lasting": lasting}
        since = cluster.head.call(str, begin, name=cluster.file.name, **how)
        committed(f"{plan.model.name} is started, and goes on loading")
        return Begun(plan=plan, since=since)


def _runs(state: NodeState, unit: str) -> bool:
    found = state.unit(unit)
    return found is not None and found.active in ("active", "activating")


def wait_for(cluster: Cluster, begun: Begun, tell: Tell) -> Answered:
    """Return once the model has answered. Raises HostError with the first error of all ranks."""
    return waited(cluster, begun.since, tell)


def switch(cluster: Cluster, model: str, tell: Tell) -> Answered:
    """Serve another model; if it does not answer, the former one is started again.

    Raises HostError in that case, with why, and what is served now.
    """
    former = _former(cluster)
    begun = bring_up(cluster, model)
    try:
        return wait_for(cluster, begun, tell)
    except HostError as error:
        if begun.running or former is None:
            raise
        with cluster.alone():
            check_stopped(cluster, stopped(cluster, disable=False))
            cluster.put(former)
            since = cluster.head.call(str, begin, name=cluster.file.name, restart=True)
        back = waited(cluster, since, tell)
        raise HostError(
            error.what,
            why=f"{error.why}\n  back:  {back.model} is served again",
            hint=error.hint,
        ) from None


def _former(cluster: Cluster) -> list[dict[str, str]] | None:
    """Return the files of all nodes as they are, if all are of one start."""
    files = [each.files for each in cluster.facts()]
    return files if all("group.json" in each for each in files) else None
