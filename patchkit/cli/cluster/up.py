"""Serve a model, on this machine or on the nodes of cluster.toml: `patchkit up`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from patchkit.cli import complete
from patchkit.cli.cluster.cluster_options import (
    FILE_OPTION,
    HERE_OPTION,
    cluster_here,
    means_here,
)
from patchkit.cli.next_step import next_step, program
from patchkit.cli.out import LaidOut, record_fields, shown, style, tell
from patchkit.cli.render import GOOD, Block, Record, lead_word, rendered
from patchkit.cluster.agent.unit_state import UnitState
from patchkit.cluster.launch import up as launch
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.cluster_file import MODELS, ServeChoices, read_cluster_file
from patchkit.cluster.launch.plan import by_cluster_file
from patchkit.cluster.launch.start import Answered, StartWatcher, wait_until_answered
from patchkit.cluster.launch.up import GroupPlan
from patchkit.doctor.symptoms.findings import explain_failed_start
from patchkit.durable.signals import Interrupted
from patchkit.errors import UsageError
from patchkit.runtime.serve.listen import CHOICES as LISTEN

MODEL = click.argument("model", shell_complete=complete.models)


@click.command("up")
@MODEL
@FILE_OPTION
@HERE_OPTION
@click.option("--venv", metavar="DIR", help="Of this machine: the environment that has vLLM.")
@click.option("--listen", type=click.Choice(LISTEN), help="Of this machine; default: local.")
@click.option("--port", type=click.IntRange(1, 65535), help="Of this machine; default: 8000.")
@click.option("--model-folder", metavar="DIR", help=f"Of this machine; default: {MODELS}.")
@click.option("--dry-run", is_flag=True, help="Show what would be written, node by node.")
@click.option("--hold", is_flag=True, help="Stay, and stop it at the end of this command.")
@rendered
def command(
    model: str,
    *,
    file: Path,
    here: bool,
    dry_run: bool,
    hold: bool,
    **choices: Any,
) -> Iterator[Block]:
    """Start a model, here or on the nodes of cluster.toml; return when it has answered.

    \b
      patchkit up openai/gpt-oss-20b

    Writes env files and units on each node, as `patchkit env` and `patchkit serve-args` would say
    there, and starts the head. What runs with the same files is left alone. systemd keeps it: it
    outlives the terminal, a crash and a reboot. Ctrl-C only detaches; with --hold it ends the
    model on all nodes, as does any other end of this command.
    """
    given = {name: value for name, value in choices.items() if value is not None}
    if means_here(file, here=here):
        serve = {name: given.pop(name) for name in ("listen", "port") if name in given}
        cluster = cluster_here(**given, serve=ServeChoices(**serve))
    elif given:
        flag = f"--{min(given).replace('_', '-')}"
        raise UsageError(
            f"{flag}: {file} says it for a cluster", hint="edit it there, or add --here"
        )
    else:
        cluster = Cluster(read_cluster_file(file))
    if hold and dry_run:
        raise UsageError("--hold does not go with --dry-run")
    if dry_run:
        yield from _plan_blocks(cluster, launch.make_plan(cluster, model))
        return
    if hold:
        yield from _hold_blocks(cluster, model)
        return
    begun = launch.bring_up(cluster, model)
    what = "runs with these files already" if begun.running else "is started"
    yield GOOD + f"{begun.plan.units.model.name} {what} on {_node_names(cluster)}"
    watcher = watch_start(cluster)
    done = wait_attached(cluster, lambda: wait_until_answered(cluster, begun.since, watcher))
    yield from answered_blocks(cluster, done, begun.plan.units.url)


def _hold_blocks(cluster: Cluster, model: str) -> Iterator[Block]:
    """Serve a model until a signal comes, which is no error."""
    began = False
    try:
        watcher = watch_start(cluster)
        with launch.hold_model(cluster, model, watcher) as (begun, answered):
            began = True
            yield from answered_blocks(cluster, answered, begun.plan.units.url)
            raise launch.wait_until_ended(cluster, begun, watcher)
    except Interrupted:
        if not began:
            raise
        yield GOOD + f"{model} is stopped on {_node_names(cluster)}"


def _node_names(cluster: Cluster) -> str:
    return ", ".join(node.destination for node in cluster.nodes)


def wait_attached(cluster: Cluster, wait: Callable[[], Answered]) -> Answered:
    """Wait; an interrupt leaves the start to the head's systemd, and says how to come back."""
    try:
        return wait()
    except Interrupted:
        tell("")
        tell(next_step(*program(), "status", *cluster.here_words))
        raise


def watch_start(cluster: Cluster) -> StartWatcher:
    """Return what tells how a start goes, a line for each change of the unit, or why it failed."""
    lines: list[str] = []
    words = {
        "waiting": "starting the workers",
        "start-pre": "starting",
        "start": "starting",
        "start-post": "loading the model",
        "auto-restart": "waiting before the next start",
        "running": "answers",
    }

    def tell_unit(unit: UnitState, seconds: float) -> None:
        line = (unit.sub == "waiting" and unit.text) or words.get(unit.sub, unit.sub)
        if line not in lines[-1:]:
            lines.append(line)
            tell(style(f"  {seconds:5.0f} s  {cluster.head.destination}: {line}", dim=True))

    return StartWatcher(tell_unit, explain_failed_start)


def answered_blocks(cluster: Cluster, done: Answered, url: str = "") -> Iterator[Block]:
    """Yield how long a start took, and how the server is asked."""
    yield Record({**record_fields(done), "url": url, "answered": True})
    times = f"loaded in {done.load_s:.0f} s, first token after {done.token_s:.1f} s"
    yield GOOD + f"{done.model} answers: {times}"
    if url:
        where = "" if cluster.head.here else f"on {cluster.head.destination}"
        yield next_step("curl", f"{url}/v1/models", where=where)


def _plan_blocks(cluster: Cluster, plan: GroupPlan) -> Iterator[Block]:
    """Yield what a start would write and run, node by node."""
    nodes = list(zip(cluster.nodes, plan.files, plan.changed, strict=True))
    fields = [
        {"node": node.destination, "changed": changed, "files": files}
        for node, files, changed in nodes
    ]
    model, url = plan.units.model.name, plan.units.url
    yield Record({"model": model, "url": url, "nodes": fields})
    for number, (node, files, changed) in enumerate(nodes):
        yield style(node.destination, bold=True) + f" rank {number}"
        for name in changed:
            yield f"  {'removes' if files.get(name) is None else 'writes'} {name}"
        yield LaidOut(shown(f"  runs    {' '.join(plan.units.words(number))}"))
        for note in plan.units.ranks[number].env.notes:
            yield "  " + lead_word("note") + by_cluster_file(note)
    if not any(plan.changed):
        yield "nothing to write: every node has these files"
