"""patchkit wheelhouse"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from patchkit.cli import show
from patchkit.cli.options import as_json
from patchkit.wheel.manifest import Entry
from patchkit.wheel.wheelhouse import Finding, entries, prune, verify

_folder = click.option(
    "--dir",
    "house",
    type=click.Path(path_type=Path),
    default=Path("wheelhouse"),
    show_default=True,
    help="The folder.",
)
_EPILOG = """\
\b
Install everything that it holds, by hash and without an index:
  pip install --require-hashes --no-deps --no-index \\
    --find-links wheelhouse -r wheelhouse/requirements.txt
"""


@click.group(epilog=_EPILOG)
def command() -> None:
    """The folder of finished wheels: manifest, hashes, locked requirements."""


@command.command("list")
@_folder
@as_json
def list_wheels(house: Path, *, as_json: bool) -> None:
    """The wheels, and what their builder knows of them."""
    held = entries(house)
    if as_json:
        show.print_json({"dir": str(house), "wheels": [entry.fields() for entry in held]})
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("project", "version", "tag", "MB", "sha256", "target"):
        table.add_column(column, justify="right" if column == "MB" else "left", no_wrap=True)
    for entry in held:
        table.add_row(*_cells(entry))
    show.console().print(table if held else f"{house} is empty")


def _cells(entry: Entry) -> tuple[str, ...]:
    name, megabytes = entry.name, f"{entry.size / 1e6:.1f}"
    target = str(entry.facts.get("target", "-"))
    return name.project, str(name.version), name.tag, megabytes, entry.sha256[:12], target


@command.command("verify")
@_folder
@as_json
def verify_wheels(house: Path, *, as_json: bool) -> None:
    """Whether everything is there, unchanged, listed, and such that pip can install it.

    Exits with 8 if bytes are not those of the manifest, 7 if something is missing, 2 for a wheel
    that does not belong here.
    """
    found = verify(house)
    if as_json:
        show.print_json({"dir": str(house), "findings": [_fields(each) for each in found]})
    else:
        _print(house, found)
    if found:
        raise SystemExit(max(each.exit_code for each in found))


def _fields(finding: Finding) -> dict[str, object]:
    return {
        "filename": finding.filename,
        "what": finding.what,
        "next": finding.hint,
        "exit_code": finding.exit_code,
    }


def _print(house: Path, found: Sequence[Finding]) -> None:
    console = show.console()
    for each in found:
        console.print(Text.assemble(("✗ ", "bold red"), (each.filename, "bold"), f": {each.what}"))
        console.print(Text(f"  next: {each.hint}", "dim"), soft_wrap=True)
    if not found:
        count = len(entries(house))
        wheels = "1 wheel" if count == 1 else f"{count} wheels"
        console.print(Text.assemble(("✓ ", "green"), f"{house}: {wheels}, all as listed"))


@command.command("prune")
@_folder
@click.option(
    "--drop",
    multiple=True,
    metavar="NAME",
    help="A listed wheel too: its file name, project, or project==version.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@as_json
def prune_wheels(house: Path, *, drop: tuple[str, ...], dry_run: bool, as_json: bool) -> None:
    """Remove what the manifest does not list and what interrupted runs left."""
    done = prune(house, drop=drop, dry_run=dry_run)
    if as_json:
        changes = [{"filename": each.filename, "reason": each.reason} for each in done]
        show.print_json({"dir": str(house), "dry_run": dry_run, "changes": changes})
        return
    console = show.console()
    for each in done:
        console.print(Text.assemble((each.filename, "bold"), f": {each.reason}"), soft_wrap=True)
    if not done:
        console.print(f"{house}: nothing to remove")
    elif dry_run:
        console.print("nothing was changed")
