"""Check a wheel by itself: its name, and its libraries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from packaging.version import Version

from patchkit.elf import by_version
from patchkit.errors import ProofError, SourceError
from patchkit.finding import Finding, finding
from patchkit.target import Target
from patchkit.wheel.device.inspect import Binary
from patchkit.wheel.device.libraries import Judged, from_source
from patchkit.wheel.file.library_rules import library_rules
from patchkit.wheel.file.metadata import WheelMetadata

_FAMILIES = ("GLIBC", "GLIBCXX", "CXXABI")


def floor(binaries: Sequence[Binary]) -> dict[str, str]:
    """Return the highest symbol version of each family that any of them needs, ``GLIBC_2.34``."""
    highest = {
        family: max(
            (binary.library.highest(family) for binary in binaries), key=by_version, default=""
        )
        for family in _FAMILIES
    }
    return {family: version for family, version in highest.items() if version}


# ld.so(8): the loader puts the library's own folder in its place.
_ORIGIN = ("$ORIGIN", "${ORIGIN}")


def check_wheel(metadata: WheelMetadata, binaries: Sequence[Binary]) -> Iterator[Finding]:
    """Find everything that is wrong with one wheel, from what was read of it."""
    filename, rules = metadata.name.filename, library_rules()
    for fault in metadata.faults:
        yield finding(SourceError, filename, fault, "build it again")
    glibc, majors = rules.promised_glibc(metadata.name.tag), dict[int, list[str]]()
    for binary in binaries:
        yield from _check_library(binary, glibc)
        for major in binary.cuda:
            majors.setdefault(major, []).append(binary.name)
    for member in metadata.members:
        if shared := rules.foreign(metadata.name.project, member):
            owners = [owner.replace("nvidia-*", "NVIDIA's wheels") for owner in shared.owners]
            yield finding(
                SourceError,
                member,
                f"is a private copy of a library of {' or '.join(owners) or 'the driver'}",
                "leave it out (auditwheel repair --exclude), and let the loader find the one copy",
                "a process with two of them has two CUDA contexts, or crashes",
            )
    if len(majors) > 1:
        yield finding(
            SourceError,
            filename,
            f"its libraries need {len(majors)} versions of CUDA",
            "build all of it with one toolkit",
            "; ".join(f"CUDA {major}: {', '.join(names)}" for major, names in majors.items()),
        )


def _check_library(binary: Binary, glibc: str) -> Iterator[Finding]:
    """Find what it takes from the machine that built it, and a newer system than ``glibc``'s."""
    library = binary.library
    for label, folders in (("RPATH", library.rpath), ("RUNPATH", library.runpath)):
        for folder in folders:
            if not folder.startswith(_ORIGIN):
                yield finding(
                    SourceError,
                    binary.name,
                    f"{label} {folder} is a folder of the machine that built it",
                    "link without it, or take it out with patchelf",
                    "libraries are taken from there if somebody has such a folder",
                )
    allowed = library_rules().allowed(glibc) if glibc else {}
    for family, limit in allowed.items():
        needed = library.highest(family)
        if by_version(needed) > by_version(f"{family}_{limit}"):
            yield finding(
                SourceError,
                binary.name,
                f"needs {needed}, the name of the wheel promises {glibc} to be enough",
                "give the wheel the tag that auditwheel shows for it",
                "pip installs it where it cannot be loaded",
            )


def missed(
    version: Version, judged: Sequence[Judged], target: Target, filename: str = ""
) -> Iterator[Finding]:
    """Find libraries of vLLM that the device lacks, and say what that costs."""
    for library in judged:
        if library.missed:
            yield finding(
                ProofError,
                filename or library.name,
                f"{library.name} {library.phrase}" if filename else library.phrase,
                from_source(version, target),
                "vLLM cannot do without it" if library.fatal else "vLLM does without it",
            )
