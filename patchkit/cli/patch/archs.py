"""Compare archs, stock beside patched: `patchkit archs`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import click

from patchkit.apply import plan_for
from patchkit.cli.options import Selection, opened, request_options, vllm_options
from patchkit.cli.out import style, table
from patchkit.cli.patch.verdict_view import tree_blocks
from patchkit.cli.render import LOAD_STYLES, Block, rendered, verbose_option
from patchkit.errors import UsageError
from patchkit.recipes.vllm.archs import evaluate
from patchkit.source.resolve import SourceOptions
from patchkit.target import best_load


@click.command()
@vllm_options
@request_options
@click.option("--arch-list", help="TORCH_CUDA_ARCH_LIST, or Auto.  [default: the target's]")
@verbose_option
@rendered
def command(
    source: SourceOptions, *, selection: Selection, arch_list: str | None, verbose: bool
) -> Iterator[Block]:
    """Compare which kernel group is built for which archs, stock beside patched.

    The release's own CMake decides; no compiler, torch or GPU is needed. The first column says how
    the patched group reaches the device: exact, family, compatible, jit (from PTX), or none; -v
    adds where a group stands and what it switches on.
    """
    with opened(source) as (recipe, workspace):
        request = selection.request(workspace.ledger)
        if workspace.tree.kind == "installed":
            raise UsageError(f"{source.spec} is installed: its kernels are compiled already")
        target = request.target
        archs = arch_list or request.arch_list
        target.check_arch_list(archs)
        plan = plan_for(workspace, recipe, request)
        trees = (evaluate(tree, target, archs, target.cuda) for tree in (plan.stock, plan.patched))
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
        counted = ", ".join(f"{counts[load]} {load}" for load in sorted(counts, reverse=True))
        changed = sum(old.archs != new.archs for old, new in pairs)
        yield f"{len(pairs)} groups on {target.title}: {counted}; {changed} differ from stock"
