"""Plan, apply and undo the QSFP network: `patchkit net`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, TypeVar

import click

from patchkit.cli.out import as_json, confirm, data, echo, print_json, say
from patchkit.cli.runtime.net_options import (
    CAGE,
    MTU,
    NETDEV,
    ROOT,
    AddressType,
    NetworkType,
    sudo,
)
from patchkit.cli.runtime.net_verify import verify
from patchkit.errors import HostError, UsageError
from patchkit.runtime.host.probe import probe
from patchkit.runtime.net import apply as net_apply
from patchkit.runtime.net import conflicts as net_conflicts
from patchkit.runtime.net import live as net_live
from patchkit.runtime.net.netplan_file import render
from patchkit.runtime.net.peer import from_file
from patchkit.runtime.net.plan import TOPOLOGIES, NetPlan, NetPlanOptions, facts, make_plan
from patchkit.runtime.net.state import NetHistory

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
        default=facts()["plan"]["network"],
        show_default=True,
        help="Twin A's; twin B and further links take those that follow.",
    ),
    CAGE,
    click.option("--port0-to", type=int, metavar="N", help="In a ring: where cage 0 leads."),
    NETDEV,
    click.option("--peer", type=AddressType(), help="An address that it must be able to reach."),
    MTU,
    ROOT,
)


@click.group()
def command() -> None:
    """The QSFP network between Sparks: plan, apply, verify, undo.

    \b
      patchkit net plan --role head
      sudo patchkit net apply --role head
      patchkit net verify --peer 192.168.100.12
      sudo patchkit net undo

    Both halves of a cabled cage get an address, in different networks; a ring of three gets twelve.
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
@as_json
def plan(facts_file: Path | None, *, as_json: bool, **options: Any) -> None:
    """Print the netplan file that this node should have; nothing is written."""
    root: Path = options["root"]
    if facts_file:
        made = make_plan(from_file(facts_file), _as_wish(options))
        _check_peer(made, options["peer"])
    else:
        made = _planned(options, root)
    text = render(made)
    if as_json:
        print_json({**_fields(made), "yaml": text})
        return
    data(text)
    _tell_unfinished(NetHistory(root))


@command.command()
@_wish
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Show the difference only.")
@click.option("--force", is_flag=True, help="Replace the file though somebody edited it.")
def apply(*, yes: bool, dry_run: bool, force: bool, **options: Any) -> None:
    """Write the plan to /etc/netplan/40-patchkit.yaml and bring the network to it; needs root.

    What was there is kept for `net undo`. If netplan fails, or the address of the default route or
    of this SSH session is gone afterwards, the former network is put back.
    """
    place = NetHistory(options["root"])
    if not dry_run:
        _need_root(place)
    _tell_unfinished(place)
    made = _planned(options, place.root)
    difference = _difference(place, render(made))
    echo(difference or [f"{place.file}: is as planned"])
    if dry_run:
        return
    if difference and not yes:
        _ask()
    done = net_apply.apply(place, made, force=force)
    if done.recovered:
        say("an apply that was cut short was put back first")
    _tell_applied(place, made, done)


@command.command()
@ROOT
@click.option("--force", is_flag=True, help="Set a journal aside that is damaged.")
def undo(root: Path, *, force: bool) -> None:
    """Put back what was there before the last apply, byte by byte; needs root."""
    place = NetHistory(root)
    _need_root(place)
    done = net_apply.undo(place, force=force)
    what = "an apply that was cut short" if done.recovered else "the last apply"
    left = "is as before" if place.text() is not None else "is gone, as before"
    say(f"{what} is undone: {place.file} {left}")


command.add_command(verify)


# What is asked for


def _as_wish(options: Mapping[str, Any]) -> NetPlanOptions:
    return NetPlanOptions(
        node=_node(options["node"], options["role"], options["nodes"]),
        **{
            key: options[key]
            for key in ("nodes", "mtu", "network", "topology", "cage", "port0_to", "netdevs")
        },
    )


def _node(node: int | None, role: str | None, nodes: int) -> int:
    """Return the number of this node. Raises UsageError if the options do not give it."""
    by_role = {"head": 1, "worker": 2 if nodes == 2 else None}.get(role or "")
    if node is None and by_role is None:
        raise UsageError(
            "missing --node or --role", hint=f"--node 1 to {nodes}, or --role head; the head is 1"
        )
    if node is not None and role and (node == 1) != (role == "head"):
        raise UsageError(f"--role {role} --node {node}: the head is node 1, and only the head")
    return node if node is not None else by_role or 1


def _planned(options: Mapping[str, Any], root: Path) -> NetPlan:
    """Return the plan for this host, checked against what the host has."""
    place = NetHistory(root)
    live = net_apply.is_live(place)
    host = probe(root, python=None, environment=os.environ)
    # A recording has no driver to ask for its limits.
    made = make_plan(host, _as_wish(options), net_live.mtu_limits() if live else None)
    _check_peer(made, options["peer"])
    files = net_conflicts.others(root)
    net_conflicts.check(host, made, applied=place.applied(), files=files)
    # netplan's files are of mode 600, and plan needs no rights.
    hidden = [file.path for file in files if file.text is None]
    if hidden:
        say(f"note: only root may read {', '.join(hidden)}; apply checks them", err=True)
    return made


def _check_peer(made: NetPlan, peer: IPv4Address | None) -> None:
    """Raise UsageError for a peer that this plan could not reach."""
    if peer is None:
        return
    if any(peer == line.address.ip for line in made.lines):
        raise UsageError(f"--peer {peer} is what this node would get", hint="another --node")
    if not any(peer in line.address.network for line in made.lines):
        networks = ", ".join(str(line.address.network) for line in made.lines)
        raise UsageError(f"--peer {peer} is in none of {networks}", hint="another --network")


def _need_root(place: NetHistory) -> None:
    if net_apply.is_live(place) and os.geteuid() != 0:
        raise HostError(
            f"writing {place.file} and running netplan need root", hint=sudo(*sys.argv[1:])
        )


def _ask() -> None:
    # A question in a pipe is one that nobody sees.
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("apply asks before it writes, and there is no terminal", hint="--yes")
    if not confirm("Apply?"):
        raise UsageError("nothing was changed")


# What is printed


def _fields(made: NetPlan) -> dict[str, Any]:
    lines = [{**asdict(line), "address": str(line.address)} for line in made.lines]
    return {**asdict(made), "lines": lines}


def _difference(place: NetHistory, text: str) -> list[str]:
    import difflib  # 5 ms, and only here

    old = (place.text() or b"").decode(errors="replace").splitlines()
    name = str(place.file)
    return list(difflib.unified_diff(old, text.splitlines(), name, name, lineterm=""))


def _tell_unfinished(place: NetHistory) -> None:
    if place.journal.unfinished():
        say(f"note: an apply was cut short; {sudo('net', 'undo')}", err=True)


def _tell_applied(place: NetHistory, made: NetPlan, done: net_apply.Done) -> None:
    if not done.changed:
        say("nothing to do" + ("; `sudo netplan apply` sets it anew" if done.live else ""))
        return
    say(f"{place.file} is written" + (" and applied" if done.live else ""))
    if not done.live:
        say("the root is not /: no network was changed")
    if not done.checked:
        say("netplan is not installed here: it did not read the file")
    peers = [str(line.address.network) for line in made.lines]
    say(f"next: on the peer the same, then `patchkit net verify --peer ADDRESS` (in {peers[0]})")
