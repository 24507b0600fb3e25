"""Print what `patchkit inspect FILE` finds: for people, and as JSON."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from patchkit.cli.out import Shown, next_step, program, record_fields, style, table
from patchkit.cli.render import (
    LOAD_STYLES,
    Block,
    Record,
    counted_noun,
    fact_lines,
    finding_blocks,
    lead_word,
)
from patchkit.digests import sha256_of
from patchkit.target import Load, Target
from patchkit.unreached import known_dispatch
from patchkit.wheel.device.first_use import first_use_phrase
from patchkit.wheel.device.inspect import (
    LIVE,
    RELOCATABLE,
    Binary,
    inspect_file,
    inspect_wheel,
)
from patchkit.wheel.device.libraries import (
    Judged,
    check_wheel,
    judge_libraries,
    missed,
    needed_versions,
)
from patchkit.wheel.file.library_rules import library_rules
from patchkit.wheel.file.metadata import read_metadata
from patchkit.wheel.file.wheelfile import WheelFile
from patchkit.wheel.native.listing import called_entries

_SHOWN_FACTS = ("made", "wheel", "version", "target", "machine", "cuda", "patchkit")
# The same module is in a wheel once for each Python.
_PYTHON = re.compile(r"\.cpython-3(\d+)-")


def inspected_blocks(file: Path, target: Target) -> Iterator[Block]:
    """Yield what a library or a wheel holds."""
    shared = {"file": file, "target": target.name, "wheel": None, "findings": []}
    if file.suffix != ".whl":
        (binary,) = inspect_file(file)
        fields = _binary_fields(binary, target) | {"sha256": sha256_of(file)}
        yield Record(shared | {"binaries": [fields]})
        yield from _library_lines(binary, target, fields["sha256"])
        return
    judged: tuple[Judged, ...] = ()
    with WheelFile(file) as wheel:
        binaries, metadata = inspect_wheel(wheel), read_metadata(wheel)
        # Only of vLLM's libraries is it known which ones a device needs.
        if wheel.name.project == "vllm":
            judged = judge_libraries(binaries, target, wheel.name.version)
    found = (
        *check_wheel(metadata, binaries),
        *missed(metadata.name.version, judged, target),
    )
    uses = {library.name: library.use.value for library in judged}
    shown = [
        _binary_fields(each, target) | {"use": uses.get(each.name)} for each in binaries
    ]
    promised = library_rules().promised_glibc(metadata.name.tag)
    told = {
        **record_fields(metadata.name, "filename", "cpus"),
        **record_fields(metadata, "name", "members", "facts", "faults"),
        "pins": metadata.pins,
        "at_least": needed_versions(binaries),
        "promised_glibc": promised or None,
        "facts": dict(metadata.facts) or None,
    }
    yield Record(shared | {"wheel": told, "binaries": shown, "findings": found})
    yield style(metadata.name.filename, bold=True)
    facts = metadata.facts
    lowest = ", ".join(needed_versions(binaries).values())
    made = [f"{name} {facts[name]}" for name in _SHOWN_FACTS if facts.get(name)]
    yield from fact_lines(
        {
            "tag": metadata.name.tag,
            "Python": metadata.requires_python,
            "pins": [
                f"{name}=={version}" for name, version in metadata.decisive_pins.items()
            ],
            "at least": lowest
            + (f"; its name promises glibc {promised}" if promised else ""),
            "SBOM": metadata.sboms,
            "patchkit": made or "did not make it",
            "fixes": facts.get("fixes"),
            "native": list(_native_facts(facts)),
        }
    )
    yield ""
    if len(binaries) == 1:  # one library is shown whole; of many the table is enough
        yield from _library_lines(binaries[0], target)
    else:
        yield from _library_rows(binaries, uses, target)
        code = Counter(binary.load(target) for binary in binaries if binary.live)
        loads = count_loads(code) or "none"
        yield f"on {target.title}, of {code.total()} libraries with device code: {loads}"
    dispatch = known_dispatch(metadata.name.project, metadata.name.version, target)
    calls = [called_entries(binary, target, dispatch) for binary in binaries]
    if entries := [entry for of_binary in calls for entry in of_binary]:
        yield lead_word("note") + first_use_phrase(entries)
        yield next_step(*program(), "native", file, where="to see which")
    yield from finding_blocks(found)


def _native_facts(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a wheel says of machine code that was put into it; its maker may be anybody."""
    native = facts.get("native")
    assembled = native.get("assembled") if isinstance(native, dict) else None
    for name, digests in assembled.items() if isinstance(assembled, dict) else ():
        if isinstance(digests, list):
            count = counted_noun(len(digests), "fat binary", "fat binaries")
            yield f"{name}: {count} assembled from its PTX"


def _library_rows(
    binaries: Sequence[Binary], uses: Mapping[str, str], target: Target
) -> Sequence[Shown]:
    """Return a row for each library; modules that differ in their Python alone are one row."""
    folders = [binary.name.rpartition("/")[0] for binary in binaries]
    common = os.path.commonpath(folders) if all(folders) else ""
    folder = f"{common}/" if common else ""
    alike: dict[object, list[Binary]] = {}
    for binary in binaries:
        key = (for_any_python(binary.name), binary.codes, binary.cuda)
        alike.setdefault(key, []).append(binary)
    rows = []
    for binary, *others in alike.values():
        name = binary.name.removeprefix(folder)
        load = binary.load(target)
        kinds: dict[str, list[str]] = {"sass": []}  # which comes first
        for code in (code for code in binary.codes if code.section == LIVE):
            kinds.setdefault(code.kind, []).append(code.arch.gencode)
        archs = {
            kind: " ".join(dict.fromkeys(its)) for kind, its in kinds.items() if its
        }
        live = [
            its if kind == "sass" else f"{kind.upper()} {its}"
            for kind, its in archs.items()
        ]
        rows.append(
            (
                uses.get(binary.name, "-"),
                style(str(load), **LOAD_STYLES[load]) if binary.live else "-",
                ", ".join(map(str, binary.cuda)) or "-",
                f"{binary.size * (1 + len(others)) / 1e6:.1f}",
                f"{for_any_python(name)} ({1 + len(others)})" if others else name,
                style(", ".join(live) or "-", dim=True),
                style(count_loads(binary.loads(target)), dim=True),
            )
        )
    library = f"in {folder}" if folder else "library"
    heads = (
        "on the device",
        target.name,
        "CUDA",
        "MB",
        library,
        "archs",
        "fat binaries",
    )
    # Of what a library is for, only those of vLLM are known.
    first = 0 if uses else 1
    return table((row[first:] for row in rows), heads=heads[first:])


def for_any_python(name: str) -> str:
    """Return the name that a module has in common with the same one for other Pythons."""
    return _PYTHON.sub(".cpython-3*-", name)


def _library_lines(binary: Binary, target: Target, sha256: str = "") -> Iterator[str]:
    """Yield everything about one library, and in a sentence how its code reaches the device."""
    library, loads, codes = binary.library, binary.loads(target), binary.codes
    yield style(binary.name, bold=True) + f"  {binary.size:,} bytes"
    facts = {
        **record_fields(library, "sections", "needed"),
        "needs": library.needed or "nothing",
        "at least": list(needed_versions([binary]).values()),
        "sha256": sha256,
    }
    yield from fact_lines(facts)
    reached = [(code, code.reach(target)) for code in codes]
    # In parentheses: no device loads code that was not linked.
    texts = (f"{load}" if it.section == LIVE else f"({load})" for it, load in reached)
    rows = [(it.section, it.name, it.compression, f"{it.count:,}") for it in codes]
    heads = ("section", "arch", "compressed", "count", "loads")
    yield from table(
        [(*row, it) for row, it in zip(rows, texts, strict=True)], heads=heads
    )
    load = binary.load(target)
    live = (it.name for it, its in reached if it.section == LIVE and its is load)
    names = ", ".join(dict.fromkeys(live))
    if not binary.live:
        unlinked = "only code that was not linked: no device can load it"
        sentence = f"holds {unlinked if binary.relocatable else 'no device code'}"
    elif binary.linked_anew(target):
        at_first_use = f"linked anew on the device at first use ({RELOCATABLE})"
        sentence = f"loads on {target.title}: jit, {at_first_use}"
    elif load is Load.NONE:
        sentence = f"does not load on {target.title}: it holds only {names}"
    else:
        sentence = f"loads on {target.title}: {load}, {names}"
        if len(loads) > 1:
            sentence += f"; of {loads.total()} fat binaries, {count_loads(loads)}"
    yield style(f"  {sentence}", **LOAD_STYLES[load])


def _binary_fields(binary: Binary, target: Target) -> dict[str, Any]:
    loads = binary.loads(target)
    return {
        **record_fields(binary, "library", "live", "relocatable"),
        **record_fields(binary.library, "sections"),
        "at_least": needed_versions([binary]),
        "loads": str(binary.load(target)),
        "fat_binaries": {
            str(load): loads[load] for load in sorted(loads, reverse=True)
        },
        "codes": [record_fields(code) | {"arch": code.name} for code in binary.codes],
    }


def count_loads(loads: Mapping[Load, int]) -> str:
    """Return ``33 family, 19 none``, best first."""
    return ", ".join(f"{loads[load]} {load}" for load in sorted(loads, reverse=True))
