"""Repack upstream's wheel: `patchkit repack`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from patchkit.cli import show
from patchkit.cli.options import (
    NOT_SANDBOXED,
    Selection,
    as_json,
    may_run,
    progress,
    request_options,
    trust_source,
)
from patchkit.cli.out import print_json, tell
from patchkit.cli.patch.archs import STYLES
from patchkit.cli.wheel.build_options import cpu_option, house_option
from patchkit.patching.fix import State
from patchkit.patching.recipe import load_recipe
from patchkit.quoting import quoted
from patchkit.target import Load
from patchkit.wheel.device.libraries import Judged, Use
from patchkit.wheel.repack.repack import Repacked, repack
from patchkit.wheel.repack.upstream import find_wheel

_EPILOG = """\
\b
For a Spark, on any machine:
  patchkit repack vllm==0.25.1
The same for x86-64, for tests elsewhere:
  patchkit repack vllm==0.25.1 --cpu x86_64
A wheel of your own, vouched for:
  patchkit repack ./vllm-0.25.1-cp38-abi3-linux_aarch64.whl --sha256 <64 hex digits>
"""
_USES = {
    Use.LOADS: "green",
    Use.PARTLY: "yellow",
    Use.HOST: "dim",
    Use.JIT: "green",
    Use.OTHER: "dim",
    Use.LOST: "yellow",
    Use.ABSENT: "yellow",
    Use.UNKNOWN: "yellow",
}


@click.command(epilog=_EPILOG)
@click.argument("wheel", metavar="vllm==X.Y.Z|WHEEL")
@cpu_option("the target's", "--platform")
@request_options
@click.option("--sha256", metavar="HEX", help="SHA-256 of a wheel that the lock does not know.")
@click.option("--offline", is_flag=True, help="Use only what is in the cache.")
@trust_source
@house_option
@as_json
def command(
    wheel: str,
    cpu: str | None,
    selection: Selection,
    sha256: str | None,
    offline: bool,
    trusted: bool,
    house: Path,
    as_json: bool,
) -> None:
    """Repack upstream's wheel with the fixes that are Python or data, under a version of its own.

    Its kernels stay as they are; whether they load on the device is checked first. If they do not,
    nothing is written, and only a build from source helps.
    """
    began = time.monotonic()
    request = selection.request()
    if trusted:
        tell(NOT_SANDBOXED)
    with (
        progress() as report,
        find_wheel(
            wheel,
            cpu or request.target.cpu,
            sha256=sha256,
            offline=offline,
            report=report,
            check=load_recipe("vllm").check,
        ) as origin,
    ):
        done = repack(
            origin,
            request,
            house,
            report=report,
            offline=offline,
            say=tell,
            sandboxed=may_run(locked=origin.locked, trusted=trusted),
        )
    seconds = time.monotonic() - began
    if as_json:
        print_json(_fields(done, seconds))
    else:
        _show(done, selection, seconds)


def _show(done: Repacked, selection: Selection, seconds: float) -> None:
    console, target = show.console(), selection.request().target
    known = "upstream's" if done.source["upstream"] else "not upstream's"
    console.print(
        show.text(
            (f"vllm {done.version}", "bold"),
            f"  {done.source['file']} ({known})  →  {target.title}",
        ),
        soft_wrap=True,
    )
    console.print(_table(done.libraries))
    applied = [v for v in done.outcome.verdicts if v.state is State.APPLIED]
    for verdict in applied:
        line = show.text(("✓ ", "green"), (verdict.fix.id, "bold"), f"  {verdict.reason}")
        console.print(line, soft_wrap=True)
    for line in show.proof_lines(done.outcome.proofs):
        console.print(line, soft_wrap=True)
    for note in done.notes:
        console.print(show.text(("note ", "yellow"), note), soft_wrap=True)
    what = f"{done.wheel}  {done.size / 1e6:.1f} MB, {seconds:.0f} s"
    if done.fresh:
        console.print(show.text(("✓ ", "green"), what), soft_wrap=True)
    else:
        console.print(f"nothing to do, it is there already: {what}", soft_wrap=True)
    console.print(f"  next: {quoted('pip', 'install', done.wheel)}", soft_wrap=True)


def _table(libraries: tuple[Judged, ...]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("library", "fat binaries", ""):
        table.add_column(column, no_wrap=column != "")
    for library in libraries:
        idle = library.use in (Use.HOST, Use.OTHER)
        table.add_row(
            show.text(library.name.removeprefix("vllm/"), style="dim" if idle else ""),
            _loads(library),
            show.text(library.use.value, style=_USES[library.use]),
        )
    return table


def _loads(library: Judged) -> Text:
    counts = sorted(library.loads.items(), reverse=True)
    parts = [show.text(f"{count} {load}", style=STYLES[load]) for load, count in counts]
    return show.text(", ").join(parts) if parts else show.text("-", style="dim")


def _fields(done: Repacked, seconds: float) -> dict[str, Any]:
    return {
        "wheel": str(done.wheel),
        "sha256": done.sha256,
        "size": done.size,
        "fresh": done.fresh,
        "source": dict(done.source),
        "libraries": [_library(library) for library in done.libraries],
        "fixes": [show.verdict_fields(verdict) for verdict in done.outcome.verdicts],
        "proofs": list(done.outcome.proofs),
        "notes": list(done.notes),
        "facts": dict(done.facts),
        "seconds": round(seconds, 1),
    }


def _library(library: Judged) -> dict[str, Any]:
    return {
        "name": library.name,
        "use": library.use.value,
        "told": library.phrase,
        "required": bool(library.known and library.known.required),
        "fat_binaries": {str(load): library.loads[load] for load in sorted(Load, reverse=True)},
        "lost": dict(library.lost),
        "lost_kernels": dict(library.kernels),
    }
