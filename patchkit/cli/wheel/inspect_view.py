"""Show the contents of a library or a wheel, for `patchkit inspect FILE`."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from patchkit.cli.out import Shown, bold, dim, next_verb, record_fields, style, table
from patchkit.cli.render import (
    LOAD_STYLES,
    Blocks,
    Lines,
    Row,
    count_loads,
    fact_lines,
    finding_blocks,
    note,
)
from patchkit.digests import sha256_of
from patchkit.frozen import Fields, Values
from patchkit.target import Target
from patchkit.wheel.device.inspect import (
    LIVE,
    Binary,
    first_use_phrase,
    inspect_file,
    inspect_wheel,
)
from patchkit.wheel.device.libraries import (
    check_wheel,
    judge_libraries,
    missed,
    needed_versions,
)
from patchkit.wheel.file.library_rules import library_rules
from patchkit.wheel.file.wheelfile import (
    WheelFile,
    WheelMetadata,
    native_claim,
    read_metadata,
)
from patchkit.wheel.native.make import first_use_entries

_SHOWN_FACTS = ("made", "wheel", "version", "target", "machine", "cuda", "patchkit")


def inspected_blocks(file: Path, target: Target) -> Blocks:
    """Report what a library or a wheel holds for a device."""
    fields = {
        "file": file,
        "target": target.name,
        "wheel": None,
        "findings": [],
    }
    if file.suffix == ".whl":
        yield from _wheel_blocks(file, target, fields)
        return

    binary = inspect_file(file)
    sha256 = sha256_of(file)
    binary_fields = _binary_fields(binary, target) | {"sha256": sha256}
    yield fields | {"binaries": [binary_fields]}
    yield from _library_lines(binary, target, sha256)


def _wheel_blocks(file: Path, target: Target, fields: Fields) -> Blocks:
    with WheelFile(file) as wheel:
        binaries = inspect_wheel(wheel)
        metadata = read_metadata(wheel)
        judged = judge_libraries(binaries, target, wheel.name)

    findings = [
        *check_wheel(metadata, binaries),
        *missed(metadata.name, judged, target),
    ]
    uses = {library.name: library.use.value for library in judged}

    rows = [
        _binary_fields(binary, target) | {"use": uses.get(binary.name)}
        for binary in binaries
    ]
    versions = needed_versions(binaries)

    promised = library_rules().promised_glibc(metadata.name.tag)
    fields["wheel"] = {
        "project": metadata.name.project,
        "version": str(metadata.name.version),
        "tag": metadata.name.tag,
        **record_fields(metadata, "name", "members", "facts", "faults"),
        "pins": metadata.pins,
        "at_least": versions,
        "promised_glibc": promised or None,
        "facts": dict(metadata.facts) or None,
    }

    yield fields | {"binaries": rows, "findings": findings}

    yield bold(metadata.name)

    at_least = ", ".join(versions.values())
    if promised:
        at_least += f"; its name promises glibc {promised}"
    yield from fact_lines(_wheel_facts(metadata, at_least))

    yield ""
    if len(binaries) == 1:  # one library is shown whole; of many the table is enough
        yield from _library_lines(binaries[0], target)
    elif binaries:
        yield from _library_table(binaries, uses, target)
        loads = Counter(binary.load(target) for binary in binaries if binary.live)
        count = f"{loads.total()} libraries with device code"
        yield f"on {target.title}, of {count}: {count_loads(loads) or 'none'}"

    entries = first_use_entries(binaries, target)
    if entries:
        yield note(first_use_phrase(entries))
        yield next_verb("native", file, where="to see which")
    yield from finding_blocks(findings)


def _wheel_facts(metadata: WheelMetadata, at_least: str) -> Fields:
    """Return the facts of a wheel for people; ``at_least`` has the versions it needs."""
    facts = metadata.facts
    pins = metadata.decisive_pins.items()
    making = [f"{name} {facts[name]}" for name in _SHOWN_FACTS if facts.get(name)]
    return {
        "tag": metadata.name.tag,
        "Python": metadata.requires_python,
        "pins": [f"{name}=={version}" for name, version in pins],
        "at least": at_least,
        "SBOM": metadata.sboms,
        "patchkit": making or "did not make it",
        "fixes": facts.get("fixes"),
        "native": list(native_claim(facts, "assembled")),
    }


def _library_table(
    binaries: Sequence[Binary], uses: Values, target: Target
) -> Sequence[Shown]:
    """Return a row for each library."""
    heads = (
        "on the device",
        target.name,
        "CUDA",
        "MB",
        "library",
        "archs",
        "fat binaries",
    )
    rows = [
        (uses.get(binary.name, "-"), *_library_cells(binary, target))
        for binary in binaries
    ]

    # Uses are known for the libraries of some projects alone.
    begin = 0 if uses else 1
    return table([row[begin:] for row in rows], heads=heads[begin:])


def _library_cells(binary: Binary, target: Target) -> Row:
    load = binary.load(target)
    return (
        style(str(load), **LOAD_STYLES[str(load)]) if binary.live else "-",
        ", ".join(map(str, binary.cuda)) or "-",
        f"{binary.size / 1e6:.1f}",
        binary.name,
        dim(_live_archs(binary)),
        dim(count_loads(binary.loads(target))),
    )


def _live_archs(binary: Binary) -> str:
    """Return the names of a library's loadable code: ``121a`` (machine code), ``compute_90``."""
    live = [code.name for code in binary.codes if code.section == LIVE]
    names = [name.removeprefix("sm_") for name in dict.fromkeys(live)]
    return " ".join(names) or "-"


def _library_lines(binary: Binary, target: Target, sha256: str = "") -> Lines:
    """Yield everything about one library, and last how its code loads on the device."""
    yield bold(binary.name) + f"  {binary.size:,} bytes"
    facts = {
        **record_fields(binary.library, "sections", "needed"),
        "needs": binary.library.needed or "nothing",
        "at least": list(needed_versions([binary]).values()),
        "sha256": sha256,
    }
    yield from fact_lines(facts)

    rows = []
    for code in binary.codes:
        load = str(code.reach(target))
        # Code that was not linked stands in parentheses, since no device loads it.
        reach = load if code.section == LIVE else f"({load})"
        count = f"{code.count:,}"
        rows.append((code.section, code.name, code.compression, count, reach))
    heads = ("section", "arch", "compressed", "count", "loads")
    yield from table(rows, heads=heads)

    load = str(binary.load(target))
    counts = count_loads(binary.loads(target)) or "no live code"
    yield style(f"  on {target.title}: {load} ({counts})", **LOAD_STYLES[load])


def _binary_fields(binary: Binary, target: Target) -> Fields:
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
