"""Compare archs, stock beside patched: `patchkit archs`."""

from __future__ import annotations

import re

import click
from rich.table import Table

from patchkit.apply import plan_for
from patchkit.cli import show
from patchkit.cli.options import (
    Selection,
    SourceOptions,
    as_json,
    opened,
    request_options,
    vllm_options,
)
from patchkit.cli.out import print_json
from patchkit.errors import UsageError
from patchkit.recipes.vllm.archs import Group, evaluate
from patchkit.target import Load, Target, best_load

STYLES = {
    Load.EXACT: "green",
    Load.FAMILY: "green",
    Load.COMPATIBLE: "cyan",
    Load.JIT: "yellow",
    Load.NONE: "dim",
}


@click.command()
@vllm_options
@request_options
@click.option("--arch-list", help="TORCH_CUDA_ARCH_LIST, or Auto.  [default: the target's]")
@click.option("--cuda", help="Version of the CUDA compiler.  [default: the target's, 13.0]")
@as_json
def command(
    source: SourceOptions,
    *,
    selection: Selection,
    arch_list: str | None,
    cuda: str | None,
    as_json: bool,
) -> None:
    """Compare which kernel group is built for which archs, stock beside patched.

    The release's own CMake decides; no compiler, torch or GPU is needed. The last column says how
    the patched group reaches the device: exact, family, compatible, jit (from PTX), or none.
    """
    with opened(source) as (recipe, workspace):
        request = selection.request(workspace.ledger)
        if workspace.tree.kind == "installed":
            raise UsageError(f"{source.spec} is installed: its kernels are compiled already")
        target = request.target
        wanted = arch_list or request.arch_list
        target.check_arch_list(wanted)
        plan = plan_for(workspace, recipe, request)
        version = _cuda(cuda or target.cuda)
        stock = evaluate(plan.stock, target, wanted, version)
        patched = evaluate(plan.patched, target, wanted, version)
        if as_json:
            rows = [_fields(a, b, target) for a, b in zip(stock, patched, strict=True)]
            fields = {"torch_cuda_arch_list": wanted, "cuda": version, "groups": rows}
            print_json({**show.tree_fields(workspace, request), **fields})
            return
        console = show.console()
        console.print(show.header(workspace, request))
        console.print(f"TORCH_CUDA_ARCH_LIST={wanted}, CUDA {version}")
        console.print(_table(stock, patched, target))


def _cuda(version: str) -> str:
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?", version):
        raise UsageError(
            f"{version!r} is not a version of the CUDA compiler", hint="for example --cuda 13.0"
        )
    return version


def _table(stock: list[Group], patched: list[Group], target: Target) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("kernel group", overflow="fold")
    table.add_column("switches on", style="dim", overflow="fold")
    table.add_column("where", style="dim", no_wrap=True)
    for column in ("stock", "patched", "loads"):
        table.add_column(column, no_wrap=True)
    for old, new in zip(stock, patched, strict=True):
        load = best_load(new.archs, target.capability)
        style = STYLES[load]
        table.add_row(
            show.text(new.name, style="" if new.archs else "dim"),
            " ".join(new.switches),
            new.where,
            show.text(_list(old), style="dim"),
            show.text(_list(new), style=style),
            show.text(str(load), style=style),
        )
    return table


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
