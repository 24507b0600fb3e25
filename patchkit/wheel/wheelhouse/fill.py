"""Fill a wheelhouse with all dependencies of its wheels, so that all nodes install equal ones."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from patchkit.digests import sha256_of
from patchkit.durable.atomic import continuing
from patchkit.durable.lock import locked
from patchkit.durable.paths import is_file
from patchkit.elf import by_version
from patchkit.errors import (
    HashMismatchError,
    ProofError,
    StorageError,
    UsageError,
    translated,
)
from patchkit.frozen import Texts, frozen
from patchkit.quoting import quoted
from patchkit.source.fetch import (
    Progress,
    index_session,
    opened,
    pip_settings,
    transfer,
)
from patchkit.source.project import first_example
from patchkit.target import targets
from patchkit.wheel.file.library_rules import library_rules
from patchkit.wheel.file.torch import Torch, torch_of
from patchkit.wheel.file.wheelfile import ANY, WheelFile
from patchkit.wheel.wheelhouse.pins import (
    ListedWheel,
    cuda_majors,
    find_contradicted,
    find_ineffective,
    pins_in,
    read_listed_wheels,
    require_none,
)
from patchkit.wheel.wheelhouse.resolve import (
    LockedWheel,
    NodePlatform,
    is_offline,
    only_metadata,
    resolve_wheels,
)
from patchkit.wheel.wheelhouse.storage import (
    FILLING,
    Kind,
    Manifest,
    ManifestEntry,
    Say,
    load_manifest,
    read_settled,
    replace_dependencies,
)

if TYPE_CHECKING:
    from requests import Session

_PYTHON = r"3\.\d{1,2}(\.\d{1,2})?"
_OF_TORCH = r"nvidia-(cudnn|cusparselt|nccl|nvshmem)-cu\d+"


@frozen
class Filled:
    """The result of a fill.

    ``new`` and ``gone`` are file names of dependencies that were not there before, and that are no
    longer there. ``torch`` is None if no torch is among the dependencies.
    """

    new: Texts
    gone: Texts
    torch: Torch | None
    manifest: Manifest


def node_platform(house: Path, python: str | None) -> NodePlatform:
    """Return the platform for which the dependencies of the built wheels are resolved.

    ``python`` is the version that the user wants, or None for that of the device. Raises UsageError
    if the wheelhouse holds no built wheel, or wheels for no CPU or several, or if ``python`` is no
    version.
    """
    built = read_settled(house).built
    if not built:
        raise UsageError(
            f"{house} holds no wheel that patchkit built",
            why="a fill looks for what those need",
            hint=quoted("patchkit", "repack", first_example(), "--dir", house),
        )

    names = [str(entry.facts.get("target")) for entry in built]
    devices = [targets()[name] for name in names if name in targets()]
    cpus = {cpu for entry in built for cpu in entry.name.cpus} - {ANY}
    # Wheels of Python alone are for the CPU of their device.
    cpus = cpus or {device.cpu for device in devices}
    if len(cpus) != 1 or not devices:
        named = " and ".join(sorted(cpus))
        raise UsageError(
            f"{house} holds wheels for {named or 'no CPU in particular'}",
            why="dependencies are resolved for one machine, that of a wheel's target",
            hint="keep a wheelhouse for each CPU",
        )

    if python and not re.fullmatch(_PYTHON, python):
        raise UsageError(
            f"--python-version takes a version such as 3.12, not {python!r}"
        )

    # Wheels that load with the oldest glibc also load with newer ones.
    oldest = min(devices, key=lambda target: by_version(target.glibc))
    return NodePlatform(
        machine=cpus.pop(),
        python=python or oldest.python,
        glibc=oldest.glibc,
    )


def fill_wheelhouse(
    house: Path,
    node: NodePlatform,
    *,
    also: Sequence[str],
    lock_only: bool,
    progress: Progress,
    tell: Say,
) -> Filled:
    """Resolve the dependencies of the built wheels for a node, download them, lock them by hash.

    ``also`` are further requirements of the user. With ``lock_only`` nothing is downloaded.
    ``tell`` is called with a line before a long step. The wheelhouse changes only after all
    downloads are complete and checked; the next call continues interrupted downloads. Raises
    ProofError if torch has no CUDA or another CUDA than the wheels, UsageError if an override
    has no effect or contradicts a wheel, HashMismatchError if a built wheel was changed, and
    HostError, SourceError, StorageError, BusyError.
    """
    before = read_settled(house)
    require_none(find_ineffective(house, before.overrides, pins_in(house)))

    built = _read_built(house, before)
    require_none(find_contradicted(before.overrides, built))

    cuda = cuda_majors(built)
    ours = [wheel.path for wheel in built if wheel.name.cpus & {node.machine, ANY}]

    with _hold_downloads(house) as downloads, only_metadata(ours) as small:
        tell(f"resolving dependencies for {node}")
        chosen = resolve_wheels(
            small.iterdir(),
            also,
            node,
            # Offline, uv may choose wheels that an earlier fill downloaded.
            [small, house] if is_offline() else [small],
            _cuda_constraints(cuda),
            [override.takes for override in before.overrides],
        )

        # Before gigabytes are downloaded, refuse a torch whose requirements show that it is for
        # CPUs alone. Afterwards the files of its wheel are looked at, too.
        torch = _proved_torch(chosen, node, cuda, {})
        files: dict[str, Path] = {}
        if not lock_only:
            files = _collect_wheels(chosen, house, downloads, progress, tell)
            torch = _proved_torch(chosen, node, cuda, files)

        fresh = [_entry(wheel, files.get(wheel.name)) for wheel in chosen]
        arriving = [path for path in files.values() if path.parent == downloads]
        replace_dependencies(house, before, fresh, arriving)

    old_names = {entry.name for entry in before.dependencies}
    names = {entry.name for entry in fresh}
    return Filled(
        new=tuple(sorted(names - old_names)),
        gone=tuple(sorted(old_names - names)),
        torch=torch,
        manifest=load_manifest(house),
    )


def _cuda_constraints(cuda: Mapping[int, str]) -> list[str]:
    """Return constraints for projects that are numbered like CUDA: ``cuda-python==13.*``.

    ``cuda`` is CUDA's major version → a wheel that needs it. If it has no entry or several, there
    are no constraints.
    """
    if len(cuda) != 1:
        return []
    (major,) = cuda
    return [f"{name}=={major}.*" for name in sorted(library_rules().numbered.names)]


def _entry(wheel: LockedWheel, file: Path | None) -> LockedWheel:
    """Return the manifest's entry of a wheel: a held dependency, or a locked one without a file."""
    if file is None:
        return replace(wheel, size=0, kind=Kind.LOCKED)
    return replace(wheel, size=file.stat().st_size, kind=Kind.DEPENDENCY)


def _read_built(house: Path, listed: Manifest) -> list[ListedWheel]:
    """Read the built wheels. Raises HashMismatchError if one is missing or was changed."""
    for entry in listed.built:
        if not find_wheel_file(entry, house):
            raise HashMismatchError(
                f"{entry.name} is not the wheel that was built",
                hint=f"{quoted('patchkit', 'verify', house)}; build it again",
            )

    wheels, _unread = read_listed_wheels(house, listed.built)
    return wheels


@contextlib.contextmanager
def _hold_downloads(house: Path) -> Iterator[Path]:
    """Make and lock the folder of downloads, yield its path, and remove it at the end.

    After an error the folder stays if it holds files, so that the next fill continues. Raises
    HashMismatchError if its path is a link, BusyError if another fill is at work.
    """
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
            if not any(place.iterdir()):
                place.rmdir()
            raise
        shutil.rmtree(place, ignore_errors=True)


def _collect_wheels(
    chosen: Sequence[LockedWheel],
    house: Path,
    downloads: Path,
    progress: Progress,
    tell: Say,
) -> dict[str, Path]:
    """Download the wheels that are in neither folder, and return file name → path for all."""
    files: dict[str, Path] = {}
    absent = []
    for wheel in chosen:
        files[wheel.name] = downloads / wheel.name
        if file := find_wheel_file(wheel, house, downloads):
            files[wheel.name] = file
        else:
            absent.append(wheel)

    if absent:
        _check_room(house, absent, downloads, tell)
    download_wheels(absent, downloads, progress)
    return files


def find_wheel_file(wheel: ManifestEntry, *folders: Path) -> Path | None:
    """Return a wheel's file from the first folder that has it with the locked sha256, else None."""
    for folder in folders:
        file = folder / wheel.name
        if is_file(file) and sha256_of(file) == wheel.sha256:
            return file

    return None


def _check_room(
    house: Path,
    absent: Sequence[LockedWheel],
    downloads: Path,
    tell: Say,
) -> None:
    """Tell how much will be downloaded. Raises StorageError if the disk has no room for it."""
    size = sum(wheel.size for wheel in absent)
    free = shutil.disk_usage(downloads).free
    # A wheel's size is 0, for unknown, if the index tells no sizes (PEP 503).
    amount = f", {size / 1e6:,.0f} MB; free: {free / 1e6:,.0f} MB" if size else ""
    tell(f"to download: {len(absent)}{amount}")

    begun = sum(part.stat().st_size for part in downloads.glob(".*.partial"))
    if size - begun > free:
        raise StorageError(
            f"{house}: the disk has no room for {size / 1e6:,.0f} MB of dependencies, "
            f"{free / 1e6:,.0f} MB are free; nothing was downloaded",
            hint="free some; or let the nodes download: --lock-only",
        )


def download_wheels(
    wheels: Sequence[LockedWheel],
    folder: Path,
    progress: Progress,
) -> None:
    """Download wheels into a folder. A file gets its name when it is complete and its sha256 right.

    The next call continues an interrupted file. Raises HashMismatchError if a file has another
    sha256 than the locked one, StorageError if the index or the disk fails.
    """
    total = sum(wheel.size for wheel in wheels)
    before = 0

    def report(now: int, _all: int) -> None:
        progress(before + now, max(total, before + now))

    with index_session(pip_settings()) as session, translated(at=folder):
        for wheel in wheels:
            place = folder / wheel.name
            # Only fill writes to this folder, and it makes no links.
            if place.is_symlink():
                place.unlink()

            # `continuing` gives the file its name at the end of the block, unless an error leaves
            # it. So the next run can use each file that has its name.
            with continuing(place) as stream:
                sha256 = _transfer_wheel(wheel, stream, session, report)
                if sha256 != wheel.sha256:
                    stream.truncate(0)
                    raise HashMismatchError(
                        f"the download of {place.name} is not the file that was locked",
                        why=f"its sha256 is {sha256}; the index said {wheel.sha256}",
                        hint="run it again; if it stays so, the index or a proxy changes files",
                    )

            before += place.stat().st_size


def _transfer_wheel(
    wheel: LockedWheel,
    stream: IO[bytes],
    session: Session,
    report: Progress,
) -> str:
    """Write a wheel into a stream, and return the sha256 of the whole wheel.

    The stream may already hold the first part of an interrupted download.
    """
    url = urlsplit(wheel.url)
    if url.scheme != "file":
        ask = partial(opened, wheel.url, session)
        sha256, _size = transfer(stream, ask, wheel.sha256, wheel.size, report)
        return sha256

    stream.truncate(0)
    source = Path(unquote(url.path))
    with source.open("rb") as file:
        shutil.copyfileobj(file, stream)
    return sha256_of(source)


def _proved_torch(
    chosen: Sequence[LockedWheel],
    node: NodePlatform,
    needed: Mapping[int, str],
    files: Mapping[str, Path],
) -> Torch | None:
    """Return the torch among the chosen wheels, None if there is none.

    ``needed`` is CUDA's major version → a wheel that needs it; ``files`` are the downloaded wheels
    by file name. Raises ProofError if torch is for CPUs alone, or for another CUDA than ``needed``.
    """
    torch = _find_torch(chosen, files)
    if torch is None:
        return None

    what = f"torch {torch.version} for {node.machine} is"
    if torch.cuda is None:
        raise ProofError(
            f"{what} one for CPUs alone: {torch.seen}",
            why="for some CPUs and versions the package index has no other, as 2.10.0 for aarch64; "
            "kernels for CUDA cannot be loaded beside it",
            hint="take torch from PyTorch's own index of the CUDA that these wheels need (pip's "
            "extra-index-url), or a vLLM whose torch has CUDA there: 0.20 and later, torch 2.11",
        )
    if torch.cuda and needed and torch.cuda not in needed:
        major, filename = next(iter(needed.items()))
        raise ProofError(
            f"{what} for CUDA {torch.cuda}; {filename} needs CUDA {major}",
            why="their libraries cannot be loaded into one process",
            hint=f"take torch from PyTorch's own index for CUDA {major} (pip's extra-index-url), "
            f"or wheels for CUDA {torch.cuda}",
        )
    return torch


def _find_torch(
    chosen: Sequence[LockedWheel],
    files: Mapping[str, Path],
) -> Torch | None:
    wheel = next((wheel for wheel in chosen if wheel.name.project == "torch"), None)
    if wheel is None:
        return None

    # The chosen projects that only torch requires, and not vLLM: they show that torch is for CUDA.
    requires = [
        other.name.pinned
        for other in chosen
        if re.fullmatch(_OF_TORCH, other.name.project)
    ]

    members = None
    if files:
        with WheelFile(files[wheel.name]) as file:
            members = file.members
    return torch_of(wheel.name.version, requires, members)
