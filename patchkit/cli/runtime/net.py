"""Plan, apply and undo the QSFP network: `patchkit net`."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, TypeVar

import click

from patchkit.cli.next_step import next_step, program
from patchkit.cli.out import as_json, confirm, data, echo, print_json, say, style, table
from patchkit.cli.render import VerbGroup
from patchkit.cli.runtime.net_verify import (
    CAGE,
    MTU,
    NETDEV,
    ROOT,
    IPv4Type,
    net_finding_fields,
    note_lines,
    sudo_command,
    verify,
    words_as_root,
)
from patchkit.cluster.net.apply import NetResult, apply_plan, is_live, undo_plan
from patchkit.cluster.net.checks import plan_remarks
from patchkit.cluster.net.live import read_mtu_limits
from patchkit.cluster.net.netplan_file import check_conflicts, read_other_files, render_netplan
from patchkit.cluster.net.plan import (
    TOPOLOGIES,
    Line,
    NetPlan,
    NetPlanOptions,
    net_command,
    other_node_options,
)
from patchkit.cluster.net.planner import make_net_plan
from patchkit.cluster.net.state import NetHistory
from patchkit.cluster.net.verify import read_peer_facts
from patchkit.errors import HostError, UsageError
from patchkit.finding import Finding, Level
from patchkit.runtime.host.host import Host
from patchkit.runtime.host.network_facts import facts
from patchkit.runtime.host.probe import probe

F = TypeVar("F", bound=Callable[..., Any])


def _plan_options(command: F) -> F:
    """Add the options of a plan."""
    for option in (
        ROOT,
        MTU,
        click.option("--twins", is_flag=True, help="An address for every half, on both nodes."),
        NETDEV,
        click.option("--port0-to", type=int, metavar="N", help="In a ring: where cage 0 leads."),
        CAGE,
        click.option(
            "--network",
            type=IPv4Type(IPv4Network, "192.168.100.0/24"),
            help="Count addresses anew from this one: twin A's; twin B and further links follow. "
            f"Default: keep what is there, else {facts()['plan']['network']}.",
        ),
        click.option(
            "--topology", type=click.Choice(TOPOLOGIES), default="auto", show_default=True
        ),
        click.option("--nodes", type=int, default=2, show_default=True, metavar="N", help="All."),
        click.option("--role", type=click.Choice(["head", "worker"]), help="Of two: node 1 or 2."),
        click.option("--node", type=int, metavar="N", help="This node's number, from 1: the head."),
    ):
        command = option(command)
    return command


@click.group(cls=VerbGroup)
def command() -> None:
    """The QSFP network between Sparks: plan, apply, verify, undo.

    \b
      patchkit net plan --role head
      sudo patchkit net apply --role head
      patchkit net verify --peer 192.168.100.11
      sudo patchkit net undo

    What works is kept. A cage without addresses gets one on each half, in different networks; a
    ring of three gets twelve.
    """


command.add_command(verify)


@command.command()
@_plan_options
@click.option(
    "--probe",
    "facts_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Of another host: what `patchkit probe --json` printed there.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show the netplan file as well.")
@as_json
def plan(facts_file: Path | None, *, verbose: bool, as_json: bool, **options: Any) -> None:
    """Print what this node's network lacks; nothing is written, no rights are needed.

    The first line is the verdict. Addresses that are there are kept, whoever gave them.
    """
    asked, place = _read_options(options), NetHistory(options["root"])
    host = read_peer_facts(facts_file) if facts_file else None
    shown = _make_shown_plan(host, asked, place)
    apply = net_command("apply", asked)
    at = _root_words(place.root)
    if not shown.plan.changes:
        steps = [_NetStep((*program(), "net", "verify", *at))]
    elif facts_file:
        steps = [_NetStep(("sudo", "patchkit", *apply), "on that node")]
    else:
        steps = [_NetStep(("sudo", *words_as_root(), *apply, *at))]
    steps += shown.other_steps(asked)
    if as_json:
        print_json(shown.fields(steps))
        return
    echo(shown.lines())
    if verbose and shown.text:
        say(f"\n{place.file}:")
        data(shown.text)
    echo(next_step(*step.command, where=step.where) for step in steps)
    if not facts_file:
        _tell_unfinished(place)


@command.command()
@_plan_options
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Show the difference only.")
@click.option("--force", is_flag=True, help="Replace the file though somebody edited it.")
@as_json
def apply(*, yes: bool, dry_run: bool, force: bool, as_json: bool, **options: Any) -> None:
    """Write the plan to /etc/netplan/40-patchkit.yaml and bring the network to it; needs root.

    What was there is kept for `net undo`. If netplan fails, or the address of the default route or
    of this SSH session is gone afterwards, the former network is put back. --json asks nothing.
    """
    asked, place = _read_options(options), NetHistory(options["root"])
    if not dry_run:
        _need_root(place)
    _tell_unfinished(place)
    shown = _make_shown_plan(None, asked, place)
    name = str(place.file)
    old = (place.read_file() or b"").decode(errors="replace").splitlines()
    new = shown.text.splitlines() or old
    difference = list(difflib.unified_diff(old, new, name, name, lineterm=""))
    if not as_json:
        echo(shown.lines())
        if shown.text:
            echo(difference or [f"{name}: is as planned"])
    done = None
    if shown.text and not dry_run:
        if difference and not yes:
            _ask(as_json=as_json)
        done = apply_plan(place, shown.plan, force=force)
    verify_here = _NetStep((*program(), "net", "verify", *_root_words(place.root)))
    steps = [*shown.other_steps(asked), verify_here]
    if as_json:
        result = asdict(done or NetResult(changed=False, live=False))
        more = {"difference": difference, "dry_run": dry_run, **result}
        print_json({"file": name, **shown.fields(steps if done else []), **more})
    elif done:
        _tell_applied(name, done)
        echo(next_step(*step.command, where=step.where) for step in steps if done.changed)


@command.command()
@ROOT
@click.option("--force", is_flag=True, help="Set a journal aside that is damaged.")
@as_json
def undo(root: Path, *, force: bool, as_json: bool) -> None:
    """Put back what was there before the last apply, byte by byte; needs root."""
    place = NetHistory(root)
    _need_root(place)
    done = undo_plan(place, force=force)
    if as_json:
        print_json({"file": str(place.file), **asdict(done)})
        return
    what = "an apply that was cut short" if done.recovered else "the last apply"
    left = "is as before" if place.read_file() is not None else "is gone, as before"
    say(f"{what} is undone: {place.file} {left}")


def _read_options(options: Mapping[str, Any]) -> NetPlanOptions:
    """Return the options of a plan; ``--role`` gives the number of the node."""
    node, role, nodes = options["node"], options["role"], options["nodes"]
    if role == "worker" and node is None and nodes > 2:
        hint = f"its number: --node 2 to --node {nodes}"
        raise UsageError("--role worker is one of several", hint=hint)
    if node is not None and role and (node == 1) != (role == "head"):
        raise UsageError(f"--role {role} --node {node}: the head is node 1, and only the head")
    if node is None and role:
        node = {"head": 1, "worker": 2}[role]
    kept = {field.name: options[field.name] for field in fields(NetPlanOptions)}
    return NetPlanOptions(**{**kept, "node": node})


@dataclass(frozen=True, slots=True)
class _NetStep:
    """A command to run next; ``where`` is empty for here."""

    command: tuple[str, ...]
    where: str = ""


@dataclass(frozen=True, slots=True)
class _ShownPlan:
    """A plan as it is shown; ``text`` is that of the netplan file, "" for none."""

    plan: NetPlan
    notes: Sequence[Finding]
    text: str

    def verdict(self) -> str:
        """Return in one line whether there is something to do."""
        changes, lines = len(self.plan.changes), len(self.plan.lines)
        if changes:
            return f"{changes} of {lines} interfaces {'change' if changes > 1 else 'changes'}"
        if any(note.level in (Level.ERROR, Level.WARNING) for note in self.notes):
            return "no address has to change, but see what is said below"
        return "this network is fine already: nothing to do"

    def lines(self) -> Iterator[str]:
        """Yield the verdict, a row for each interface, and what to know."""
        yield style(self.verdict(), bold=True)
        yield from table(map(_line_row, self.plan.lines), indent="  ")
        yield from note_lines(self.notes)

    def other_steps(self, asked: NetPlanOptions) -> list[_NetStep]:
        """Return what to run on the other node, if that is known."""
        there = other_node_options(self.plan, asked)
        unless = "" if self.plan.changes else ", if it has no address yet"
        words = ("patchkit", *net_command("plan", there)) if there else ()
        return [_NetStep(words, f"on the other node{unless}")] if there else []

    def fields(self, steps: Sequence[_NetStep]) -> dict[str, Any]:
        plan = self.plan
        lines = [{"action": line.action, **asdict(line)} for line in plan.lines]
        for line in lines:
            line |= {name: list(map(str, line[name])) for name in ("addresses", "before")}
        return {
            "verdict": self.verdict(),
            "changes": len(plan.changes),
            "node": plan.node,
            "nodes": plan.nodes,
            "topology": plan.topology,
            "lines": lines,
            "notes": list(map(net_finding_fields, self.notes)),
            "next": [asdict(step) for step in steps],
            "yaml": self.text,
        }


def _line_row(line: Line) -> tuple[str, ...]:
    action = style(line.action, fg=None if line.action == "keep" else "green")
    addresses = ", ".join(map(str, line.addresses)) or "no IPv4"
    if line.action == "replace":
        addresses += f" (was {', '.join(map(str, line.before))})"
    mtu = f"MTU {line.mtu}" + (f" (was {line.mtu_before})" if line.mtu != line.mtu_before else "")
    to = f", to node {line.peer}" if line.peer else ""
    return action, line.netdev, addresses, mtu, line.place + to


def _make_shown_plan(host: Host | None, asked: NetPlanOptions, place: NetHistory) -> _ShownPlan:
    """Return the plan for this host, checked against what it has."""
    if host:
        made = make_net_plan(host, asked)
    else:
        host = probe(place.root, python=None, environment=os.environ)
        given = place.read_given()
        # A recording has no driver to ask for its limits.
        made = make_net_plan(host, asked, read_mtu_limits() if is_live(place) else None, given)
        files = read_other_files(place.root)
        check_conflicts(host, made, asked, given, files)
        # netplan's files are of mode 600, and plan needs no rights.
        hidden = [file.path for file in files if file.text is None]
        if hidden and made.written:
            say(f"note: only root may read {', '.join(hidden)}; apply checks them", err=True)
    notes = tuple(plan_remarks(host, made, asked))
    return _ShownPlan(made, notes, render_netplan(made) if made.written else "")


def _need_root(place: NetHistory) -> None:
    if is_live(place) and os.geteuid() != 0:
        what = f"writing {place.file} and running netplan need root"
        raise HostError(what, hint=sudo_command(*sys.argv[1:]))


def _ask(*, as_json: bool) -> None:
    # A question in a pipe, or amid JSON, is one that nobody sees.
    if as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("apply asks before it writes, and there is no terminal", hint="--yes")
    if not confirm("Apply?"):
        raise UsageError("nothing was changed")


def _tell_unfinished(place: NetHistory) -> None:
    if place.journal.unfinished():
        say(f"note: an apply was cut short; {sudo_command('net', 'undo')}", err=True)


def _tell_applied(file: str, done: NetResult) -> None:
    if done.recovered:
        say("an apply that was cut short was put back first")
    if not done.changed:
        say("nothing to do" + ("; `sudo netplan apply` sets it anew" if done.live else ""))
        return
    say(f"{file} is written" + (" and applied" if done.live else ""))
    if not done.live:
        say("the root is not /: no network was changed")
    if not done.checked:
        say("netplan is not installed here: it did not read the file")


def _root_words(root: Path) -> tuple[str, ...]:
    return () if root == Path("/") else ("--root", str(root))
