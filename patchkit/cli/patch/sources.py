"""Diff, fetch, revert, compare archs: the small verbs about sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import click

from patchkit.apply import plan_for, revert
from patchkit.cli import complete
from patchkit.cli.options import (
    Selection,
    folder_options,
    offline_option,
    opened,
    request_options,
    source_options,
    vllm_options,
)
from patchkit.cli.out import next_step, program, style, table, tell
from patchkit.cli.patch.verdict_view import diff_blocks, tree_blocks
from patchkit.cli.progress import progress
from patchkit.cli.render import (
    LOAD_STYLES,
    Block,
    Data,
    Record,
    rendered,
    verbose_option,
)
from patchkit.errors import UsageError
from patchkit.patching.forced_revert import revert_by_force
from patchkit.patching.recipe import load_recipe
from patchkit.recipes.vllm.archs import evaluate
from patchkit.source.detect import detect
from patchkit.source.resolve import SourceOptions, fetch_release, patched_tree
from patchkit.target import best_load


@click.command("diff")
@source_options
@request_options
@rendered
def diff_command(source: SourceOptions, *, selection: Selection) -> Iterator[Block]:
    """Show what apply would change, or did: a unified diff that git apply takes."""
    with opened(source, selection.patches) as (recipe, workspace):
        plan = plan_for(workspace, recipe, selection.request(workspace.ledger))
        tree, text = workspace.tree, plan.diff()
        release = {"project": tree.project, "version": tree.version}
        yield Record({**release, "files": [*plan.texts], "diff": text})
        yield from diff_blocks(text)


@click.command("fetch")
@click.argument(
    "release", metavar="RELEASE", shell_complete=complete.sources("vllm", "nccl")
)
@offline_option
@rendered
def fetch_command(release: str, *, offline: bool) -> Iterator[Block]:
    """Download a release: vLLM's sdist from the package index that pip is configured for, NCCL's
    sources from upstream's repository.

    It is verified against what patchkit ships and kept in a cache; prints where it is.
    """
    project = "nccl" if release.lower().startswith("nccl==") else "vllm"
    with progress() as report:
        source = SourceOptions(project, release, offline=offline)
        path = fetch_release(source, load_recipe(project).check, report)
    yield Record({"path": path})
    yield Data(f"{path}\n")
    tell(next_step(*program(), "apply", release))


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


@click.command("archs")
@vllm_options
@request_options
@verbose_option
@rendered
def archs_command(
    source: SourceOptions, *, selection: Selection, verbose: bool
) -> Iterator[Block]:
    """Compare which kernel group is built for which archs, stock beside patched.

    The release's own CMake decides; no compiler, torch or GPU is needed. The first column says how
    the patched group reaches the device: exact, family, compatible, jit (from PTX), or none; -v
    adds where a group stands and what it switches on.
    """
    with opened(source, selection.patches) as (recipe, workspace):
        request = selection.request(workspace.ledger)
        if workspace.tree.kind == "installed":
            raise UsageError(
                f"{source.spec} is installed: its kernels are compiled already"
            )
        target = request.target
        archs = request.arch_list
        plan = plan_for(workspace, recipe, request)
        trees = (
            evaluate(tree, target, archs, target.cuda)
            for tree in (plan.stock, plan.patched)
        )
        pairs = list(zip(*trees, strict=True))
        loads = [best_load(new.archs, target.capability) for _old, new in pairs]
        fields = [
            {
                "group": new.name,
                "where": new.where,
                "variable": new.variable,
                "switches": new.switches,
                "stock": old.archs,
                "patched": new.archs,
                "loads": str(load),
            }
            for (old, new), load in zip(pairs, loads, strict=True)
        ]
        given = {"torch_cuda_arch_list": archs, "cuda": target.cuda}
        yield from tree_blocks(workspace, request, **given, groups=fields)
        yield f"TORCH_CUDA_ARCH_LIST={archs}, CUDA {target.cuda}"
        heads = ("loads", "patched", "stock", "kernel group", "where", "switches on")
        rows = [
            (
                style(str(load), **LOAD_STYLES[load]),
                style(";".join(new.archs) or "-", **LOAD_STYLES[load]),
                style(";".join(old.archs) or "-", dim=True),
                style(new.name, dim=None if new.archs else True),
                style(new.where, dim=True),
                " ".join(new.switches),
            )[: None if verbose else 4]
            for (old, new), load in zip(pairs, loads, strict=True)
        ]
        yield from table(rows, heads=heads if verbose else heads[:4])
        counts = Counter(loads)
        counted = ", ".join(
            f"{counts[load]} {load}" for load in sorted(counts, reverse=True)
        )
        changed = sum(old.archs != new.archs for old, new in pairs)
        yield f"{len(pairs)} groups on {target.title}: {counted}; {changed} differ from stock"
