"""Serve a model, on this machine or on the nodes of cluster.toml: `patchkit up`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import click

from patchkit.cli import complete
from patchkit.cli.cluster.cluster_options import cluster_option
from patchkit.cli.next_step import next_step, program
from patchkit.cli.out import style, tell
from patchkit.cli.render import GOOD, Block, Record, rendered
from patchkit.cluster.agent.unit_state import UnitState
from patchkit.cluster.launch import up as launch
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.up import StartWatcher, wait_until_answered
from patchkit.doctor.symptoms.findings import explain_failed_start
from patchkit.durable.signals import Interrupted

MODEL = click.argument("model", shell_complete=complete.models)
_WORDS = {
    "waiting": "starting the workers",
    "start-pre": "starting",
    "start": "starting",
    "start-post": "loading the model",
    "auto-restart": "waiting before the next start",
    "running": "answers",
}


@click.command("up")
@MODEL
@cluster_option
@rendered
def command(model: str, *, cluster: Cluster) -> Iterator[Block]:
    """Start a model, here or on the nodes of cluster.toml; return when it has answered.

    \b
      patchkit up openai/gpt-oss-20b

    Writes env files and units on each node, as `patchkit env` and `patchkit serve-args` would say
    there, and starts the head. What runs with the same files is left alone. systemd keeps it: it
    outlives the terminal, a crash and a reboot. Ctrl-C only detaches; `patchkit down` ends it.
    """
    watcher = watch_start(cluster)
    nodes = ", ".join(node.destination for node in cluster.nodes)
    begun = launch.bring_up(cluster, model)
    served, url = begun.plan.units.model.name, begun.plan.units.url
    what = "is started" if begun.since else "runs with these files already"
    yield GOOD + f"{served} {what} on {nodes}"
    wait_attached(lambda: wait_until_answered(cluster, begun.since, watcher))
    yield from answered_blocks(cluster, served, url)


def wait_attached(wait: Callable[[], None]) -> None:
    """Wait; an interrupt leaves the start to the head's systemd, and says how to come back."""
    try:
        wait()
    except Interrupted:
        tell("")
        tell(next_step(*program(), "status"))
        raise


def watch_start(cluster: Cluster) -> StartWatcher:
    """Return what tells how a start goes, a line for each change of the unit, or why it failed."""
    lines: list[str] = []

    def tell_unit(unit: UnitState, seconds: float) -> None:
        line = (unit.sub == "waiting" and unit.text) or _WORDS.get(unit.sub, unit.sub)
        if line not in lines[-1:]:
            lines.append(line)
            tell(style(f"  {seconds:5.0f} s  {cluster.head.destination}: {line}", dim=True))

    return StartWatcher(tell_unit, explain_failed_start)


def answered_blocks(cluster: Cluster, model: str, url: str = "") -> Iterator[Block]:
    """Yield that a model answers, and how it is asked."""
    yield Record({"model": model, "url": url, "answered": True})
    yield GOOD + f"{model} answers"
    if url:
        where = "" if cluster.head.here else f"on {cluster.head.destination}"
        yield next_step("curl", f"{url}/v1/models", where=where)
