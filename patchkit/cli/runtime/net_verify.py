"""Check the QSFP network: `patchkit net verify`; the options that other verbs share."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

import click

from patchkit.cli.next_step import spelled
from patchkit.cli.out import LaidOut, as_json, echo, print_json, say, style, table
from patchkit.cluster.net.apply import is_live
from patchkit.cluster.net.checks import check_warned, choose_checked_cages
from patchkit.cluster.net.state import NetHistory
from patchkit.cluster.net.verify import (
    Peer,
    ask_peer_facts,
    bandwidth_commands,
    expected_bandwidth,
    read_peer_facts,
    verify_network,
)
from patchkit.errors import UsageError
from patchkit.finding import Finding, Level, worst
from patchkit.quoting import quoted, visible
from patchkit.runtime.host.network_facts import facts
from patchkit.runtime.host.probe import probe

_folder = click.Path(path_type=Path, exists=True, file_okay=False)
ROOT = click.option("--root", type=_folder, default=Path("/"), help="Another root than /.")
MTU = click.option("--mtu", type=int, metavar="N", help="Of both ends; default: what is there.")
CAGE = click.option("--cage", type=click.Choice([0, 1]), help="0 is next to the RJ45 port.")
NETDEV = click.option(
    "--netdev", "netdevs", metavar="NAME", multiple=True, help="Instead of what is cabled; repeat."
)
# How --json calls each level, and its mark on the screen; what failed comes first.
_LEVELS = {
    Level.ERROR: ("failed", style("✗", fg="red", bold=True)),
    Level.WARNING: ("warning", style("!", fg="yellow")),
    Level.NOTE: ("note", style("-", dim=True)),
    Level.UNKNOWN: ("not checked", style("?", fg="yellow")),
    Level.OK: ("ok", style("✓", fg="green")),
}
_COUNTED = (Level.OK, Level.ERROR, Level.WARNING, Level.NOTE, Level.UNKNOWN)


class IPv4Type(click.ParamType[Any]):
    """An address or a network, with an example for who mistypes it."""

    def __init__(self, kind: type[IPv4Address] | type[IPv4Network], example: str) -> None:
        self.kind, self.example, self.name = kind, example, kind.__name__.removeprefix("IPv4")

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            return self.kind(value)
        except ValueError as error:
            what = f"{value!r} is not an IPv4 {self.name.lower()}: {error}"
            self.fail(f"{what}; write it as {self.example}", param, ctx)


def words_as_root() -> tuple[str, ...]:
    """Return this patchkit as words for sudo, by its full path: sudo does not look into a venv."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":  # started by python -m
        return (sys.executable, "-m", "patchkit")
    return (str(program.absolute()),)


def sudo_command(*arguments: str) -> str:
    """Return the command line that runs this patchkit as root."""
    return quoted("sudo", *words_as_root(), *arguments)


def reason_lines(check: Finding) -> Iterator[str]:
    """Yield why a finding matters and what to do."""
    for label, words in (("why", check.why), ("next", spelled(check.hint))):
        if words:
            yield style(f"   {label + ':':<5} {words}", dim=True)


def note_lines(notes: Iterable[Finding]) -> Iterator[str]:
    """Yield each finding in a line, with its reasons below."""
    for note in notes:
        yield _LEVELS[note.level][1] + f" {note.where}: {note.about}: {note.what}"
        yield from reason_lines(note)


def net_finding_fields(check: Finding) -> dict[str, str]:
    return {
        "subject": check.where,
        "what": check.about,
        "state": _LEVELS[check.level][0],
        "seen": check.what,
        "why": check.why,
        "next": check.hint,
    }


@click.command("verify")
@MTU
@click.option(
    "--peer",
    "peers",
    type=IPv4Type(IPv4Address, "192.168.100.11"),
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
def verify(*, verbose: bool, as_json: bool, root: Path, **options: Any) -> None:
    """Check the QSFP network; needs no rights, changes nothing.

    Link, speed, MTU, addresses and RoCE GIDs here; with --peer the way there, with jumbo frames;
    with the peer's facts both ends compared. The first line is the verdict. What could not be
    checked is reported and does not count as passed. Exits with 9 if a check failed.
    """
    file, destination = options["peer_probe"], options["ssh"]
    if file and destination:
        raise UsageError("--peer-probe and --ssh both tell the peer's facts", hint="take one")
    host = probe(root, python=options["python"], environment=os.environ)
    chosen = choose_checked_cages(host, options["netdevs"], options["cage"])
    peer_host = read_peer_facts(file) if file else None
    if destination:
        peer_host = ask_peer_facts(destination, options["ssh_patchkit"])
    peer, place = Peer(addresses=options["peers"], host=peer_host), NetHistory(root)
    checks = list(verify_network(host, chosen, peer, options["mtu"], live=is_live(place)))
    if place.journal.unfinished():
        undo = sudo_command("net", "undo")
        checks.append(check_warned(str(place.file), "apply", "was cut short", undo))
    commands = bandwidth_commands(host, chosen, peer)
    expected, slower = expected_bandwidth(), str(facts()["owners"]["hot_plug"])
    counts = Counter(check.level for check in checks)
    if as_json:
        print_json(
            {
                "verdict": _verdict(checks),
                "checks": list(map(net_finding_fields, checks)),
                "counts": {_LEVELS[level][0]: counts[level] for level in _COUNTED},
                "bandwidth": {"commands": commands, "expected": expected, "slower": slower},
            }
        )
    else:
        say(style(_verdict(checks), bold=True))
        _show_checks(checks, verbose=verbose)
        # Notes are not looked for, so that there are none is no result.
        shown = (level for level in _COUNTED if counts[level] or level is not Level.NOTE)
        echo(["", ", ".join(f"{counts[level]} {_LEVELS[level][0]}" for level in shown)])
        echo(["", f"RDMA bandwidth is not measured; expect {expected} of"])
        lines = [LaidOut(f"  {line}") for line in map(visible, commands)]
        echo(lines or ["  ib_write_bw; with a peer, its commands are here"])
        echo([f"  {slower}"])
    if code := worst(checks):
        raise SystemExit(code)


def _verdict(checks: Sequence[Finding]) -> str:
    failures = sum(check.level is Level.ERROR for check in checks)
    warnings = sum(check.level is Level.WARNING for check in checks)
    if failures:
        return f"{failures} of {len(checks)} checks failed"
    if warnings:
        return f"no check failed, but there {'are warnings' if warnings > 1 else 'is a warning'}"
    return "no check failed"


def _show_checks(checks: Sequence[Finding], *, verbose: bool) -> None:
    """Show what failed first; with -v all, in the order in which it was checked."""
    worst_first = sorted(checks, key=lambda check: list(_LEVELS).index(check.level))
    shown = checks if verbose else [c for c in worst_first if c.level is not Level.OK]
    rows = table(
        (
            _LEVELS[check.level][1],
            check.where,
            check.about,
            f"not checked: {check.what}" if check.level is Level.UNKNOWN else check.what,
        )
        for check in shown
    )
    for row, check in zip(rows, shown, strict=True):
        echo([row, *reason_lines(check)])
