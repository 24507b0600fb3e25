"""Bring a cluster to a model: plan, compare, write, start, wait; hold it for a time, or switch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from patchkit.cluster.agent import control
from patchkit.cluster.agent.control import begin_group
from patchkit.cluster.agent.node_facts import NodeFacts
from patchkit.cluster.agent.unit_state import NodeState
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.plan import (
    PlannedRank,
    ServedModel,
    group_units,
    planned_ranks,
    served_model,
)
from patchkit.cluster.launch.ports import check_ports, check_server_port
from patchkit.cluster.launch.start import (
    Answered,
    StartWatcher,
    check_stopped,
    read_failed_start,
    stop_group,
    wait_until_answered,
)
from patchkit.cluster.launch.survey import survey_nodes
from patchkit.cluster.launch.units import GroupUnits
from patchkit.cluster.ssh.node import all_of
from patchkit.durable.signals import Interrupted, committed, deferred
from patchkit.errors import HostError, PatchkitError
from patchkit.quoting import quoted

_FIRST_PORT = 1024  # net.ipv4.ip_unprivileged_port_start


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """What a start would write and run; ``changed`` are the files that differ, by node.

    ``former`` are the files that are there, by node; ``notes`` are about the model's files.
    """

    model: ServedModel
    ranks: tuple[PlannedRank, ...]
    units: GroupUnits
    files: tuple[dict[str, str], ...]
    changed: tuple[tuple[str, ...], ...]
    former: tuple[dict[str, str], ...]
    notes: tuple[str, ...]

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
    _check_nodes(cluster, facts)
    if served.folder:
        _check_model_is_whole(
            cluster, served, [each.models[served.folder].problem for each in facts]
        )
    ranks = planned_ranks(cluster.file, facts, served)
    links = cluster.links([each.address for each in ranks[1:]])
    units = group_units(cluster.file, ranks, served, [each.words for each in links])
    files = units.node_files()
    check_server_port(cluster.head, units.url, units.unit)
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
        former=tuple(each.files for each in facts),
        notes=tuple(_describe_unchecked(cluster, served, facts)),
    )


def _check_nodes(cluster: Cluster, facts: Sequence[NodeFacts]) -> None:
    """Raise HostError for what would end ranks, at once or later, or make them differ."""
    if cluster.file.serve.port < _FIRST_PORT:
        raise HostError(
            f"port {cluster.file.serve.port}: a user's units may not open it",
            why=f"ports below {_FIRST_PORT} are root's",
            hint=f"another one, {_FIRST_PORT} or more: `port` in [serve], or --port",
        )
    for found in survey_nodes([each.ssh for each in cluster.file.node], facts):
        if found.about in ("systemd", "linger", "installation"):
            raise HostError(f"{found.where}: {found.what}", why=found.why, hint=found.hint)


def _check_model_is_whole(cluster: Cluster, model: ServedModel, problems: list[str]) -> None:
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


def _describe_unchecked(
    cluster: Cluster, model: ServedModel, facts: Sequence[NodeFacts]
) -> Iterator[str]:
    """Yield for each node with how many files of the model nobody checked as they are now."""
    for node, its in zip(cluster.file.node, facts, strict=True):
        if model.folder and (count := its.models[model.folder].unchecked):
            files = f"{count} file{'s' * (count > 1)} of {model.name}"
            yield f"{node.ssh}: {files} changed since the hashes were checked, or never were"


def bring_up(cluster: Cluster, model: str, *, lasting: bool = True) -> Begun:
    """Write what differs and start; what runs with the same files is left alone.

    What is not ``lasting`` does not come back after a reboot.

    Raises BusyError while another patchkit changes the cluster; an error of a node before anything
    was written; HostError if what ran before does not stop.
    """
    with cluster.alone():
        return _start_group(
            cluster, make_plan(cluster, model), all_of(cluster.states()), lasting=lasting
        )


def _start_group(
    cluster: Cluster, plan: GroupPlan, states: list[NodeState], *, lasting: bool = True
) -> Begun:
    runs = _unit_runs(states[0], cluster.file.unit)
    if plan.same and runs:
        return Begun(plan=plan, since="", running=True)
    if runs or any(each.processes for each in states):
        committed("what ran before is stopped")
        check_stopped(cluster, stop_group(cluster, disable=False))
    if len(plan.ranks) > 1:
        executor = plan.ranks[0].env.node.executor.name
        check_ports(cluster, [each.address for each in plan.ranks], executor)
    if not plan.same:
        committed("the files of this start are on the nodes")
        cluster.put_files(plan.files)
    how = {"restart": not plan.same, "lasting": lasting}
    since = cluster.head.call(str, begin_group, name=cluster.file.name, **how)
    committed(f"{plan.model.name} is started, and goes on loading")
    return Begun(plan=plan, since=since)


def _unit_runs(state: NodeState, unit: str) -> bool:
    found = state.unit(unit)
    return found is not None and found.active in ("active", "activating")


def wait_for(cluster: Cluster, begun: Begun, watcher: StartWatcher) -> Answered:
    """Return once the model has answered. Raises HostError with the first error of all ranks."""
    return replace(wait_until_answered(cluster, begun.since, watcher), notes=begun.plan.notes)


def switch_model(cluster: Cluster, model: str, watcher: StartWatcher) -> Answered:
    """Serve another model; if it cannot be started or does not answer, the former one again.

    An interrupt before the start brings the former one back as well; after it, the new one goes on.
    Raises the error, with what is served now.
    """
    planned: tuple[GroupPlan, list[NodeState]] | None = None
    begun: Begun | None = None
    try:
        with cluster.alone():
            planned = (make_plan(cluster, model), all_of(cluster.states()))
            begun = _start_group(cluster, *planned)
        return wait_for(cluster, begun, watcher)
    except (PatchkitError, Interrupted) as error:
        former = _find_former(cluster, *planned) if planned else None
        if not planned or former is None or (begun and isinstance(error, Interrupted)):
            raise
        since = _go_back(cluster, former, planned[0].former)
        if isinstance(error, Interrupted):
            raise
        raise _explain_switch(cluster, model, error, former, since, watcher) from None


def _find_former(cluster: Cluster, plan: GroupPlan, states: list[NodeState]) -> str | None:
    """Return the other model that ran when a start was planned, if its files are those of `up`."""
    if plan.same or not _unit_runs(states[0], cluster.file.unit):
        return None
    try:
        names = [json.loads(files["group.json"]).get("model") for files in plan.former]
    except (KeyError, ValueError, AttributeError):  # not written by `up`
        return None
    return str(names[0])


def _go_back(cluster: Cluster, former: str, files: Sequence[dict[str, str]]) -> str:
    """Start the former group again, whatever interrupts; return the time for its journal."""
    try:
        with deferred(), cluster.alone():
            check_stopped(cluster, stop_group(cluster, disable=False))
            cluster.put_files(files)
            since = cluster.head.call(str, begin_group, name=cluster.file.name, restart=True)
            committed(f"{former} is started again, and goes on loading")
    except PatchkitError as error:
        raise type(error)(
            f"{former} was stopped, and cannot be started again: {error.what}",
            why=error.why,
            hint=error.hint,
        ) from None
    return str(since)


def _explain_switch(
    cluster: Cluster,
    model: str,
    error: PatchkitError,
    former: str,
    since: str,
    watcher: StartWatcher,
) -> PatchkitError:
    """Return the error of a switch, once the former model has answered or has failed as well."""
    what = f"{model} was not started: {error.what}"
    try:
        wait_until_answered(cluster, since, watcher)
    except HostError as again:
        what += f"\nand {former}, served before, does not come back: {again.what}"
        return HostError(what, why=again.why, hint=again.hint)
    why = "\n  back:  ".join(filter(None, (error.why, f"{former} is served again")))
    return type(error)(what, why=why, hint=error.hint)


def wait_until_ended(cluster: Cluster, begun: Begun, watcher: StartWatcher) -> HostError:
    """Return why a group that answered ended by itself; wait for that as long as it takes."""
    for (now,) in cluster.follow([cluster.file.unit]):
        if now.active != "active":
            again = now.sub == "auto-restart"
            return watcher.explain(read_failed_start(cluster, begun.since, now, again=again))
    return HostError(f"{cluster.head.destination}: the answer was cut short")


@contextmanager
def hold_model(
    cluster: Cluster, model: str, watcher: StartWatcher
) -> Iterator[tuple[Begun, Answered]]:
    """Serve a model for the time of a block, then stop it on every node, and check.

    If this process is killed, the head's systemd stops the group. Raises what ``bring_up``,
    ``wait_for`` and ``check_stopped`` raise.
    """
    begun = bring_up(cluster, model, lasting=False)
    with ExitStack() as watch:
        try:
            watch.enter_context(
                cluster.head.opened(bool, control.hold_group, name=cluster.file.name)
            )
            yield begun, wait_for(cluster, begun, watcher)
        finally:
            with cluster.alone():
                results = stop_group(cluster)
            watch.close()
            check_stopped(cluster, results)
            committed(f"{begun.plan.model.name} is stopped on every node")
