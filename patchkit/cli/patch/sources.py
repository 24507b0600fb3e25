"""Diff, fetch, revert, compare archs: the small verbs about sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from patchkit.apply import plan_for, revert
from patchkit.cli.options import (
    Selection,
    folder_options,
    offline_option,
    opened,
    request_options,
    source_options,
    vllm_options,
)
from patchkit.cli.out import dim, next_verb, style, table, tell
from patchkit.cli.patch.verdict_view import diff_blocks, tree_blocks
from patchkit.cli.progress import progress
from patchkit.cli.render import (
    LOAD_STYLES,
    Blocks,
    Data,
    Fields,
    Record,
    Row,
    flag,
    rendered,
    verbose_option,
)
from patchkit.errors import UsageError
from patchkit.patching.forced_revert import revert_by_force
from patchkit.patching.recipe import load_recipe
from patchkit.recipes.vllm.archs import Group, evaluate
from patchkit.source.detect import detect
from patchkit.source.resolve import SourceOptions, fetch_release, patched_tree
from patchkit.target import Load, best_load


@click.command
@source_options
@request_options
@rendered
def diff_command(source: SourceOptions, *, selection: Selection) -> Blocks:
    """Show the changes that apply would make, or made, as a diff for git apply."""
    with opened(source, selection.patches) as (recipe, workspace):
        plan = plan_for(workspace, recipe, selection.request(workspace.ledger))
        diff = plan.diff()
        yield Record(
            {
                "project": workspace.tree.project,
                "version": workspace.tree.version,
                "files": [*plan.texts],
                "diff": diff,
            }
        )
        yield from diff_blocks(diff)


@click.command
@click.argument("release", metavar="RELEASE")
@offline_option
@rendered
def fetch_command(release: str, *, offline: bool) -> Blocks:
    """Download a release: vLLM's sdist from the package index that pip is configured for, NCCL's
    sources from upstream's repository.

    It is verified by the hash that patchkit has of it, and kept in a cache; prints its path.
    """
    project = "nccl" if release.lower().startswith("nccl==") else "vllm"
    with progress() as report:
        source = SourceOptions(project, release, offline=offline)
        path = fetch_release(source, load_recipe(project).check, report)

    yield Record({"path": path})
    yield Data(f"{path}\n")
    tell(next_verb("apply", release))


@click.command
@folder_options
@flag("--force", "Also revert edited or damaged files.")
@rendered
def revert_command(source: SourceOptions, *, force: bool) -> Blocks:
    """Put back what upstream shipped, byte by byte.

    SOURCE is the folder, or the release that `apply` unpacked and patched below build/. Refuses,
    and names the file, if a patched file was edited since.
    """
    path = patched_tree(source.spec, source.project)
    if force:
        yield from _forced_blocks(path, source.project)
        return

    restored = revert(path, source.project)
    yield Record({"restored": restored})
    if restored:
        yield f"{len(restored)} files are as upstream shipped them"
    else:
        yield "nothing to do: patchkit has changed nothing here"


def _forced_blocks(path: Path, project: str) -> Blocks:
    rescued = revert_by_force(detect(path, project))
    yield Record(rescued)

    yield f"{len(rescued.restored)} files are as upstream shipped them"
    if rescued.moved:
        yield f"moved to {rescued.aside}: {', '.join(rescued.moved)}"
    if rescued.lost:
        yield f"not restored, as the original is damaged: {', '.join(rescued.lost)}"
    if not rescued.created:
        yield "no ledger says which files patchkit created: those stay where they are"


@click.command
@vllm_options
@request_options
@verbose_option
@rendered
def archs_command(
    source: SourceOptions, *, selection: Selection, verbose: bool
) -> Blocks:
    """Compare which kernel group is built for which archs, stock beside patched.

    The release's own CMake decides; no compiler, torch or GPU is needed. The first column says how
    the patched group loads on the device: exact, family, compatible, jit (from PTX), or none; -v
    adds the place of each group in CMake, and the features that it switches on.
    """
    with opened(source, selection.patches) as (recipe, workspace):
        request = selection.request(workspace.ledger)
        if workspace.tree.kind == "installed":
            what = f"{source.spec} is installed: its kernels are compiled already"
            raise UsageError(what)

        target = request.target
        archs = request.arch_list
        plan = plan_for(workspace, recipe, request)
        stock = evaluate(plan.stock, target, archs, target.cuda)
        patched = evaluate(plan.patched, target, archs, target.cuda)
        groups = [
            _GroupChange(old, new, best_load(new.archs, target.capability))
            for old, new in zip(stock, patched, strict=True)
        ]

        settings = {"torch_cuda_arch_list": archs, "cuda": target.cuda}
        fields = list(map(_group_fields, groups))
        yield from tree_blocks(workspace, request, **settings, groups=fields)
        yield f"TORCH_CUDA_ARCH_LIST={archs}, CUDA {target.cuda}"

        heads = ("loads", "patched", "stock", "kernel group", "where", "switches on")
        columns = len(heads) if verbose else 4
        rows = [_group_row(group)[:columns] for group in groups]
        yield from table(rows, heads=heads[:columns])
        yield f"{len(groups)} groups on {target.title}: {_group_summary(groups)}"


@dataclass(frozen=True, slots=True)
class _GroupChange:
    """A kernel group, stock and patched, and how the patched one loads on the device."""

    stock: Group
    patched: Group
    load: Load


def _group_fields(group: _GroupChange) -> Fields:
    return {
        "group": group.patched.name,
        "where": group.patched.where,
        "variable": group.patched.variable,
        "switches": group.patched.switches,
        "stock": group.stock.archs,
        "patched": group.patched.archs,
        "loads": str(group.load),
    }


def _group_row(group: _GroupChange) -> Row:
    patched = group.patched
    styles = LOAD_STYLES[group.load]
    return (
        style(str(group.load), **styles),
        style(";".join(patched.archs) or "-", **styles),
        dim(";".join(group.stock.archs) or "-"),
        style(patched.name, dim=None if patched.archs else True),
        dim(patched.where),
        " ".join(patched.switches),
    )


def _group_summary(groups: Sequence[_GroupChange]) -> str:
    counts = Counter(group.load for group in groups)
    loads = ", ".join(f"{counts[load]} {load}" for load in sorted(counts, reverse=True))
    changed = sum(group.stock.archs != group.patched.archs for group in groups)
    return f"{loads}; {changed} differ from stock"
