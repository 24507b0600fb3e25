"""Check a wheel by itself: its name, and its libraries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from packaging.tags import parse_tag
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


def promised_glibc(tag: str) -> str:
    """Return the oldest glibc that a tag names as enough; "" for ``linux_aarch64``."""
    said = {library_rules().glibc(part.platform) for part in parse_tag(tag)}
    return "" if not all(said) else min(said, key=by_version)


def too_new(metadata: WheelMetadata, binaries: Sequence[Binary]) -> Iterator[Finding]:
    """Find libraries that need a newer system than the wheel's name says."""
    if not (glibc := promised_glibc(metadata.name.tag)):
        return
    allowed = library_rules().allowed(glibc)
    for binary in binaries:
        for family, limit in allowed.items():
            needed = binary.library.highest(family)
            if by_version(needed) > by_version(f"{family}_{limit}"):
                yield finding(
                    SourceError,
                    binary.name,
                    f"needs {needed}, the name of the wheel promises {glibc} to be enough",
                    "give the wheel the tag that auditwheel shows for it",
                    "pip installs it where it cannot be loaded",
                )


# ld.so(8): the loader puts the library's own folder in its place.
_ORIGIN = ("$ORIGIN", "${ORIGIN}")


def check_wheel(metadata: WheelMetadata, binaries: Sequence[Binary]) -> tuple[Finding, ...]:
    """Find everything that is wrong with one wheel, from what was read of it."""
    name, again = metadata.name.filename, "build it again"
    return (
        *(finding(SourceError, name, fault, again) for fault in metadata.faults),
        *_find_build_folders(binaries),
        *_find_copies(metadata),
        *_find_mixed_cuda(metadata, binaries),
        *too_new(metadata, binaries),
    )


def cuda_majors(binary: Binary) -> tuple[int, ...]:
    """Return the major versions of CUDA whose libraries it asks the loader for."""
    return library_rules().cuda_majors(binary.library.needed)


def _find_build_folders(binaries: Sequence[Binary]) -> Iterator[Finding]:
    for binary in binaries:
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


def _find_copies(metadata: WheelMetadata) -> Iterator[Finding]:
    for member in metadata.members:
        if shared := library_rules().foreign(metadata.name.project, member):
            owners = [owner.replace("nvidia-*", "NVIDIA's wheels") for owner in shared.owners]
            yield finding(
                SourceError,
                member,
                f"is a private copy of a library of {' or '.join(owners) or 'the driver'}",
                "leave it out (auditwheel repair --exclude), and let the loader find the one copy",
                "a process with two of them has two CUDA contexts, or crashes",
            )


def _find_mixed_cuda(metadata: WheelMetadata, binaries: Sequence[Binary]) -> Iterator[Finding]:
    majors: dict[int, list[str]] = {}
    for binary in binaries:
        for major in cuda_majors(binary):
            majors.setdefault(major, []).append(binary.name)
    if len(majors) > 1:
        parts = "; ".join(f"CUDA {major}: {', '.join(names)}" for major, names in majors.items())
        yield finding(
            SourceError,
            metadata.name.filename,
            f"its libraries need {len(majors)} versions of CUDA",
            "build all of it with one toolkit",
            parts,
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
