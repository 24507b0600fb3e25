"""Read what wheelhouses have to offer an index: each wheel checked, and its METADATA."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from email.parser import BytesHeaderParser
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from patchkit.digests import sha256_of
from patchkit.errors import HashMismatchError, StorageError, UsageError
from patchkit.quoting import quoted
from patchkit.wheel.file.wheelfile import WheelFile
from patchkit.wheel.index.pages import OfferedWheel
from patchkit.wheel.wheelhouse.contents import listed_manifest
from patchkit.wheel.wheelhouse.manifest import Kind, ManifestEntry, rivals
from patchkit.wheel.wheelhouse.own_files import require_own
from patchkit.wheel.wheelhouse.storage import reading

Update = Callable[[int, int], None]
"""Takes the bytes that were read, and the bytes in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offers:
    """The wheels of some wheelhouses, by file name; ``built`` are those that patchkit made.

    ``lacking`` are projects that they require on any machine, and that are not among them, nor on
    the nodes. With ``overridden`` pins no resolver takes the wheels as they are.
    """

    wheels: tuple[OfferedWheel, ...]
    built: tuple[ManifestEntry, ...]
    lacking: tuple[str, ...]
    overridden: bool


@contextlib.contextmanager
def offered(houses: Sequence[Path], progress: Update) -> Iterator[Offers]:
    """Read the wheelhouses and hold them: nothing in them changes before the block ends.

    Raises HashMismatchError for a wheel that is a link or not as listed, SourceError for a damaged
    one, UsageError if there is none, or for two that ``==X`` could both mean, StorageError,
    BusyError.
    """
    with contextlib.ExitStack() as held:
        listed: dict[Path, tuple[ManifestEntry, ...]] = {}
        overridden = False
        for house in {each.resolve(): each for each in houses}.values():
            held.enter_context(reading(house))
            found = listed_manifest(house)
            listed[house], overridden = found.wheels, overridden or bool(found.overrides)
        entries = [entry for wheels in listed.values() for entry in wheels]
        places = {
            entry.filename: (house / entry.filename, entry)
            for house, wheels in listed.items()
            for entry in wheels
            if entry.held
        }
        if not places:
            raise UsageError(
                f"{', '.join(map(str, houses))}: no wheels to offer",
                hint="build one first: patchkit build nccl; patchkit repack vllm==X",
            )
        _require_one_meaning(entries)
        wheels = tuple(_read([places[name] for name in sorted(places)], progress))
        there = {e.name.project for e in entries if e.held or e.kind is Kind.INSTALLED}
        yield Offers(
            wheels=wheels,
            built=tuple(entry for entry in entries if entry.kind is Kind.BUILT),
            lacking=tuple(sorted({*_required(wheels)} - there)),
            overridden=overridden,
        )


def _require_one_meaning(entries: Sequence[ManifestEntry]) -> None:
    """Raise UsageError for two builds of one version, or two files of one name."""
    by_project = sorted(entries, key=lambda entry: entry.name.project)
    for _project, group in itertools.groupby(by_project, lambda entry: entry.name.project):
        for one, other in itertools.combinations(group, 2):
            if one.filename == other.filename and one.sha256 != other.sha256:
                raise UsageError(
                    f"{one.filename}: the wheelhouses hold two different ones",
                    why=f"their sha256 begin with {one.sha256[:12]} and {other.sha256[:12]}",
                    hint="write an index for each wheelhouse, or build it again in one of them",
                )
            first, second = one.name.version, other.name.version
            if rivals(one.name, other.name) and first != second and first.public == second.public:
                raise UsageError(
                    f"{one.filename} and {other.filename} are two builds of one version",
                    why=f"{one.name.project}=={first.public} takes the one whose label sorts last",
                    hint="write an index for each wheelhouse",
                )


def _read(wheels: Sequence[tuple[Path, ManifestEntry]], progress: Update) -> Iterator[OfferedWheel]:
    done, size = 0, sum(entry.size for _path, entry in wheels)
    for path, entry in wheels:
        again = f"see how to get it again: {quoted('patchkit', 'verify', path.parent)}"
        require_own(path)
        if not path.exists():
            raise StorageError(f"{path}: is listed, and not there", hint=again)
        if sha256_of(path) != entry.sha256:
            raise HashMismatchError(f"{path}: is not the wheel that is listed", hint=again)
        with WheelFile(path) as wheel:
            metadata = wheel.read(f"{wheel.dist_info}/METADATA")
            yield OfferedWheel(
                path=path,
                name=entry.name,
                sha256=entry.sha256,
                size=wheel.size,
                requires_python=_requires_python(metadata),
                metadata=metadata,
            )
        done += entry.size
        progress(done, size)


def _required(wheels: Sequence[OfferedWheel]) -> Iterator[str]:
    """Yield the projects that wheels require without a condition."""
    for wheel in wheels:
        for line in _fields(wheel.metadata, "Requires-Dist"):
            with contextlib.suppress(InvalidRequirement):
                requirement = Requirement(line)
                if not requirement.marker:
                    yield canonicalize_name(requirement.name)


def _requires_python(metadata: bytes) -> str:
    """Return what a METADATA says, in one line; "" for what no installer understands."""
    said = "".join(_fields(metadata, "Requires-Python")[:1])
    with contextlib.suppress(InvalidSpecifier):
        SpecifierSet(said)
        return " ".join(said.split())
    return ""


def _fields(metadata: bytes, name: str) -> list[str]:
    return [*map(str, BytesHeaderParser().parsebytes(metadata).get_all(name, []))]
