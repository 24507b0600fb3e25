"""Check the QSFP network: `patchkit net verify`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from patchkit.cli.out import LaidOut, as_json, echo, print_json, say, style, table
from patchkit.cli.runtime.net_options import CAGE, MTU, NETDEV, ROOT, AddressType, sudo
from patchkit.cli.runtime.net_view import STATES, fields, mark, reasons
from patchkit.cluster.net import apply as net_apply
from patchkit.cluster.net.checks import groups, warned
from patchkit.cluster.net.peer import from_file, from_ssh
from patchkit.cluster.net.state import NetHistory
from patchkit.cluster.net.verify import Peer, bandwidth, expected, slower
from patchkit.cluster.net.verify import verify as checked
from patchkit.errors import UsageError
from patchkit.finding import Finding, Level, worst
from patchkit.quoting import visible
from patchkit.runtime.host.host import Host
from patchkit.runtime.host.probe import probe


@click.command("verify")
@MTU
@click.option(
    "--peer",
    "peers",
    type=AddressType(),
    multiple=True,
    help="Its address; repeat per twin.",
)
@click.option(
    "--peer-probe",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The peer's facts: `patchkit probe --json` there.",
)
@click.option("--ssh", metavar="HOST", help="Ask the peer for its facts with the system's ssh.")
@click.option(
    "--ssh-patchkit", metavar="COMMAND", default="patchkit", show_default=True, help="There."
)
@CAGE
@NETDEV
@click.option("--python", metavar="PATH", help="The Python of vLLM; default: the present one.")
@ROOT
@click.option("-v", "--verbose", is_flag=True, help="Show what is ok as well.")
@as_json
def verify(*, verbose: bool, as_json: bool, **options: Any) -> None:
    """Check the QSFP network; needs no rights, changes nothing.

    Link, speed, MTU, addresses and RoCE GIDs here; with --peer the way there, with jumbo frames;
    with the peer's facts both ends compared. The first line is the verdict. What could not be
    checked is reported and does not count as passed. Exits with 9 if a check failed.
    """
    root: Path = options["root"]
    host = probe(root, python=options["python"], environment=os.environ)
    chosen = groups(host, options["netdevs"], options["cage"])
    peer = Peer(addresses=options["peers"], host=_peer_host(options))
    place = NetHistory(root)
    checks = list(checked(host, chosen, peer, options["mtu"], live=net_apply.is_live(place)))
    if place.journal.unfinished():
        checks.append(warned(str(place.file), "apply", "was cut short", sudo("net", "undo")))
    commands = bandwidth(host, chosen, peer)
    if as_json:
        print_json(_fields(checks, commands))
    else:
        _show(checks, commands, verbose=verbose)
    if code := worst(checks):
        raise SystemExit(code)


def _peer_host(options: Mapping[str, Any]) -> Host | None:
    file, destination = options["peer_probe"], options["ssh"]
    if file and destination:
        raise UsageError("--peer-probe and --ssh both tell the peer's facts", hint="take one")
    if destination:
        return from_ssh(destination, options["ssh_patchkit"])
    return from_file(file) if file else None


_ORDER = (Level.ERROR, Level.WARNING, Level.NOTE, Level.UNKNOWN, Level.OK)


def _verdict(checks: Sequence[Finding]) -> str:
    counts = Counter(check.level for check in checks)
    if failures := counts[Level.ERROR]:
        return f"{failures} of {len(checks)} checks failed"
    if warnings := counts[Level.WARNING]:
        return f"no check failed, but there {'are warnings' if warnings > 1 else 'is a warning'}"
    return "no check failed"


def _show(checks: Sequence[Finding], commands: Sequence[str], *, verbose: bool) -> None:
    say(style(_verdict(checks), bold=True))
    # What failed first; with -v in the order in which it was checked.
    worst_first = sorted(checks, key=lambda check: _ORDER.index(check.level))
    shown = checks if verbose else [c for c in worst_first if c.level is not Level.OK]
    rows = table((mark(c), c.where, c.about, _seen(c)) for c in shown)
    for row, check in zip(rows, shown, strict=True):
        echo([row, *reasons(check)])
    counts = Counter(check.level for check in checks)
    # Notes are not looked for, so that there are none is no result.
    told = (level for level in STATES if counts[level] or level is not Level.NOTE)
    echo(["", ", ".join(f"{counts[level]} {STATES[level]}" for level in told)])
    echo(["", f"RDMA bandwidth is not measured; expect {expected()} of"])
    echo(
        [LaidOut(f"  {line}") for line in map(visible, commands)]
        or ["  ib_write_bw; with a peer, its commands are here"]
    )
    echo([f"  {slower()}"])


def _seen(check: Finding) -> str:
    return f"not checked: {check.what}" if check.level is Level.UNKNOWN else check.what


def _fields(checks: Sequence[Finding], commands: Sequence[str]) -> dict[str, Any]:
    counts = Counter(check.level for check in checks)
    return {
        "verdict": _verdict(checks),
        "checks": list(map(fields, checks)),
        "counts": {word: counts[level] for level, word in STATES.items()},
        "bandwidth": {"commands": list(commands), "expected": expected(), "slower": slower()},
    }
