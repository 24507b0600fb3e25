"""Start, stop, follow and switch a model: `patchkit up`, `down`, `logs`, `switch`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import click

from patchkit.cli.cluster.cluster_options import cluster_option, node_fields
from patchkit.cli.out import (
    LaidOut,
    dim,
    next_hint,
    next_step,
    next_verb,
    record_fields,
    tell,
)
from patchkit.cli.render import (
    BAD,
    GOOD,
    Blocks,
    ExitCode,
    Lines,
    Record,
    flag,
    lead_word,
    note,
    option,
    rendered,
)
from patchkit.cli.runtime.node_options import note_lines
from patchkit.cluster.agent.node_state import NodeState
from patchkit.cluster.agent.unit_state import UnitState
from patchkit.cluster.launch import up as launch
from patchkit.cluster.launch.cluster import Cluster, read_group_journal
from patchkit.cluster.launch.stop import (
    check_stopped,
    end_left_nodes,
    stop_command,
    stop_group,
)
from patchkit.cluster.ssh.node import Remote, require_all
from patchkit.doctor.symptoms.findings import explain_failed_start
from patchkit.durable.signals import Interrupted
from patchkit.errors import HostError, PatchkitError, UsageError
from patchkit.runtime.rules.secret_texts import mask_secrets

_MODEL = click.argument("model")
_UNIT_WORDS = {
    "waiting": "starting the workers",
    "start-pre": "starting",
    "start": "starting",
    "start-post": "loading the model",
    "auto-restart": "waiting before the next start",
    "running": "answers",
    "dead": "stopped",
    "failed": "failed",
}
_SPEAKING = ("waiting", "busy")  # sub-states in which a unit has a text of its own
_STOPPING = ("stop", "final", "cleaning")  # prefixes of the sub-states that end a unit


@click.command
@_MODEL
@cluster_option
@rendered
def up_command(model: str, *, cluster: Cluster) -> Blocks:
    """Start a model, here or on the nodes of cluster.toml; return when it has answered.

    \b
      patchkit up openai/gpt-oss-20b

    Writes env files and units on each node, as `patchkit env` and `patchkit serve-args` would say
    there, and starts the head. If the same model already runs with the same files, nothing changes.
    systemd keeps it running after the terminal closes, after a crash and after a reboot. Ctrl-C
    only detaches; `patchkit down` stops the model.
    """
    watcher = _watch_start(cluster)
    units, since = launch.bring_up(cluster, model, watcher)
    nodes = ", ".join(node.destination for node in cluster.nodes)
    what = "is started" if since else "runs with these files already"
    yield GOOD + f"{units.model.name} {what} on {nodes}"
    command = units.ranks[0].command
    if command and since:
        for line in note_lines(command.limits, command.advice):
            tell(line)

    _wait_attached(lambda: launch.wait_until_answered(cluster, since, watcher))
    yield from _answered_blocks(cluster, units.model.name, units.url)


@click.command
@_MODEL
@cluster_option
@rendered
def switch_command(model: str, *, cluster: Cluster) -> Blocks:
    """Serve another model; if it does not answer, serve the former one again.

    The former model is stopped first, and its memory is freed. vLLM's sleep mode is not used.
    """
    watcher = _watch_start(cluster)
    _wait_attached(lambda: launch.switch_model(cluster, model, watcher))
    yield from _answered_blocks(cluster, model)


def _wait_attached(wait: Callable[[], None]) -> None:
    """Wait; an interrupt leaves the start to the head's systemd, and says how to come back."""
    try:
        wait()
    except Interrupted:
        tell("")
        tell(next_verb("status"))
        raise


def _watch_start(cluster: Cluster) -> launch.StartWatcher:
    """Return a watcher that tells each change of a starting unit, and why a start failed."""
    last_line: str | None = None

    def tell_unit(unit: UnitState, seconds: float) -> None:
        nonlocal last_line
        line = _unit_line(unit)
        if line != last_line:
            last_line = line
            head = cluster.head.destination
            tell(dim(f"  {seconds:5.0f} s  {head}: {line}"))

    return launch.StartWatcher(
        tell=tell_unit,
        explain=explain_failed_start,
        warn=lambda text: tell(lead_word("left:") + text),
        note=lambda text: tell(note(text)),
    )


def _unit_line(unit: UnitState) -> str:
    """Return the text of a unit, or a word for its sub-state; systemd has a dozen for its end."""
    if unit.sub in _SPEAKING and unit.text:
        return unit.text
    if unit.sub.startswith(_STOPPING):
        return "stopping"
    return _UNIT_WORDS.get(unit.sub, unit.sub)


def _answered_blocks(cluster: Cluster, model: str, url: str = "") -> Blocks:
    """Yield that a model answers, and the command that asks it."""
    yield Record(
        {
            "model": model,
            "url": url,
            "answered": True,
        }
    )
    yield GOOD + f"{model} answers"
    if url:
        where = "" if cluster.head.here else f"on {cluster.head.destination}"
        yield next_step("curl", f"{url}/v1/models", where=where)


@click.command
@cluster_option
@rendered
def down_command(*, cluster: Cluster) -> Blocks:
    """Stop the model on every node, and check: no unit, no process, the memory back.

    It stays down, even after a reboot, until you run `up`. A node that did not answer is named.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(HostError):  # a head that is off keeps nobody out
            stack.enter_context(cluster.alone())
        results = stop_group(cluster)
        remains = end_left_nodes(cluster, results)

    nodes = []
    for node, result in zip(cluster.nodes, results, strict=True):
        nodes.append(node_fields(node.destination, result))
        yield from _stopped_lines(node, result)
    yield Record({"nodes": nodes})
    yield from (BAD + text for text in remains)
    if remains:
        yield ExitCode(HostError.exit_code)
    check_stopped(cluster, results)


def _stopped_lines(node: Remote, result: NodeState | PatchkitError) -> Lines:
    """Yield that nothing is left on a node, and which other clusters run there.

    A node that is silent, or where something is left, is an error at the end.
    """
    if isinstance(result, PatchkitError) or result.left:
        return
    text = "stopped, no process left"
    if result.others:
        text = f"stopped; {other_clusters(node, result)}"
    yield GOOD + f"{node.destination}: {text}"


def other_clusters(node: Remote, state: NodeState) -> str:
    """Return which other clusters run on a node, and the command that stops one on its head."""
    names = []
    for name, is_head in state.others.items():
        stop = f" (stop: `{stop_command(node, name)}`)" if is_head else ""
        names.append(name + stop)
    return f"other clusters run here: {', '.join(names)}"


@click.command
@cluster_option
@flag("-f", "--follow", "Show new lines, until Ctrl-C.")
@option("--node N", "nodes", "Only this node; repeatable.", multiple=True)
@option("--since WHEN", "As for journalctl: '10 min ago'.", default="")
@click.option("-n", "--lines", type=click.IntRange(1), default=100, show_default=True)
@rendered
def logs_command(
    *, cluster: Cluster, follow: bool, nodes: tuple[str, ...], since: str, lines: int
) -> Blocks:
    """Show the output of all ranks, merged by time, by this machine's clock.

    Each node's journal keeps it; --json prints a line of JSON for each. --since is by each node's
    own clock. The exit code is 9 if a node is silent.
    """
    names = [node.destination for node in cluster.nodes]
    for node in nodes:
        if node not in names:
            hint = f"one of {', '.join(names)}"
            raise UsageError(f"--node {node}: no such node", hint=hint)

    newest = 0 if since else lines
    journal = read_group_journal(
        cluster, since=since, lines=newest, nodes=nodes, follow=follow
    )
    if follow:
        # Who follows until Ctrl-C never sees the error at the end.
        yield from _silent_lines(list(journal.silent.values()))

    width = max(map(len, names))
    for node, raw in journal.lines:
        line = replace(raw, text=mask_secrets(raw.text))
        yield Record({"node": node, **record_fields(line)}, line=True)
        clock = time.strftime("%H:%M:%S", time.localtime(line.time / 1e6))
        head = dim(f"{clock} {node.ljust(width)} ")
        yield LaidOut(head + line.text)
    require_all(list(journal.silent.values()))


def _silent_lines(errors: Sequence[PatchkitError]) -> Lines:
    for error in errors:
        yield lead_word("silent", "red") + error.what
        yield next_hint(error.hint)
