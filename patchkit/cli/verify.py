"""patchkit verify"""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from patchkit.cli import show
from patchkit.cli.options import as_json
from patchkit.wheel.manifest import Kind
from patchkit.wheel.verify import Verified, verify

_WIDE = 120  # columns of a terminal; in fewer, or in a pipe, nobody could read four columns


@click.command()
@click.argument(
    "house", metavar="[WHEELHOUSE]", default=Path("wheelhouse"), type=click.Path(path_type=Path)
)
@as_json
def command(house: Path, *, as_json: bool) -> None:
    """Whether the wheels of a wheelhouse are whole, load on their device, and fit together.

    Files against manifest, hashes and RECORD; device code against the target; vLLM, torch, NCCL and
    triton, Pythons, CPUs and CUDA against each other.

    Exits with 8 if bytes are not those of the manifest, 7 if something is missing, 5 if code does
    not load, 3 if a wheel is not sound, 2 if wheels do not belong together; with the highest of
    these if there are several.
    """
    run(house, as_json=as_json)


def run(house: Path, *, as_json: bool) -> None:
    """Print what verification finds; SystemExit with the code of the worst finding."""
    done = verify(house)
    if as_json:
        show.print_json(
            {
                "dir": str(house),
                "wheels": len(done.entries),
                "pins": dict(done.pins),
                "findings": [each.fields() for each in done.findings],
            }
        )
    else:
        _print(show.console(), house, done)
    if done.findings:
        raise SystemExit(max(each.exit_code for each in done.findings))


def _print(console: Console, house: Path, done: Verified) -> None:
    if done.pins:
        pins = ", ".join(f"{name} {version}" for name, version in done.pins.items())
        console.print(Text(pins, "dim"), soft_wrap=True)
    if not done.findings:
        console.print(Text.assemble(("✓ ", "green"), f"{house}: {_counted(done)}, all as listed"))
    elif console.is_terminal and console.width >= _WIDE:
        console.print(_table(done))
    else:
        for each in done.findings:
            said = Text.assemble(("✗ ", "bold red"), (each.filename, "bold"), f": {each.what}")
            console.print(said, soft_wrap=True)
            for label, words in (("why", each.why), ("next", each.hint)):
                if words:
                    console.print(Text(f"  {label}: {words}", "dim"), soft_wrap=True)


def _table(done: Verified) -> Table:
    table = Table(box=None, padding=(0, 2, 1, 0), header_style="bold")
    for column in ("wheel", "what", "why", "what to do"):
        table.add_column(column, overflow="fold")
    for each in done.findings:
        table.add_row(Text(each.filename, "bold"), each.what, Text(each.why, "dim"), each.hint)
    return table


def _counted(done: Verified) -> str:
    built = sum(entry.kind is Kind.BUILT for entry in done.entries)
    others = len(done.entries) - built
    wheels = f"{built} wheel{'' if built == 1 else 's'}"
    rest = f" and {others} {'dependency' if others == 1 else 'dependencies'}"
    return wheels + (rest if others else "")
