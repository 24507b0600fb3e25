"""Say what is wrong, on which node, why, and what cures it: `patchkit doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from patchkit.cli.findings import finding_fields, finding_lines
from patchkit.cli.out import as_json, echo, print_json
from patchkit.finding import Finding, Level, worst
from patchkit.reading import read_chunks
from patchkit.runtime.doctor.log import log_findings
from patchkit.runtime.symptoms.diagnosis import read_log


@click.command()
@click.option(
    "--log",
    metavar="FILE",
    type=click.Path(path_type=Path, allow_dash=True),
    help="What a program wrote; - is standard input.",
)
@click.option("--elsewhere", is_flag=True, help="The log is another machine's: ask not this one.")
@click.option("-v", "--verbose", is_flag=True, help="Show all that was looked at.")
@as_json
def command(*, log: Path | None, elsewhere: bool, verbose: bool, as_json: bool) -> None:
    """Find what is wrong, why, and what cures it.

    \b
      patchkit doctor --log vllm.log
      docker logs vllm 2>&1 | patchkit doctor --log -
    """
    assert log is not None
    read = read_log(read_chunks(log, hint="patchkit doctor --log -"))
    found = list(log_findings(read, "standard input" if str(log) == "-" else str(log)))
    if as_json:
        print_json({"facts": dict(read.facts), "findings": [*map(finding_fields, found)]})
    else:
        tell(found, verbose=verbose)
    if code := worst(found, Level.ERROR, Level.WARNING):
        raise SystemExit(code)


def tell(found: Sequence[Finding], *, verbose: bool) -> None:
    """Print findings for people."""
    echo(finding_lines(found, verbose=verbose))
