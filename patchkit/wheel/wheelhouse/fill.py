"""Filling a wheelhouse with everything that its wheels need, for every node the same."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchkit.digests import sha256_of
from patchkit.durable.failure import translated
from patchkit.durable.lock import locked
from patchkit.durable.names import is_file
from patchkit.errors import HashMismatchError, SourceError, UsageError
from patchkit.quoting import quoted
from patchkit.wheel.file.name import ANY
from patchkit.wheel.file.torch import Torch, require_cuda, torch_of
from patchkit.wheel.file.wheelfile import WheelFile
from patchkit.wheel.wheelhouse.contents import FILLING, replace_dependencies, settled
from patchkit.wheel.wheelhouse.listed_wheel import read
from patchkit.wheel.wheelhouse.manifest import Kind, ManifestEntry
from patchkit.wheel.wheelhouse.resolve import Locked, NodePlatform, WheelIndex, download, resolve
from patchkit.wheel.wheelhouse.wheel_checks import cuda_majors

_AT_ONCE = 8  # wheels that pip downloads in one go: what is whole survives an interruption
_SCRATCH = "pip"  # the folder for what pip writes, cleared each time

Progress = Callable[[int, int], None]
"""Told the wheels that are there and the wheels in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """What a fill did: the dependencies, those that were new, and the torch among them."""

    dependencies: tuple[ManifestEntry, ...]
    new: tuple[str, ...]
    gone: tuple[str, ...]
    torch: Torch | None


def machine_of(house: Path, built: Sequence[ManifestEntry]) -> str:
    """The one CPU that the wheels are for. Raises UsageError if there are none, or two."""
    cpus = {cpu for entry in built for cpu in entry.name.cpus} - {ANY}
    if len(cpus) != 1:
        raise UsageError(
            f"{house} holds wheels for {' and '.join(sorted(cpus)) or 'no CPU in particular'}",
            why="dependencies are resolved for one machine",
            hint="keep a wheelhouse for each CPU, or say --machine"
            if cpus
            else "build one first, or say --machine",
        )
    return cpus.pop()


def built_wheels(house: Path) -> tuple[ManifestEntry, ...]:
    """The wheels that patchkit put there. Raises UsageError if there are none."""
    found = tuple(entry for entry in settled(house) if entry.kind is Kind.BUILT)
    if not found:
        raise UsageError(
            f"{house} holds no wheel that patchkit built",
            why="a fill looks for what those need",
            hint="patchkit build nccl; patchkit repack vllm==X",
        )
    return found


def fill(
    house: Path,
    where: NodePlatform,
    source: WheelIndex,
    *,
    also: Sequence[str] = (),
    lock_only: bool = False,
    progress: Progress = lambda _done, _all: None,
) -> Filled:
    """Resolve what the wheels need on that machine, download it, and lock all of it by hash.

    ``also`` are requirements of the user's own. Nothing in the wheelhouse changes until everything
    is there and proved; what was downloaded before an interruption is taken up by the next call.
    Raises ProofError if the torch is one for CPUs alone, HashMismatchError, SourceError,
    StorageError, BusyError.
    """
    before, built = settled(house), built_wheels(house)
    needed = _cuda_needed(house, built)
    with _working(house) as place:
        chosen = _resolve(house, built, where, source, also, place)
        torch = _proved_torch(chosen, where, needed)
        folders = () if lock_only else (place, house)
        files: tuple[Path, ...] = ()
        if not lock_only:
            files = _collect(chosen, where, source, house, place, progress)
            torch = _proved_torch(chosen, where, needed, folders)
        fresh = tuple(_entry(each, where, folders) for each in chosen)
        replace_dependencies(house, built, fresh, files)
    old = {entry.filename for entry in before if entry.kind is not Kind.BUILT}
    new = {entry.filename for entry in fresh}
    return Filled(
        dependencies=fresh,
        new=tuple(sorted(new - old)),
        gone=tuple(sorted(old - new)),
        torch=torch,
    )


@contextlib.contextmanager
def _working(house: Path) -> Iterator[Path]:
    """The folder of downloads, held alone; gone once all is done, kept if it has something."""
    place = house / FILLING
    if place.is_symlink():
        raise HashMismatchError(
            f"{place}: is a link, not the folder that a fill collects its downloads in",
            why="patchkit makes none; a fill would write to wherever it leads",
            hint=f"{quoted('rm', '--', place)}; then run it again",
        )
    with translated(at=house):
        place.mkdir(exist_ok=True)
    with locked(place):
        try:
            yield place
        except BaseException:
            shutil.rmtree(place / _SCRATCH, ignore_errors=True)
            if not any(place.iterdir()):
                place.rmdir()
            raise
        shutil.rmtree(place, ignore_errors=True)


def _resolve(
    house: Path,
    built: Sequence[ManifestEntry],
    where: NodePlatform,
    source: WheelIndex,
    also: Sequence[str],
    place: Path,
) -> tuple[Locked, ...]:
    """The dependencies alone. Raises SourceError if one of our wheels was not the choice."""
    ours = dict.fromkeys(e.filename for e in built if e.name.cpus & {where.machine, ANY})
    wanted = [str((house / filename).absolute()) for filename in sorted(ours)]
    with _scratch(place) as scratch:
        chosen = resolve([*wanted, *also], where, _with_house(source, house), scratch)
    for each in chosen:
        ours.pop(each.name.filename, None)
    if ours:
        raise SourceError(f"pip chose something else than {', '.join(ours)}", hint="report it")
    mine = {entry.filename for entry in built}
    return tuple(each for each in chosen if each.name.filename not in mine)


def _with_house(source: WheelIndex, house: Path) -> WheelIndex:
    """Without an index, what is in the wheelhouse already is there to be taken."""
    folders = (*source.folders, house) if source.offline else source.folders
    return WheelIndex(offline=source.offline, folders=folders)


@contextlib.contextmanager
def _scratch(place: Path) -> Iterator[Path]:
    scratch = place / _SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)
    with translated(at=place):
        scratch.mkdir()
    yield scratch
    shutil.rmtree(scratch, ignore_errors=True)


def _collect(
    chosen: Sequence[Locked],
    where: NodePlatform,
    source: WheelIndex,
    house: Path,
    place: Path,
    progress: Progress,
) -> tuple[Path, ...]:
    """The files that are not in the wheelhouse; an earlier run may have left some in ``place``."""
    missing = [each for each in chosen if not _whole(house, each)]
    wanted = [each for each in missing if not _whole(place, each)]
    progress(len(chosen) - len(wanted), len(chosen))
    for start in range(0, len(wanted), _AT_ONCE):
        part = wanted[start : start + _AT_ONCE]
        with _scratch(place) as scratch:
            download(part, where, _with_house(source, house), scratch)
            for each in part:
                _take(scratch, each, place)
        progress(len(chosen) - len(wanted) + start + len(part), len(chosen))
    return tuple(place / each.name.filename for each in missing)


def _take(scratch: Path, wheel: Locked, place: Path) -> None:
    """Keep a download that is what was resolved."""
    if not _whole(scratch, wheel):
        raise HashMismatchError(
            f"the download of {wheel.name.filename} is not the file that was resolved",
            hint="run it again",
        )
    with translated(at=place):
        (scratch / wheel.name.filename).replace(place / wheel.name.filename)


def _whole(folder: Path, wheel: Locked) -> bool:
    file = folder / wheel.name.filename
    return is_file(file) and sha256_of(file) == wheel.sha256


def _cuda_needed(house: Path, built: Sequence[ManifestEntry]) -> dict[int, str]:
    """Major version → file name, of the CUDA that libraries built here ask for.

    Raises HashMismatchError if a wheel is not the one that was built.
    """
    for entry in built:
        if not is_file(house / entry.filename) or sha256_of(house / entry.filename) != entry.sha256:
            raise HashMismatchError(
                f"{entry.filename} is not the wheel that was built",
                hint=f"{quoted('patchkit', 'verify', house)}; build it again",
            )
    wheels, _unread = read(house, built)
    return {
        major: wheel.filename
        for wheel in wheels
        for binary in wheel.binaries
        for major in cuda_majors(binary)
    }


def _proved_torch(
    chosen: Sequence[Locked],
    where: NodePlatform,
    needed: Mapping[int, str],
    folders: Sequence[Path] = (),
) -> Torch | None:
    """The torch among them, known by its file if it is in one of the folders. Raises ProofError."""
    for each in chosen:
        if each.name.project == "torch":
            members = _members(_place(each.name.filename, folders)) if folders else None
            torch = torch_of(each.name.version, each.requires, members)
            require_cuda(torch, where.machine, needed)
            return torch
    return None


def _members(path: Path) -> Collection[str]:
    with WheelFile(path) as wheel:
        return wheel.members


def _entry(wheel: Locked, where: NodePlatform, folders: Sequence[Path]) -> ManifestEntry:
    kind = Kind.DEPENDENCY if folders else Kind.LOCKED
    size = _place(wheel.name.filename, folders).stat().st_size if folders else 0
    return ManifestEntry(
        name=wheel.name, sha256=wheel.sha256, size=size, facts=where.facts(), kind=kind
    )


def _place(filename: str, folders: Sequence[Path]) -> Path:
    return next(folder / filename for folder in folders if (folder / filename).exists())
