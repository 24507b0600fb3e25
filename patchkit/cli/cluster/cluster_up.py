"""Start a model on a cluster, or another one: `patchkit cluster up`, `patchkit cluster switch`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import click

from patchkit.cli import complete
from patchkit.cli.alive import unwatched
from patchkit.cli.cluster.cluster_options import cluster_option
from patchkit.cli.next_step import next_step, program
from patchkit.cli.out import LaidOut, Shown, as_json, echo, print_json, say, shown, style
from patchkit.cluster.agent.unit_state import UnitState
from patchkit.cluster.launch import up as launch
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.hold import held
from patchkit.cluster.launch.plan import by_cluster_file
from patchkit.cluster.launch.start import Answered
from patchkit.cluster.launch.up import GroupPlan
from patchkit.durable.signals import Interrupted
from patchkit.errors import UsageError

MODEL = click.argument("model", shell_complete=complete.models)
DRY = click.option("--dry-run", is_flag=True, help="Show what would be written, node by node.")
NO_WAIT = click.option("--no-wait", is_flag=True, help="Return as soon as it is started.")


@click.command()
@MODEL
@cluster_option
@DRY
@NO_WAIT
@click.option("--hold", is_flag=True, help="Stay, and stop it at the end of this command.")
@as_json
def up(
    model: str, *, cluster: Cluster, dry_run: bool, no_wait: bool, hold: bool, as_json: bool
) -> None:
    """Start a model, and return when it has answered.

    Writes env files and units on each node, as `patchkit env` and `patchkit serve-args` would say
    there, and starts the head. What runs with the same files is left alone. Ctrl-C only detaches;
    with --hold it ends the model on all nodes, as does any other end of this command.
    """
    if hold and (no_wait or dry_run):
        raise UsageError("--hold goes with neither --no-wait nor --dry-run")
    if hold:
        _held(cluster, model, as_json=as_json)
        return
    bring_up(cluster, model, dry_run=dry_run, wait=not no_wait, as_json=as_json)


@click.command()
@MODEL
@cluster_option
@DRY
@as_json
def switch(model: str, *, cluster: Cluster, dry_run: bool, as_json: bool) -> None:
    """Serve another model; if it does not answer, the former one again.

    The former one is stopped and its memory awaited first. vLLM's sleep mode is not used.
    """
    if dry_run:
        tell_plan(cluster, launch.make_plan(cluster, model), as_json=as_json)
        return
    tell = _progress(cluster, quiet=as_json)
    done = _attached(lambda: launch.switch(cluster, model, tell))
    _tell_answered(cluster, done, as_json=as_json, url="")


def bring_up(
    cluster: Cluster, model: str, *, dry_run: bool, wait: bool, as_json: bool, here: bool = False
) -> None:
    """Do what `up` does, on one machine or several."""
    if dry_run:
        tell_plan(cluster, launch.make_plan(cluster, model), as_json=as_json)
        return
    begun = launch.bring_up(cluster, model)
    url = begun.plan.units.url
    if not as_json:
        what = "runs with these files already" if begun.running else "is started"
        say(style("✓", fg="green") + f" {begun.plan.model.name} {what} on {_names(cluster)}")
    if not wait:
        notes = begun.plan.notes
        if as_json:
            fields = {"model": begun.plan.model.name, "url": url, "answered": None}
            print_json({**fields, "notes": notes})
        else:
            _tell_notes(notes, begun.plan.model.name)
        return
    tell = _progress(cluster, quiet=as_json)
    done = _attached(lambda: launch.wait_for(cluster, begun, tell), here=here)
    _tell_answered(cluster, done, as_json=as_json, url=url)


def _held(cluster: Cluster, model: str, *, as_json: bool) -> None:
    """Serve a model until a signal comes, which is no error."""
    began = False
    try:
        with held(cluster, model, _progress(cluster, quiet=as_json)) as group:
            began = True
            _tell_answered(cluster, group.answered, as_json=as_json, url=group.url)
            with unwatched():
                raise group.until_it_ends()
    except Interrupted:
        if not began:
            raise
        if not as_json:
            say(style("✓", fg="green") + f" {model} is stopped on {_names(cluster)}")


def _names(cluster: Cluster) -> str:
    return ", ".join(each.destination for each in cluster.nodes)


def _tell_notes(notes: Sequence[str], model: str) -> None:
    for note in notes:
        say(style("!", fg="yellow") + f" {note}")
    if notes and not model.startswith(("/", "~")):
        say(next_step(*program(), "model", "check", model))


def _attached(wait: Callable[[], Answered], *, here: bool = False) -> Answered:
    """Wait; an interrupt leaves the start to the head's systemd, and says how to come back."""
    try:
        return wait()
    except Interrupted:
        say("", err=True)
        again = ["cluster", "status", *(["--here"] if here else [])]
        say(next_step(*program(), *again), err=True)
        raise


def _progress(cluster: Cluster, *, quiet: bool) -> Callable[[UnitState, float], None]:
    """Return what tells how a start goes: a line for each change of the unit."""
    told: list[str] = []
    words = {
        "waiting": "starting the workers",
        "start-pre": "starting",
        "start": "starting",
        "start-post": "loading the model",
        "auto-restart": "waiting before the next start",
        "running": "answers",
    }

    def tell(unit: UnitState, seconds: float) -> None:
        line = (unit.sub == "waiting" and unit.text) or words.get(unit.sub, unit.sub)
        if not quiet and line not in told[-1:]:
            told.append(line)
            say(
                style(f"  {seconds:5.0f} s  {cluster.head.destination}: {line}", dim=True), err=True
            )

    return tell


def _tell_answered(cluster: Cluster, done: Answered, *, as_json: bool, url: str) -> None:
    if as_json:
        print_json({**asdict(done), "url": url, "answered": True})
        return
    times = f"loaded in {done.load_s:.0f} s, first token after {done.token_s:.1f} s"
    say(style("✓", fg="green") + f" {done.model} answers: {times}")
    _tell_notes(done.notes, done.model)
    if url:
        where = "" if cluster.head.here else f"on {cluster.head.destination}"
        echo([next_step("curl", f"{url}/v1/models", where=where)])


def tell_plan(cluster: Cluster, plan: GroupPlan, *, as_json: bool) -> None:
    """Print what a start would write and run, node by node."""
    if as_json:
        nodes = zip(cluster.nodes, plan.files, plan.changed, strict=True)
        print_json(
            {
                "model": plan.model.name,
                "url": plan.units.url,
                "notes": plan.notes,
                "nodes": [
                    {"node": node.destination, "changed": changed, "files": files}
                    for node, files, changed in nodes
                ],
            }
        )
        return
    for number, node in enumerate(cluster.nodes):
        echo(_node_lines(node.destination, plan, number))
    _tell_notes(plan.notes, plan.model.name)
    if plan.same:
        say("nothing to write: every node has these files")


def _node_lines(node: str, plan: GroupPlan, number: int) -> Iterator[Shown]:
    yield style(f"{node}", bold=True) + f" rank {number}"
    for name in plan.changed[number]:
        text = plan.files[number].get(name)
        yield shown(f"  {'removes' if text is None else 'writes'} {name}")
    yield LaidOut(shown("  runs    ") + shown(" ".join(plan.units.ranks[number].words)))
    for note in plan.ranks[number].env.notes:
        yield style("  note", fg="yellow") + f" {by_cluster_file(note)}"
