"""patchkit verify"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from patchkit.cli import show
from patchkit.cli.options import as_json
from patchkit.wheel.manifest import Kind
from patchkit.wheel.verify import Verified, verify


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
        console.print(Text(pins, "dim"), soft_wrap=not console.is_terminal)
    if not done.findings:
        console.print(Text.assemble(("✓ ", "green"), f"{house}: {_counted(done)}, all as listed"))
    groups: dict[tuple[str, str, str], list[str]] = {}
    for each in done.findings:
        groups.setdefault((each.filename, each.why, each.hint), []).append(each.what)
    for (filename, why, hint), whats in groups.items():
        _print_group(console, filename, [*whats, f"why: {why}" if why else ""], hint)


def _print_group(console: Console, filename: str, lines: Sequence[str], hint: str) -> None:
    """Lines below a file's name. Names and commands stay whole, so that they can be copied."""
    console.print(Text.assemble(("✗ ", "bold red"), (filename, "bold")), soft_wrap=True)
    for line in filter(None, lines):
        if console.is_terminal:
            console.print(Padding(Text(line), (0, 0, 0, 2), expand=False))
        else:
            console.print(f"  {line}", soft_wrap=True, markup=False)
    console.print(Text(f"  next: {hint}", "dim"), soft_wrap=True)


def _counted(done: Verified) -> str:
    built = sum(entry.kind is Kind.BUILT for entry in done.entries)
    others = len(done.entries) - built
    wheels = f"{built} wheel{'' if built == 1 else 's'}"
    rest = f" and {others} {'dependency' if others == 1 else 'dependencies'}"
    return wheels + (rest if others else "")
