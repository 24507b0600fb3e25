"""Compare archs, stock beside patched: `patchkit archs`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from patchkit.apply import plan_for
from patchkit.cli.options import Selection, SourceOptions, opened, request_options, vllm_options
from patchkit.cli.out import Shown, style, table
from patchkit.cli.patch.verdict_view import tree_fields, tree_header
from patchkit.cli.render import Block, Record, lead_word, record_table, rendered, verbose_option
from patchkit.errors import UsageError
from patchkit.recipes.vllm.archs import Group, evaluate
from patchkit.recipes.vllm.sources import counts, not_counted, planned_sources
from patchkit.target import Load, Target, best_load

STYLES: Mapping[Load, Mapping[str, Any]] = {
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
@click.option("--cuda", help="Version of the CUDA compiler.  [default: the target's, 13.0]")
@verbose_option
@rendered
def command(
    source: SourceOptions,
    *,
    selection: Selection,
    arch_list: str | None,
    cuda: str | None,
    verbose: bool,
) -> Iterator[Block]:
    """Compare which kernel group is built for which archs, stock beside patched.

    The release's own CMake decides; no compiler, torch or GPU is needed. The first column says how
    the patched group reaches the device: exact, family, compatible, jit (from PTX), or none; -v
    adds where a group stands and what it switches on.

    Then come the CUDA sources of each library that setup.py asks for: none counts those without
    code for the device, foreign those that have machine code for other devices as well.
    """
    with opened(source) as (recipe, workspace):
        request = selection.request(workspace.ledger)
        if workspace.tree.kind == "installed":
            raise UsageError(f"{source.spec} is installed: its kernels are compiled already")
        target = request.target
        archs = arch_list or request.arch_list
        target.check_arch_list(archs)
        plan = plan_for(workspace, recipe, request)
        version = _cuda(cuda or target.cuda)
        stock = evaluate(plan.stock, target, archs, version)
        patched = evaluate(plan.patched, target, archs, version)
        sources = planned_sources(plan.patched, target, archs, version)
        libraries = counts(sources, target)
        unknown = not_counted(plan.patched, sources, target)
        fields = {
            "torch_cuda_arch_list": archs,
            "cuda": version,
            "groups": [_fields(*pair, target) for pair in zip(stock, patched, strict=True)],
            "libraries": libraries,
            "not_counted": unknown,
        }
        yield Record({**tree_fields(workspace, request), **fields})
        yield tree_header(workspace, request)
        yield f"TORCH_CUDA_ARCH_LIST={archs}, CUDA {version}"
        yield from _rows(stock, patched, target, verbose=verbose)
        yield _summary(stock, patched, target)
        columns = ("library", "sources", "exact", "family", "ptx", "dead", "foreign")
        heads = ("library", "sources", "exact", "family", "jit", "none", "foreign")
        yield from record_table(libraries, *columns, heads=heads)
        for library in libraries:
            if library.in_vain:
                yield lead_word("warning") + f"{library.library} is compiled in vain"
        if unknown:
            yield f"not counted: {', '.join(unknown)}, whose sources another project's CMake names"


def _cuda(version: str) -> str:
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?", version):
        raise UsageError(
            f"{version!r} is not a version of the CUDA compiler", hint="for example --cuda 13.0"
        )
    return version


def _rows(
    stock: list[Group], patched: list[Group], target: Target, *, verbose: bool
) -> Sequence[Shown]:
    heads = ("loads", "patched", "stock", "kernel group")
    rows = []
    for old, new in zip(stock, patched, strict=True):
        load = best_load(new.archs, target.capability)
        row = (
            style(str(load), **STYLES[load]),
            style(_list(new), **STYLES[load]),
            style(_list(old), dim=True),
            style(new.name, dim=None if new.archs else True),
        )
        rows.append((*row, style(new.where, dim=True), " ".join(new.switches)))
    if not verbose:
        return table((row[:4] for row in rows), heads=heads)
    return table(rows, heads=(*heads, "where", "switches on"))


def _summary(stock: list[Group], patched: list[Group], target: Target) -> str:
    changed = sum(old.archs != new.archs for old, new in zip(stock, patched, strict=True))
    loads = Counter(best_load(each.archs, target.capability) for each in patched)
    counted = ", ".join(f"{loads[each]} {each}" for each in sorted(loads, reverse=True))
    return f"{len(patched)} groups on {target.title}: {counted}; {changed} differ from stock"


def _list(group: Group) -> str:
    return ";".join(group.archs) or "-"


def _fields(stock: Group, patched: Group, target: Target) -> dict[str, object]:
    return {
        "group": patched.name,
        "where": patched.where,
        "variable": patched.variable,
        "switches": list(patched.switches),
        "stock": list(stock.archs),
        "patched": list(patched.archs),
        "loads": str(best_load(patched.archs, target.capability)),
    }
