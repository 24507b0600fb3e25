"""Check a wheel by itself, whatever device it is for and whatever lies beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from patchkit.errors import SourceError
from patchkit.finding import Finding, finding
from patchkit.wheel.device.inspect import Binary
from patchkit.wheel.file.library_rules import rules
from patchkit.wheel.file.metadata import WheelMetadata
from patchkit.wheel.wheelhouse.name_checks import too_new, uncovered

# ld.so(8): the loader puts the library's own folder in its place.
_ORIGIN = ("$ORIGIN", "${ORIGIN}")


def check(metadata: WheelMetadata, binaries: Sequence[Binary]) -> tuple[Finding, ...]:
    """Find everything that is wrong with one wheel, from what was read of it."""
    name, again = metadata.name.filename, "build it again"
    unreadable = [
        *(finding(SourceError, name, fault, again) for fault in metadata.faults),
        *(
            finding(SourceError, sbom.path, f"is no SBOM: {sbom.fault}", again)
            for sbom in metadata.sboms
            if sbom.fault
        ),
    ]
    return (
        *unreadable,
        *_folders(binaries),
        *_copies(metadata),
        *_mixed_cuda(metadata, binaries),
        *too_new(metadata, binaries),
        *uncovered(metadata),
    )


def cuda_majors(binary: Binary) -> tuple[int, ...]:
    """Return the major versions of CUDA whose libraries it asks the loader for."""
    return rules().cuda_majors(binary.library.needed)


def _folders(binaries: Sequence[Binary]) -> Iterator[Finding]:
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


def _copies(metadata: WheelMetadata) -> Iterator[Finding]:
    for member in metadata.members:
        if shared := rules().foreign(metadata.name.project, member):
            owners = [owner.replace("nvidia-*", "NVIDIA's wheels") for owner in shared.owners]
            yield finding(
                SourceError,
                member,
                f"is a private copy of a library of {' or '.join(owners) or 'the driver'}",
                "leave it out (auditwheel repair --exclude), and let the loader find the one copy",
                "a process with two of them has two CUDA contexts, or crashes",
            )


def _mixed_cuda(metadata: WheelMetadata, binaries: Sequence[Binary]) -> Iterator[Finding]:
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
