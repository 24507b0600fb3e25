"""Plan, apply and undo the QSFP network: `patchkit net`."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from patchkit.cli.next_step import next_step, program
from patchkit.cli.out import as_json, confirm, data, echo, print_json, say
from patchkit.cli.runtime.net_options import (
    CAGE,
    MTU,
    NETDEV,
    ROOT,
    InterfaceType,
    NetworkType,
    as_root,
    sudo,
)
from patchkit.cli.runtime.net_verify import verify
from patchkit.cli.runtime.net_view import NetStep, other_node, plan_fields, plan_lines
from patchkit.cluster.net import apply as net_apply
from patchkit.cluster.net import conflicts as net_conflicts
from patchkit.cluster.net import live as net_live
from patchkit.cluster.net.netplan_file import render
from patchkit.cluster.net.peer import from_file
from patchkit.cluster.net.plan import TOPOLOGIES, NetPlan, NetPlanOptions
from patchkit.cluster.net.plan import command as command_line
from patchkit.cluster.net.planner import make_plan
from patchkit.cluster.net.remarks import plan_remarks
from patchkit.cluster.net.state import NetHistory
from patchkit.errors import HostError, UsageError
from patchkit.runtime.host.host import Host
from patchkit.runtime.host.network_facts import facts
from patchkit.runtime.host.probe import probe

F = TypeVar("F", bound=Callable[..., Any])


def _options(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_wish = _options(
    click.option("--node", type=int, metavar="N", help="This node's number, from 1: the head."),
    click.option("--role", type=click.Choice(["head", "worker"]), help="Of two: node 1 or 2."),
    click.option("--nodes", type=int, default=2, show_default=True, metavar="N", help="All."),
    click.option("--topology", type=click.Choice(TOPOLOGIES), default="auto", show_default=True),
    click.option(
        "--network",
        type=NetworkType(),
        help="Count addresses anew from this one: twin A's; twin B and further links follow. "
        f"Default: keep what is there, else {facts()['plan']['network']}.",
    ),
    CAGE,
    click.option("--port0-to", type=int, metavar="N", help="In a ring: where cage 0 leads."),
    NETDEV,
    click.option(
        "--peer",
        "peers",
        type=InterfaceType(),
        multiple=True,
        help="An address of the other end with its prefix: plan one beside it; repeat per twin.",
    ),
    click.option("--twins", is_flag=True, help="An address for every half, on both nodes."),
    MTU,
    ROOT,
)


@click.group()
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


@command.command()
@_wish
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
    root, wish = options["root"], _as_wish(options)
    place = NetHistory(root)
    if facts_file:
        host = from_file(facts_file)
        made = make_plan(host, wish)
    else:
        host = probe(root, python=None, environment=os.environ)
        made = _planned(host, wish, place)
    notes = list(plan_remarks(host, made, wish))
    steps = list(_steps(made, wish, root, elsewhere=facts_file is not None))
    if as_json:
        print_json(plan_fields(made, notes, steps))
        return
    echo(plan_lines(made, notes))
    if verbose and made.written:
        say(f"\n{place.file}:")
        data(render(made))
    echo(next_step(*step.command, where=step.where) for step in steps)
    if not facts_file:
        _tell_unfinished(place)


def _steps(
    made: NetPlan, wish: NetPlanOptions, root: Path, *, elsewhere: bool
) -> Iterator[NetStep]:
    """Yield what to run next: here, then on the other node."""
    again = command_line("apply", wish)
    if not made.changes:
        yield NetStep((*program(), "net", "verify", *_at(root)))
    elif elsewhere:
        yield NetStep(("sudo", "patchkit", *again), "on that node")
    else:
        yield NetStep(("sudo", *as_root(), *again, *_at(root)))
    yield from other_node(made, wish)


@command.command()
@_wish
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Show the difference only.")
@click.option("--force", is_flag=True, help="Replace the file though somebody edited it.")
@as_json
def apply(*, yes: bool, dry_run: bool, force: bool, as_json: bool, **options: Any) -> None:
    """Write the plan to /etc/netplan/40-patchkit.yaml and bring the network to it; needs root.

    What was there is kept for `net undo`. If netplan fails, or the address of the default route or
    of this SSH session is gone afterwards, the former network is put back. --json asks nothing.
    """
    place = NetHistory(options["root"])
    if not dry_run:
        _need_root(place)
    _tell_unfinished(place)
    wish = _as_wish(options)
    host = probe(place.root, python=None, environment=os.environ)
    made = _planned(host, wish, place)
    notes = list(plan_remarks(host, made, wish))
    difference = _difference(place, render(made)) if made.written else []
    if not as_json:
        echo(plan_lines(made, notes))
        if made.written:
            echo(difference or [f"{place.file}: is as planned"])
    done = None
    if made.written and not dry_run:
        if difference and not yes:
            _ask(as_json=as_json)
        done = net_apply.apply(place, made, force=force)
    steps = list(_steps_after(made, wish, place.root))
    if as_json:
        fields = plan_fields(made, notes, steps if done else [])
        said = {"difference": difference, "dry_run": dry_run, **_done_fields(done)}
        print_json({"file": str(place.file), **fields, **said})
    elif done:
        _tell_applied(place, done)
        echo(next_step(*step.command, where=step.where) for step in steps if done.changed)


@command.command()
@ROOT
@click.option("--force", is_flag=True, help="Set a journal aside that is damaged.")
@as_json
def undo(root: Path, *, force: bool, as_json: bool) -> None:
    """Put back what was there before the last apply, byte by byte; needs root."""
    place = NetHistory(root)
    _need_root(place)
    done = net_apply.undo(place, force=force)
    if as_json:
        print_json({"file": str(place.file), **_done_fields(done)})
        return
    what = "an apply that was cut short" if done.recovered else "the last apply"
    left = "is as before" if place.text() is not None else "is gone, as before"
    say(f"{what} is undone: {place.file} {left}")


command.add_command(verify)


# What is asked for


def _as_wish(options: Mapping[str, Any]) -> NetPlanOptions:
    """Return the options of a plan; ``--role`` gives the number of the node."""
    kept = {field.name: options[field.name] for field in dataclasses.fields(NetPlanOptions)}
    node = _node(options["node"], options["role"], options["nodes"])
    return NetPlanOptions(**{**kept, "node": node})


def _node(node: int | None, role: str | None, nodes: int) -> int | None:
    """Return the number of this node, None if it was not given: not every plan needs it."""
    if role == "worker" and node is None and nodes > 2:
        raise UsageError(
            "--role worker is one of several", hint=f"its number: --node 2 to --node {nodes}"
        )
    if node is not None and role and (node == 1) != (role == "head"):
        raise UsageError(f"--role {role} --node {node}: the head is node 1, and only the head")
    by_role = {"head": 1, "worker": 2}
    return by_role[role] if node is None and role else node


def _planned(host: Host, wish: NetPlanOptions, place: NetHistory) -> NetPlan:
    """Return the plan for this host, checked against what the host has."""
    live, given = net_apply.is_live(place), place.given()
    # A recording has no driver to ask for its limits.
    made = make_plan(host, wish, net_live.mtu_limits() if live else None, given)
    files = net_conflicts.others(place.root)
    net_conflicts.check(host, made, wish, given=given, files=files)
    # netplan's files are of mode 600, and plan needs no rights.
    hidden = [file.path for file in files if file.text is None]
    if hidden and made.written:
        say(f"note: only root may read {', '.join(hidden)}; apply checks them", err=True)
    return made


def _need_root(place: NetHistory) -> None:
    if net_apply.is_live(place) and os.geteuid() != 0:
        raise HostError(
            f"writing {place.file} and running netplan need root", hint=sudo(*sys.argv[1:])
        )


def _ask(*, as_json: bool) -> None:
    # A question in a pipe, or amid JSON, is one that nobody sees.
    if as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("apply asks before it writes, and there is no terminal", hint="--yes")
    if not confirm("Apply?"):
        raise UsageError("nothing was changed")


# What is printed


def _difference(place: NetHistory, text: str) -> list[str]:
    import difflib  # 5 ms, and only here

    old = (place.text() or b"").decode(errors="replace").splitlines()
    name = str(place.file)
    return list(difflib.unified_diff(old, text.splitlines(), name, name, lineterm=""))


def _tell_unfinished(place: NetHistory) -> None:
    if place.journal.unfinished():
        say(f"note: an apply was cut short; {sudo('net', 'undo')}", err=True)


def _tell_applied(place: NetHistory, done: net_apply.Done) -> None:
    if done.recovered:
        say("an apply that was cut short was put back first")
    if not done.changed:
        say("nothing to do" + ("; `sudo netplan apply` sets it anew" if done.live else ""))
        return
    say(f"{place.file} is written" + (" and applied" if done.live else ""))
    if not done.live:
        say("the root is not /: no network was changed")
    if not done.checked:
        say("netplan is not installed here: it did not read the file")


def _steps_after(made: NetPlan, wish: NetPlanOptions, root: Path) -> Iterator[NetStep]:
    """Yield what to run once the plan is applied: on the other node, then here."""
    yield from other_node(made, wish)
    yield NetStep((*program(), "net", "verify", *_at(root)))


def _at(root: Path) -> tuple[str, ...]:
    return () if root == Path("/") else ("--root", str(root))


def _done_fields(done: net_apply.Done | None) -> dict[str, bool]:
    """Return what was done; nothing was, if the plan asks for nothing or was only shown."""
    return dataclasses.asdict(done or net_apply.Done(changed=False, live=False))
