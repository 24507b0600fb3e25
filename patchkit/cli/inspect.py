"""patchkit inspect"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from patchkit.cli import show
from patchkit.cli.archs import STYLES
from patchkit.cli.loaded import show_loaded
from patchkit.cli.options import as_json, find_target
from patchkit.errors import UsageError
from patchkit.target import Load, Target
from patchkit.wheel.inspect import LIVE, RELOCATABLE, Binary, inspect, reach

_RULES = {
    Load.EXACT: "code for this very device",
    Load.FAMILY: "by NVIDIA's rule, family code loads on later devices of the family",
    Load.COMPATIBLE: "by NVIDIA's rule, machine code loads on devices of the same major and a "
    "later minor capability",
    Load.JIT: "PTX only, compiled on the device at first use",
}
_FAMILIES = ("GLIBC", "GLIBCXX", "CXXABI")


@click.command()
@click.argument("file", metavar="[FILE]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--target", "name", default="gb10", show_default=True, metavar="gb10|thor|h200", help="Device."
)
@click.option("--loaded", is_flag=True, help="Which libnccl torch and vLLM would load, and why.")
@click.option(
    "--python",
    default=sys.executable,
    metavar="EXE",
    help="With --loaded: the Python that has torch.",
)
@as_json
def command(file: Path | None, *, name: str, loaded: bool, python: str, as_json: bool) -> None:
    """Which device code a shared library or a wheel holds, and how it loads on a device.

    exact, family, compatible, jit (from PTX) or none, as NVIDIA's rules say; no GPU and no toolkit
    is asked. A device runs live code (.nv_fatbin); __nv_relfatbin is what that was linked from.
    """
    if (file is None) != loaded:
        raise UsageError("name a FILE, or say --loaded", hint="patchkit inspect --help")
    if file is None:
        show_loaded(python, as_json=as_json)
        return
    target = find_target(name)
    binaries = inspect(file)
    if as_json:
        fields = [_fields(binary, target) for binary in binaries]
        show.print_json({"file": str(file), "target": target.name, "binaries": fields})
        return
    console = show.console()
    for binary in binaries:
        console.print(Text(binary.name, "bold") + Text(f"  {binary.size:,} bytes"))
        for label, value in _facts(binary):
            console.print(Text(f"  {label:9}", "dim") + Text(value), soft_wrap=True)
        if binary.codes:
            console.print(_table(binary, target))
        style = STYLES[binary.load(target)]
        console.print(Text(f"  {conclusion(binary, target)}", style), soft_wrap=True)


def conclusion(binary: Binary, target: Target) -> str:
    """One sentence: how the binary's code reaches the device."""
    if not binary.live:
        unlinked = "only code that was not linked: no device can load it"
        return f"holds {unlinked if binary.relocatable else 'no device code'}"
    loads = binary.loads(target)
    load = max(loads)
    live = (code for code in binary.codes if code.section == LIVE)
    names = ", ".join(dict.fromkeys(c.name for c in live if reach(c.kind, c.arch, target) is load))
    if binary.linked_anew(target):
        return (
            f"loads on {target.title}: jit, linked anew on the device at first use ({RELOCATABLE})"
        )
    if load is Load.NONE:
        return f"does not load on {target.title}: it holds only {names}"
    sentence = f"loads on {target.title}: {load}, {names}: {_RULES[load]}"
    if len(loads) > 1:
        parts = ", ".join(f"{loads[each]} {each}" for each in sorted(loads, reverse=True))
        sentence += f"; of {loads.total()} fat binaries, {parts}"
    return sentence


def _facts(binary: Binary) -> Iterator[tuple[str, str]]:
    library = binary.library
    yield "machine", library.machine
    if library.soname:
        yield "soname", library.soname
    yield "needs", ", ".join(library.needed) or "nothing"
    for label, folders in (("rpath", library.rpath), ("runpath", library.runpath)):
        if folders:
            yield label, ":".join(folders)
    if highest := list(filter(None, map(library.highest, _FAMILIES))):
        yield "at least", ", ".join(highest)
    if library.build_id:
        yield "build id", library.build_id
    yield "sha256", binary.sha256


def _table(binary: Binary, target: Target) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("section", "kind", "arch", "compressed", "count", "bytes", "loads"):
        table.add_column(column, justify="right" if column in ("count", "bytes") else "left")
    for code in binary.codes:
        load = reach(code.kind, code.arch, target)
        live = code.section == LIVE
        table.add_row(
            Text(code.section, "" if live else "dim"),
            code.kind,
            code.name,
            Text(code.compression, "dim"),
            str(code.count),
            f"{code.size:,}",
            Text(str(load) if live else f"({load})", STYLES[load] if live else "dim"),
        )
    return table


def _fields(binary: Binary, target: Target) -> dict[str, Any]:
    library = binary.library
    loads = binary.loads(target)
    return {
        "name": binary.name,
        "size": binary.size,
        "sha256": binary.sha256,
        "machine": library.machine,
        "soname": library.soname or None,
        "needed": list(library.needed),
        "rpath": list(library.rpath),
        "runpath": list(library.runpath),
        "versions": {needed: list(names) for needed, names in library.versions.items()},
        "highest": {family: library.highest(family) or None for family in _FAMILIES},
        "build_id": library.build_id or None,
        "loads": str(binary.load(target)),
        "fat_binaries": {str(load): loads[load] for load in sorted(loads, reverse=True)},
        "conclusion": conclusion(binary, target),
        "codes": [
            {
                "section": code.section,
                "live": code.section == LIVE,
                "kind": code.kind,
                "arch": code.name,
                "compression": code.compression,
                "count": code.count,
                "size": code.size,
                "loads": str(reach(code.kind, code.arch, target)),
            }
            for code in binary.codes
        ],
    }
