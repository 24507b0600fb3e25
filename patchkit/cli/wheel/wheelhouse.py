"""Keep finished wheels: `patchkit wheelhouse`."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from patchkit.cli.next_step import next_step, pip, program
from patchkit.cli.options import Renamed
from patchkit.cli.out import LaidOut, style, table, tell
from patchkit.cli.progress import progress
from patchkit.cli.render import Block, Record, VerbGroup, rendered, verbose_option
from patchkit.cli.wheel.build_options import house_option
from patchkit.cli.wheel.override import command as override_command
from patchkit.cli.wheel.override import override_lines
from patchkit.patching.recipe import load_recipe
from patchkit.wheel.wheelhouse.contents import load_manifest
from patchkit.wheel.wheelhouse.fill import Filled, fill_wheelhouse, node_of
from patchkit.wheel.wheelhouse.manifest import REQUIREMENTS, Kind, ManifestEntry
from patchkit.wheel.wheelhouse.prune import prune_wheelhouse
from patchkit.wheel.wheelhouse.resolve import NodePlatform, WheelSources


@click.group(cls=VerbGroup)
def command() -> None:
    """Keep finished wheels with a manifest, hashes, and locked requirements."""


command.add_command(override_command)


@command.command("list")
@house_option
@verbose_option
@rendered
def list_wheels(house: Path, *, verbose: bool) -> Iterator[Block]:
    """List the wheels that were made here; -v also what fill brought."""
    listed = load_manifest(house)
    wheels = listed.wheels
    overrides = [override.fields() for override in listed.overrides]
    entries = [entry.fields() for entry in wheels]
    yield Record({"dir": house, "overrides": overrides, "wheels": entries})
    made = [entry for entry in wheels if entry.kind is Kind.BUILT]
    others = [entry for entry in wheels if entry.kind is not Kind.BUILT]
    heads = ("project", "version", "kind", "target", "MB", "tag", "sha256")
    if shown := [*made, *others] if verbose else made:
        yield from table(map(_wheel_cells, shown), heads=heads)
    if others:
        size = f"{sum(entry.size for entry in others) / 1e6:,.0f} MB"
        hint = "" if verbose else "; -v lists them"
        yield f"{len(made)} made here, {len(others)} dependencies, {size}{hint}"
    yield from override_lines(listed.overrides)
    if not wheels:
        yield f"{house} holds no wheels"
        yield next_step(*program(), "repack", f"vllm=={load_recipe().newest}", "--dir", house)
    elif not others:
        yield next_step(*program(), "wheelhouse", "fill", "--dir", house)
    elif all(entry.kind is not Kind.LOCKED for entry in others):
        yield _serving_step(house)


def _serving_step(house: Path) -> LaidOut:
    """Return the line that offers a whole wheelhouse to nodes, which take it by `--find-links`."""
    words = ("-m", "http.server", "--bind", "127.0.0.1", "--directory", house, "8000")
    return next_step("python3", *words, where="to offer them to every node")


def _wheel_cells(entry: ManifestEntry) -> tuple[str, ...]:
    name, facts = entry.name, entry.facts
    kind = "repacked" if facts.get("made") == "repack" else str(entry.kind)
    megabytes = f"{entry.size / 1e6:.1f}" if entry.held else "-"
    target = str(facts.get("target", "-"))
    project = style(name.project, bold=entry.kind is Kind.BUILT or None)
    return project, str(name.version), kind, target, megabytes, name.tag, entry.sha256[:12]


@command.command("prune")
@house_option
@click.option(
    "--drop",
    multiple=True,
    metavar="NAME",
    help="Also remove a listed wheel: its file name, project, or project==version.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option("--force", is_flag=True, help="Set a damaged journal aside.")
@rendered
def prune_wheels(
    house: Path, *, drop: tuple[str, ...], dry_run: bool, force: bool
) -> Iterator[Block]:
    """Remove what the manifest does not list and what interrupted runs left."""
    done = prune_wheelhouse(house, drop=drop, dry_run=dry_run, force=force)
    yield Record({"dir": house, "dry_run": dry_run, "changes": done})
    for file in done:
        yield style(file.filename, bold=True) + f": {file.reason}"
    if not done:
        yield f"{house}: nothing to remove"
    elif dry_run:
        yield "nothing was changed"


@command.command("fill")
@house_option
@click.option(
    "--python-version",
    "python",
    cls=Renamed,
    former=["--python"],
    metavar="X.Y",
    help="Python of the nodes.  [default: that of the target]",
)
@click.option(
    "--with",
    "also",
    multiple=True,
    metavar="REQUIREMENT",
    help='A further requirement, such as "ray==2.5".',
)
@click.option(
    "--find-links",
    "folders",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A further folder of wheels to choose from.",
)
@click.option("--offline", is_flag=True, help="Use only --find-links and the wheelhouse itself.")
@click.option("--lock-only", is_flag=True, help="Lock only; the nodes download.")
@verbose_option
@rendered
def fill_wheels(
    house: Path,
    *,
    python: str | None,
    also: tuple[str, ...],
    folders: tuple[Path, ...],
    offline: bool,
    lock_only: bool,
    verbose: bool,
) -> Iterator[Block]:
    """Lock everything that the wheels need by hash, so that every node installs the same.

    uv resolves it for the nodes' machine, from the index that pip is configured for. A torch for
    CPUs alone is refused. Nothing changes until everything is there; the next run resumes an
    interrupted one.
    """
    node = node_of(house, python)
    with progress() as report:
        done = fill_wheelhouse(
            house,
            node,
            WheelSources(offline=offline, folders=folders),
            also=also,
            lock_only=lock_only,
            progress=report("downloading"),
            tell=tell,
        )
    yield from _filled_blocks(done, house, node, lock_only=lock_only, verbose=verbose)
    if not lock_only:
        yield _serving_step(house)


def _filled_blocks(
    done: Filled, house: Path, node: NodePlatform, *, lock_only: bool, verbose: bool
) -> Iterator[Block]:
    """Yield what a fill brought, for which nodes, and the command that installs it."""
    overrides = done.manifest.overrides
    dependencies = [entry.fields() for entry in done.dependencies]
    taken = [override.fields() for override in overrides]
    brought = {"new": done.new, "gone": done.gone, "torch": done.torch}
    fields = {**asdict(node), "dependencies": dependencies, "overrides": taken, **brought}
    yield Record({"dir": house, **fields})
    if verbose:
        yield from (style("+ ", fg="green") + name for name in done.new)
        yield from (style("- ", fg="red") + name for name in done.gone)
    what = "locked" if lock_only else "there and locked"
    size = sum(entry.size for entry in done.dependencies) / 1e6
    changed = f"{len(done.new)} new, {len(done.gone)} gone{'' if verbose else '; -v lists them'}"
    yield f"{len(done.dependencies)} dependencies {what}, {size:,.0f} MB, for {node}: {changed}"
    if done.torch:
        cuda = f"CUDA {done.torch.cuda}" if done.torch.cuda else "CUDA"
        yield f"torch {done.torch.version}: {cuda}, as {done.torch.seen}"
    yield from override_lines(overrides)
    here = node.machine == platform.machine()
    words = ["--find-links", str(house), "--require-hashes", "-r", str(house / REQUIREMENTS)]
    yield next_step(
        *(pip() if here else ["pip"]),
        *("install", *done.manifest.install_options, *words),
        where="" if here else f"on a node, {node.machine}",
    )
