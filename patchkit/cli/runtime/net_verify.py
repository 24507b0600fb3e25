"""Check the QSFP network: `patchkit net verify`; the options that other verbs share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

import click

from patchkit.cli.render import (
    Block,
    ExitCode,
    Record,
    finding_blocks,
    finding_summary,
    rendered,
    verbose_option,
)
from patchkit.cluster.launch.cluster_file import VENV
from patchkit.cluster.net.apply import NetHistory
from patchkit.cluster.net.checks import (
    ask_peer_facts,
    check_warned,
    choose_checked_cages,
    verify_network,
)
from patchkit.finding import Level, worst
from patchkit.quoting import quoted
from patchkit.runtime.host.hardware import network_facts
from patchkit.runtime.host.probe import probe

_folder = click.Path(path_type=Path, exists=True, file_okay=False)
ROOT = click.option("--root", type=_folder, default=Path("/"), help="Another root than /.")
NETDEV = click.option(
    "--netdev", "netdevs", metavar="NAME", multiple=True, help="Instead of what is cabled; repeat."
)


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


def words_as_root(*arguments: str) -> tuple[str, ...]:
    """Return the words that run this patchkit as root: sudo does not look into a venv."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":  # started by python -m
        return ("sudo", sys.executable, "-m", "patchkit", *arguments)
    return ("sudo", str(program.absolute()), *arguments)


@click.command("verify")
@click.option(
    "--peer",
    "peers",
    type=IPv4Type(IPv4Address, "192.168.100.11"),
    multiple=True,
    help="Its address; repeat per twin.",
)
@click.option("--ssh", metavar="HOST", help="Ask the peer, which needs no patchkit, by ssh.")
@NETDEV
@ROOT
@verbose_option
@rendered
def verify(*, verbose: bool, root: Path, **options: Any) -> Iterator[Block]:
    """Check the QSFP network; needs no rights, changes nothing.

    Link, speed, MTU, addresses and RoCE GIDs here; with --peer the way there, with jumbo frames;
    with --ssh both ends compared. What could not be checked is reported and does not
    count as passed. Exits with 9 if a check failed.
    """
    host = probe(root, python=None, environment=os.environ)
    chosen = choose_checked_cages(host, options["netdevs"])
    peer = ask_peer_facts(options["ssh"], VENV) if options["ssh"] else None
    place = NetHistory(root)
    found = verify_network(host, chosen, peer, options["peers"], live=place.live)
    checks = list(found)
    if place.journal.unfinished():
        undo = quoted(*words_as_root("net", "undo"))
        checks.append(check_warned(str(place.file), "apply", "was cut short", undo))
    link, slower = network_facts()["link"], network_facts()["owners"]["hot_plug"]
    (one, most), (least, both) = link["twin_gbits"], link["both_gbits"]
    expected = f"{one} to {most} Gb/s for one twin, {least} to {both} for both at once"
    bandwidth = {"expected": expected, "slower": slower}
    yield Record({"checks": [check.fields() for check in checks], "bandwidth": bandwidth})
    yield from finding_blocks(check for check in checks if verbose or check.level is not Level.OK)
    yield "RDMA bandwidth is not measured; expect of `ib_write_bw -R --report_gbits`"
    yield from (f"  {line}" for line in bandwidth.values())
    yield finding_summary(checks)
    yield ExitCode(worst(checks))
