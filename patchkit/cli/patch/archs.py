"""Compare archs, stock beside patched: `patchkit archs`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from patchkit.apply import plan_for
from patchkit.cli.options import Selection, SourceOptions, opened, request_options, vllm_options
from patchkit.cli.out import Shown, style, table
from patchkit.cli.patch.verdict_view import tree_blocks
from patchkit.cli.render import Block, rendered, verbose_option
from patchkit.errors import UsageError
from patchkit.recipes.vllm.archs import Group, evaluate
from patchkit.target import Load, Target, best_load

LOAD_STYLES: Mapping[Load, Mapping[str, Any]] = {
    Load.EXACT: {"fg": "green"},
    Load.FAMILY: {"fg": "green"},
    Load.COMPATIBLE: {"fg": "cyan"},
    Load.JIT: {"fg": "yellow"},
    Load.NONE: {"dim": True},
}


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
        stock = evaluate(plan.stock, target, archs, target.cuda)
        patched = evaluate(plan.patched, target, archs, target.cuda)
        yield from tree_blocks(
            workspace,
            request,
            torch_cuda_arch_list=archs,
            cuda=target.cuda,
            groups=[_group_fields(*pair, target) for pair in zip(stock, patched, strict=True)],
        )
        yield f"TORCH_CUDA_ARCH_LIST={archs}, CUDA {target.cuda}"
        yield from _group_rows(stock, patched, target, verbose=verbose)
        loads = Counter(best_load(group.archs, target.capability) for group in patched)
        counted = ", ".join(f"{loads[load]} {load}" for load in sorted(loads, reverse=True))
        changed = sum(old.archs != new.archs for old, new in zip(stock, patched, strict=True))
        yield f"{len(patched)} groups on {target.title}: {counted}; {changed} differ from stock"


def _group_rows(
    stock: list[Group], patched: list[Group], target: Target, *, verbose: bool
) -> Sequence[Shown]:
    heads = ("loads", "patched", "stock", "kernel group", "where", "switches on")
    rows = []
    for old, new in zip(stock, patched, strict=True):
        load = best_load(new.archs, target.capability)
        row = (
            style(str(load), **LOAD_STYLES[load]),
            style(";".join(new.archs) or "-", **LOAD_STYLES[load]),
            style(";".join(old.archs) or "-", dim=True),
            style(new.name, dim=None if new.archs else True),
            style(new.where, dim=True),
            " ".join(new.switches),
        )
        rows.append(row if verbose else row[:4])
    return table(rows, heads=heads if verbose else heads[:4])


def _group_fields(stock: Group, patched: Group, target: Target) -> dict[str, object]:
    return {
        "group": patched.name,
        "where": patched.where,
        "variable": patched.variable,
        "switches": patched.switches,
        "stock": stock.archs,
        "patched": patched.archs,
        "loads": str(best_load(patched.archs, target.capability)),
    }
