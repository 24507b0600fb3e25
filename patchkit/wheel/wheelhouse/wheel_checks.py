"""What speaks against a wheel, whatever device it is for and whatever lies beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from patchkit.errors import SourceError
from patchkit.finding import Finding, finding
from patchkit.wheel.device.inspect import Binary
from patchkit.wheel.file.library_rules import Shared, rules
from patchkit.wheel.file.metadata import About
from patchkit.wheel.wheelhouse.name_checks import broken_promises

_ORIGIN = ("$ORIGIN", "${ORIGIN}")


def check(about: About, binaries: Sequence[Binary]) -> tuple[Finding, ...]:
    """Everything that is wrong with one wheel, from what was read of it."""
    return (
        *_unreadable(about),
        *_folders(binaries),
        *_copies(about),
        *_mixed_cuda(about, binaries),
        *broken_promises(about, binaries),
    )


def cuda_majors(binary: Binary) -> tuple[int, ...]:
    """The major versions of CUDA whose libraries it asks the loader for."""
    return rules().cuda_majors(binary.library.needed)


def _unreadable(about: About) -> Iterator[Finding]:
    again = "build it again"
    for fault in about.faults:
        yield finding(SourceError, about.name.filename, fault, again)
    for sbom in about.sboms:
        if sbom.fault:
            yield finding(SourceError, sbom.path, f"is no SBOM: {sbom.fault}", again)


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


def _copies(about: About) -> Iterator[Finding]:
    for member in about.members:
        shared = rules().foreign(about.name.project, member)
        if shared is not None:
            yield finding(
                SourceError,
                member,
                f"is a private copy of a library of {_owner(shared)}",
                "leave it out (auditwheel repair --exclude), and let the loader find the one copy",
                "a process with two of them has two CUDA contexts, or crashes",
            )


def _owner(shared: Shared) -> str:
    return " or ".join(each.replace("nvidia-*", "NVIDIA's wheels") for each in shared.owners) or (
        "the driver"
    )


def _mixed_cuda(about: About, binaries: Sequence[Binary]) -> Iterator[Finding]:
    majors: dict[int, list[str]] = {}
    for binary in binaries:
        for major in cuda_majors(binary):
            majors.setdefault(major, []).append(binary.name)
    if len(majors) > 1:
        parts = "; ".join(f"CUDA {major}: {', '.join(names)}" for major, names in majors.items())
        yield finding(
            SourceError,
            about.name.filename,
            f"its libraries need {len(majors)} versions of CUDA",
            "build all of it with one toolkit",
            parts,
        )
