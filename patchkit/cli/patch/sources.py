"""Diff, write as a series, fetch and revert: the small verbs about source trees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from patchkit.apply import plan_for, revert
from patchkit.cli import complete
from patchkit.cli.next_step import next_step, program
from patchkit.cli.options import (
    Selection,
    folder_options,
    offline_option,
    opened,
    request_options,
    source_options,
)
from patchkit.cli.out import PATH, tell
from patchkit.cli.patch.verdict_view import diff_blocks
from patchkit.cli.progress import progress
from patchkit.cli.render import Block, Data, Record, rendered
from patchkit.errors import UsageError, translated
from patchkit.patching.forced_revert import revert_by_force
from patchkit.patching.recipe import load_recipe
from patchkit.patching.series import patch_series
from patchkit.source.archive import unpack
from patchkit.source.detect import detect
from patchkit.source.resolve import SourceOptions, fetch_release, patched_tree


@click.command("diff")
@source_options
@request_options
@rendered
def diff_command(source: SourceOptions, *, selection: Selection) -> Iterator[Block]:
    """Show what apply would change, or did: a unified diff that git apply takes."""
    with opened(source) as (recipe, workspace):
        plan = plan_for(workspace, recipe, selection.request(workspace.ledger))
        tree, text = workspace.tree, plan.diff()
        release = {"project": tree.project, "version": tree.version}
        yield Record({**release, "files": [*plan.texts], "diff": text})
        yield from diff_blocks(text)


@click.command("series")
@source_options
@request_options
@click.option("-o", "--output", required=True, type=PATH, help="Folder of the series.")
@rendered
def series_command(source: SourceOptions, *, selection: Selection, output: Path) -> Iterator[Block]:
    """Write the fixes as a series that git am takes: a patch per fix, with reasons and evidence."""
    with opened(source) as (recipe, workspace):
        mails = patch_series(plan_for(workspace, recipe, selection.request(workspace.ledger)))
    with translated(at=output):
        output.mkdir(parents=True, exist_ok=True)
        # `git am *.patch` would take it along.
        if stale := sorted(p.name for p in output.glob("*.patch") if p.name not in mails):
            what = f"{output}: holds {stale[0]}, which is not of this series"
            raise UsageError(what, hint="name an empty folder")
        for name, mail in mails.items():
            (output / name).write_text(mail, encoding="utf-8")
    paths = [output / name for name in mails]
    yield Record({"patches": paths})
    yield Data("".join(f"{path}\n" for path in paths))


@click.command("fetch")
@click.argument(
    "release", metavar="vllm==X.Y.Z|nccl==X.Y.Z", shell_complete=complete.sources("vllm", "nccl")
)
@click.option("--dest", type=PATH, help="Unpack it there.")
@offline_option
@rendered
def fetch_command(release: str, dest: Path | None, *, offline: bool) -> Iterator[Block]:
    """Download a release: vLLM's sdist from the package index that pip is configured for, NCCL's
    sources from upstream's repository.

    It is verified against what patchkit ships and kept in a cache; prints where it is.
    """
    project = "nccl" if release.lower().startswith("nccl==") else "vllm"
    with progress() as report:
        source = SourceOptions(project, release, offline=offline)
        path = fetch_release(source, load_recipe(project).check, report)
        if dest is not None:
            path = unpack(path, dest, progress=report("Unpacking"))
    yield Record({"path": path})
    yield Data(f"{path}\n")
    tell(next_step(*program(), "apply", release if dest is None else dest))


@click.command("revert")
@folder_options
@click.option(
    "--force",
    is_flag=True,
    help="Put the originals back though files were edited, or what patchkit keeps is damaged; "
    "what is in the way is moved aside.",
)
@rendered
def revert_command(source: SourceOptions, *, force: bool) -> Iterator[Block]:
    """Put back what upstream shipped, byte by byte.

    SOURCE is the folder, or the release that `apply` unpacked and patched below build/. Refuses,
    and names the file, if a patched file was edited since.
    """
    path = patched_tree(source.spec, source.project)
    if not force:
        restored = revert(path, source.project)
        yield Record({"restored": restored})
        done = f"{len(restored)} files are as upstream shipped them"
        yield done if restored else "nothing to do: patchkit has changed nothing here"
        return
    rescued = revert_by_force(detect(path, source.project))
    yield Record(rescued)
    yield f"{len(rescued.restored)} files are as upstream shipped them"
    if rescued.moved:
        yield f"moved to {rescued.aside}: {', '.join(rescued.moved)}"
    if rescued.lost:
        yield f"not restored, as the original is damaged: {', '.join(rescued.lost)}"
    if not rescued.created:
        yield "no ledger says which files patchkit created: those stay where they are"
