"""Plan, apply and undo the QSFP network: `patchkit net`."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, TypeVar

import click

from patchkit.cli.next_step import next_step, program
from patchkit.cli.out import confirm, record_fields, style, table, tell
from patchkit.cli.render import (
    Block,
    Data,
    Record,
    VerbGroup,
    finding_blocks,
    rendered,
    verbose_option,
)
from patchkit.cli.runtime.net_verify import (
    NETDEV,
    ROOT,
    IPv4Type,
    verify,
    words_as_root,
)
from patchkit.cluster.net.apply import NetHistory, NetResult, apply_plan, undo_plan
from patchkit.cluster.net.checks import plan_remarks
from patchkit.cluster.net.netplan_file import check_conflicts, read_other_files, render_netplan
from patchkit.cluster.net.plan import (
    Line,
    NetPlan,
    NetPlanOptions,
    make_net_plan,
    other_node_options,
)
from patchkit.errors import HostError, UsageError
from patchkit.finding import Finding, Level
from patchkit.quoting import quoted
from patchkit.runtime.host.hardware import network_facts
from patchkit.runtime.host.probe import probe

F = TypeVar("F", bound=Callable[..., Any])


def _plan_options(command: F) -> F:
    """Add the options of a plan."""
    for option in (
        ROOT,
        click.option("--mtu", type=int, metavar="N", help="Default: what is there."),
        NETDEV,
        click.option(
            "--network",
            type=IPv4Type(IPv4Network, "192.168.100.0/24"),
            help="Count addresses anew from this one: twin A's; twin B and further links follow. "
            f"Default: keep what is there, else {network_facts()['plan']['network']}.",
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
@verbose_option
@rendered
def plan(*, verbose: bool, **options: Any) -> Iterator[Block]:
    """Print what this node's network lacks; nothing is written, no rights are needed.

    The first line is the verdict; -v shows the netplan file as well. Addresses that are there are
    kept, whoever gave them.
    """
    made = _plan_node(options)
    yield Record(made.fields())
    yield from made.lines()
    if verbose and made.text:
        yield f"\n{made.place.file}:"
        yield Data(made.text)
    if made.plan.changes:
        yield next_step(*words_as_root(*made.asked.command_words("apply"), *made.root_words))
    else:
        yield next_step(*program(), "net", "verify", *made.root_words)
    yield from made.other_step()
    _tell_unfinished(made.place)


@command.command()
@_plan_options
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="Replace the file though somebody edited it.")
@rendered
def apply(*, yes: bool, force: bool, **options: Any) -> Iterator[Block]:
    """Write the plan to /etc/netplan/40-patchkit.yaml and bring the network to it; needs root.

    What was there is kept for `net undo`. If netplan fails, or the address of the default route or
    of this SSH session is gone afterwards, the former network is put back. --json asks nothing.
    """
    place = NetHistory(options["root"])
    _need_root(place)
    _tell_unfinished(place)
    made = _plan_node(options)
    name = str(place.file)
    old = (place.read_file() or b"").decode(errors="replace").splitlines()
    new = made.text.splitlines() or old
    difference = list(difflib.unified_diff(old, new, name, name, lineterm=""))
    yield from made.lines()
    done = NetResult(changed=False, live=False)
    if made.text:
        yield from difference or [f"{name}: is as planned"]
        if difference and not yes:
            _ask()
        done = apply_plan(place, made.plan, force=force)
        yield from _result_lines(name, done)
    yield Record({"file": name, **made.fields(), "difference": difference, **record_fields(done)})
    if done.changed:
        yield from made.other_step()
        yield next_step(*program(), "net", "verify", *made.root_words)


@command.command()
@ROOT
@click.option("--force", is_flag=True, help="Set a journal aside that is damaged.")
@rendered
def undo(root: Path, *, force: bool) -> Iterator[Block]:
    """Put back what was there before the last apply, byte by byte; needs root."""
    place = NetHistory(root)
    _need_root(place)
    done = undo_plan(place, force=force)
    yield Record({"file": place.file, **record_fields(done)})
    what = "an apply that was cut short" if done.recovered else "the last apply"
    left = "is as before" if place.read_file() is not None else "is gone, as before"
    yield f"{what} is undone: {place.file} {left}"


@dataclass(frozen=True, slots=True)
class _NodePlan:
    """A plan for this node; ``text`` is that of the netplan file, "" for none."""

    plan: NetPlan
    asked: NetPlanOptions
    place: NetHistory
    notes: Sequence[Finding]
    text: str

    @property
    def root_words(self) -> tuple[str, ...]:
        return () if self.place.root == Path("/") else ("--root", str(self.place.root))

    def verdict(self) -> str:
        """Return in one line whether there is something to do."""
        changes, lines = len(self.plan.changes), len(self.plan.lines)
        if changes:
            return f"{changes} of {lines} interfaces {'change' if changes > 1 else 'changes'}"
        if any(note.level in (Level.ERROR, Level.WARNING) for note in self.notes):
            return "no address has to change, but see what is said below"
        return "this network is fine already: nothing to do"

    def lines(self) -> Iterator[Block]:
        """Yield the verdict, a row for each interface, and what to know."""
        yield style(self.verdict(), bold=True)
        yield from table(map(_line_row, self.plan.lines), indent="  ")
        yield from finding_blocks(self.notes)

    def other_step(self) -> Iterator[Block]:
        """Yield what to run on the other node, if that is known."""
        if there := other_node_options(self.plan, self.asked):
            unless = "" if self.plan.changes else ", if it has no address yet"
            words = there.command_words("plan")
            yield next_step("patchkit", *words, where=f"on the other node{unless}")

    def fields(self) -> dict[str, Any]:
        lines = [{"action": line.action, **record_fields(line)} for line in self.plan.lines]
        notes = [note.fields() for note in self.notes]
        own = record_fields(self.plan, "lines", "spare")
        verdict = {"verdict": self.verdict(), "changes": len(self.plan.changes)}
        return {**verdict, **own, "lines": lines, "notes": notes, "yaml": self.text}


def _line_row(line: Line) -> tuple[str, ...]:
    action = style(line.action, fg=None if line.action == "keep" else "green")
    addresses = ", ".join(map(str, line.addresses)) or "no IPv4"
    if line.action == "replace":
        addresses += f" (was {', '.join(map(str, line.before))})"
    mtu = f"MTU {line.mtu}" + (f" (was {line.mtu_before})" if line.mtu != line.mtu_before else "")
    to = f", to node {line.peer}" if line.peer else ""
    return action, line.netdev, addresses, mtu, line.place + to


def _plan_node(options: Mapping[str, Any]) -> _NodePlan:
    """Return the plan for this host, checked against what it has."""
    asked, place = _read_options(options), NetHistory(options["root"])
    host = probe(place.root, python=None, environment=os.environ)
    given = place.read_given()
    made = make_net_plan(host, asked, given)
    files = read_other_files(place.root)
    check_conflicts(host, made, asked, given, files)
    # netplan's files are of mode 600, and plan needs no rights.
    hidden = [file.path for file in files if file.text is None]
    if hidden and made.written:
        tell(f"note: only root may read {', '.join(hidden)}; apply checks them")
    notes = tuple(plan_remarks(host, made))
    return _NodePlan(made, asked, place, notes, render_netplan(made) if made.written else "")


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


def _need_root(place: NetHistory) -> None:
    if place.live and os.geteuid() != 0:
        what = f"writing {place.file} and running netplan need root"
        raise HostError(what, hint=quoted(*words_as_root(*sys.argv[1:])))


def _ask() -> None:
    # A question in a pipe, or amid JSON, is one that nobody sees.
    asked = not click.get_current_context().params["as_json"]
    if not (asked and sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("apply asks before it writes, and there is no terminal", hint="--yes")
    if not confirm("Apply?"):
        raise UsageError("nothing was changed")


def _tell_unfinished(place: NetHistory) -> None:
    if place.journal.unfinished():
        tell(f"note: an apply was cut short; {quoted(*words_as_root('net', 'undo'))}")


def _result_lines(file: str, done: NetResult) -> Iterator[str]:
    if done.recovered:
        yield "an apply that was cut short was put back first"
    if not done.changed:
        yield "nothing to do" + ("; `sudo netplan apply` sets it anew" if done.live else "")
        return
    yield f"{file} is written" + (" and applied" if done.live else "")
    if not done.live:
        yield "the root is not /: no network was changed"
