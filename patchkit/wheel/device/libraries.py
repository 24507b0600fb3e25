"""Decide what each library of a vLLM wheel is on a device: does it load, and is it missed if not.

``recipes/vllm/libraries.toml`` says what a library is for, its fat binaries say what is in it. A
fat binary that does not load either has code for devices of the same major version, and ought to
have loaded, or is for other devices alone.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from patchkit.errors import ProofError
from patchkit.quoting import quoted
from patchkit.records import RECIPES, read_toml
from patchkit.target import Load, Target
from patchkit.wheel.device.inspect import Binary, best, fat_binaries


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownLibrary:
    """One entry of ``libraries.toml``; the fields are described there."""

    file: str
    versions: str
    devices: tuple[int, ...]
    code: str
    required: bool
    gives: str
    cost: str

    def covers(self, version: Version) -> bool:
        # A pre-release counts as its release: specifiers leave pre-releases out by default.
        return SpecifierSet(self.versions).contains(version.base_version)

    def used_on(self, target: Target) -> bool:
        return not self.devices or target.major in self.devices


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryTable:
    """The tables of ``libraries.toml``."""

    library: tuple[KnownLibrary, ...]
    around: tuple[str, ...]


class Use(enum.StrEnum):
    """Use of a library on the device."""

    LOADS = "loads"
    PARTLY = "loads in part"
    HOST = "runs on the CPU"
    JIT = "compiles on the device"
    OTHER = "for other devices"
    LOST = "does not load"
    ABSENT = "is missing"
    UNKNOWN = "not in the table"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A library of a wheel, or one that it lacks.

    ``loads`` counts its fat binaries by how they reach the device. ``lost`` are the archs of those
    that do not, although they have code for devices of the same major version, and how many.
    """

    name: str
    use: Use
    known: KnownLibrary | None
    loads: Counter[Load]
    lost: Counter[str]

    @property
    def fatal(self) -> bool:
        """True if vLLM cannot do without it on the device."""
        return bool(self.known and self.known.required) and self.missed

    @property
    def missed(self) -> bool:
        return self.use in (Use.LOST, Use.ABSENT)

    @property
    def phrase(self) -> str:
        """Its use on the device, in one phrase."""
        use = str(self.use.value)
        if self.missed and self.known:
            return f"{use}: {self.known.cost}"
        if self.use is not Use.PARTLY:
            return use
        archs = " and ".join(self.lost)
        return f"{use}; fat binaries with {archs} alone do not, {self.lost.total()}"


def judge_libraries(
    binaries: Sequence[Binary], target: Target, version: Version
) -> tuple[Judged, ...]:
    """Judge each library of a wheel on the device, and those that a release ought to have."""
    expected = [known for known in library_table().library if known.covers(version)]
    found = []
    for binary in binaries:
        known = next((known for known in expected if fnmatchcase(binary.name, known.file)), None)
        lost: Counter[str] = Counter()
        for group in fat_binaries(binary.live):
            related = [entry for entry in group if entry.arch.major == target.major]
            if related and best(group, target) is Load.NONE:
                names = {entry.name for entry in related}
                lost[", ".join(sorted(names))] += 1
        if known is None:
            use = Use.UNKNOWN
        elif not known.used_on(target):
            use = Use.OTHER
        elif known.code != "embedded":
            use = Use.JIT if known.code == "jit" else Use.HOST
        elif binary.load(target) is Load.NONE:
            use = Use.LOST
        else:
            use = Use.PARTLY if lost else Use.LOADS
        loads = binary.loads(target)
        found.append(Judged(name=binary.name, use=use, known=known, loads=loads, lost=lost))
    present = [library.known for library in found]
    absent = [known for known in expected if known not in present and known.used_on(target)]
    return (
        *found,
        *(
            Judged(name=known.file, use=Use.ABSENT, known=known, loads=Counter(), lost=Counter())
            for known in absent
        ),
    )


def require_loading(judged: Iterable[Judged], target: Target, version: Version) -> None:
    """Raise ProofError that names each library that vLLM cannot do without on the device."""
    if fatal := [library for library in judged if library.fatal]:
        raise ProofError(
            f"the wheel's kernels do not serve {target.title}\n"
            + "\n".join(f"  {library.name}: {library.phrase}" for library in fatal),
            why="it was built for other devices, or parts of it were left out",
            hint=from_source(version, target),
        )


def from_source(version: Version, target: Target) -> str:
    """Return the hint for a wheel whose kernels do not serve a device."""
    words = ("--version", version.public, "--target", target.name)
    return f"build it from source: {quoted('patchkit', 'build', 'vllm', *words)}"


def cuda_major(binaries: Iterable[Binary]) -> str:
    """Return the CUDA that libraries are linked with. Raises ProofError for none, or several."""
    found = sorted({str(major) for binary in binaries for major in binary.cuda})
    if len(found) == 1:
        return found[0]
    raise ProofError(
        f"the wheel's libraries need {' and '.join(found) or 'no'} libcudart",
        why="it holds libraries of several builds" if found else "it is a build for the CPU alone",
        hint="name upstream's wheel: patchkit repack vllm==X.Y.Z",
    )


@cache
def library_table() -> LibraryTable:
    """Load ``libraries.toml``, once."""
    return read_toml(LibraryTable, RECIPES / "vllm" / "libraries.toml")
