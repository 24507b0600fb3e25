"""Print what one library holds, and return the same as JSON fields."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from patchkit.cli.out import Shown, echo, say, style, table
from patchkit.cli.patch.archs import STYLES
from patchkit.target import Load, Target
from patchkit.wheel.device.inspect import LIVE, RELOCATABLE, Binary, reach
from patchkit.wheel.device.wheel_checks import cuda_majors

_RULES = {
    Load.EXACT: "code for this very device",
    Load.FAMILY: "by NVIDIA's rule, family code loads on later devices of the family",
    Load.COMPATIBLE: "by NVIDIA's rule, machine code loads on devices of the same major and a "
    "later minor capability",
    Load.JIT: "PTX only, compiled on the device at first use",
}
# The same module is in a wheel once for each Python.
_PYTHON = re.compile(r"\.cpython-3(\d+)-")
_FAMILIES = ("GLIBC", "GLIBCXX", "CXXABI")


def for_any_python(name: str) -> str:
    """Return the name that a module has in common with the same one for other Pythons."""
    return _PYTHON.sub(".cpython-3*-", name)


def print_library(binary: Binary, target: Target) -> None:
    """Print everything about one library."""
    say(style(binary.name, bold=True) + f"  {binary.size:,} bytes")
    echo(table(((style(label, dim=True), value) for label, value in _facts(binary)), indent="  "))
    if binary.codes:
        echo(_code_rows(binary, target))
    say(style(f"  {conclusion(binary, target)}", **STYLES[binary.load(target)]))


def conclusion(binary: Binary, target: Target) -> str:
    """Return one sentence: how the binary's code reaches the device."""
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
        sentence += f"; of {loads.total()} fat binaries, {parts(loads)}"
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


def _code_rows(binary: Binary, target: Target) -> Sequence[Shown]:
    rows = []
    for code in binary.codes:
        load = reach(code.kind, code.arch, target)
        live = code.section == LIVE
        rows.append(
            (
                style(code.section, dim=None if live else True),
                code.kind,
                code.name,
                style(code.compression, dim=True),
                str(code.count),
                f"{code.size:,}",
                # In parentheses: no device loads code that was not linked.
                style(str(load), **STYLES[load]) if live else style(f"({load})", dim=True),
            )
        )
    heads = ("section", "kind", "arch", "compressed", "count", "bytes", "loads")
    return table(rows, heads=heads)


def binary_fields(binary: Binary, target: Target) -> dict[str, Any]:
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
        "cuda": list(cuda_majors(binary)),
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


def parts(loads: Counter[Load]) -> str:
    """Return ``33 family, 19 none``, best first."""
    return ", ".join(f"{loads[each]} {each}" for each in sorted(loads, reverse=True))
