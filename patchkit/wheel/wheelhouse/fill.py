"""Fill a wheelhouse with everything that its wheels need, for every node the same."""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from patchkit.digests import sha256_of
from patchkit.durable.atomic import continuing, kept
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
from patchkit.patching.recipe import load_recipe
from patchkit.quoting import quoted
from patchkit.source.fetch import (
    CHUNK,
    Progress,
    index_session,
    opened,
    pip_settings,
    transfer,
)
from patchkit.target import targets
from patchkit.wheel.file.library_rules import library_rules
from patchkit.wheel.file.torch import Torch, torch_of
from patchkit.wheel.file.wheelfile import ANY, WheelFile
from patchkit.wheel.wheelhouse.contents import (
    FILLING,
    load_manifest,
    read_settled,
    replace_dependencies,
)
from patchkit.wheel.wheelhouse.pins import (
    ListedWheel,
    find_contradicted,
    pins_in,
    read_listed_wheels,
    require_effect,
)
from patchkit.wheel.wheelhouse.resolve import (
    LockedWheel,
    NodePlatform,
    WheelSources,
    only_metadata,
    resolve_wheels,
)
from patchkit.wheel.wheelhouse.storage import Kind, Manifest, ManifestEntry

_PYTHON = re.compile(r"3\.\d{1,2}(\.\d{1,2})?")
_OF_TORCH = re.compile(r"nvidia-(cudnn|cusparselt|nccl|nvshmem)-cu\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """The dependencies, the file names that are new or gone, the torch, and what was written."""

    dependencies: tuple[ManifestEntry, ...]
    new: tuple[str, ...]
    gone: tuple[str, ...]
    torch: Torch | None
    manifest: Manifest


def node_of(house: Path, python: str | None) -> NodePlatform:
    """Return the nodes that built wheels are for. Raises UsageError for several CPUs, or none."""
    built = [entry for entry in read_settled(house).wheels if entry.kind is Kind.BUILT]
    if not built:
        raise UsageError(
            f"{house} holds no wheel that patchkit built",
            why="a fill looks for what those need",
            hint=quoted(
                "patchkit", "repack", f"vllm=={load_recipe().newest}", "--dir", house
            ),
        )
    known = targets()
    cpus = {cpu for entry in built for cpu in entry.name.cpus} - {ANY}
    found = [
        known[name]
        for entry in built
        if (name := str(entry.facts.get("target"))) in known
    ]
    if len(cpus) != 1 or not found:
        raise UsageError(
            f"{house} holds wheels for {' and '.join(sorted(cpus)) or 'no CPU in particular'}",
            why="dependencies are resolved for one machine, that of a wheel's target",
            hint="keep a wheelhouse for each CPU",
        )
    # What loads with the oldest glibc also loads with newer ones.
    oldest = min(found, key=lambda target: by_version(target.glibc))
    if python and not _PYTHON.fullmatch(python):
        raise UsageError(
            f"--python-version takes a version such as 3.12, not {python!r}"
        )
    return NodePlatform(
        machine=cpus.pop(), python=python or oldest.python, glibc=oldest.glibc
    )


def fill_wheelhouse(
    house: Path,
    node: NodePlatform,
    sources: WheelSources,
    *,
    also: Sequence[str] = (),
    lock_only: bool = False,
    progress: Progress = lambda _done, _all: None,
    tell: Callable[[str], None] = lambda _line: None,
) -> Filled:
    """Resolve what the wheels need on a node, download it, and lock all of it by hash.

    ``also`` are requirements of the user's own; ``tell`` takes a line before what may take long.
    Nothing in the wheelhouse changes until everything is there and proved; what was downloaded
    before an interruption is taken up by the next call. Raises ProofError if the torch is one for
    CPUs alone, UsageError also for an override that does not fit, HashMismatchError, HostError,
    SourceError, StorageError, BusyError.
    """
    before = read_settled(house)
    require_effect(house, before.overrides, pins_in(house))
    overrides = [override.takes for override in before.overrides]
    built = _read_built(house, before)
    for wrong in find_contradicted(before.overrides, built):
        raise UsageError(f"{wrong.where}: {wrong.what}", why=wrong.why, hint=wrong.hint)
    # Major version → file name, of the CUDA that libraries built here ask for.
    needed = {
        m: it.name.filename
        for it in built
        for binary in it.binaries
        for m in binary.cuda
    }
    ours = [wheel.path for wheel in built if wheel.name.cpus & {node.machine, ANY}]
    with _hold_downloads(house) as place, only_metadata(ours) as small:
        # Offline, what an earlier fill brought is there to be taken.
        more = (small, house) if sources.offline else (small,)
        sources = replace(sources, folders=(*sources.folders, *more))
        # Some projects are numbered like CUDA; that decides if the wheels ask for one CUDA.
        names = sorted(library_rules().numbered.names) if len(needed) == 1 else []
        numbered = [f"{name}=={major}.*" for name in names for major in needed]
        tell(f"resolving dependencies for {node}")
        chosen = resolve_wheels(
            small.iterdir(), also, node, sources, numbered, overrides
        )
        # A torch for CPUs alone is refused before gigabytes of it are downloaded.
        torch, files = _proved_torch(chosen, node, needed, {}), dict[str, Path]()
        if not lock_only:
            files = _collect_wheels(chosen, house, place, progress, tell)
            torch = _proved_torch(chosen, node, needed, files)
        kind = Kind.LOCKED if lock_only else Kind.DEPENDENCY
        sizes = {name: file.stat().st_size for name, file in files.items()}
        fresh = tuple(
            replace(it, size=sizes.get(it.filename, 0), kind=kind) for it in chosen
        )
        arriving = [path for path in files.values() if path.parent == place]
        replace_dependencies(house, before, fresh, arriving)
    old = {entry.filename for entry in before.wheels if entry.kind is not Kind.BUILT}
    now = {entry.filename for entry in fresh}
    new, gone = tuple(sorted(now - old)), tuple(sorted(old - now))
    written = load_manifest(house)
    return Filled(dependencies=fresh, new=new, gone=gone, torch=torch, manifest=written)


def _read_built(house: Path, listed: Manifest) -> list[ListedWheel]:
    """Read the wheels that were built here. Raises HashMismatchError if one is another now."""
    built = [entry for entry in listed.wheels if entry.kind is Kind.BUILT]
    for entry in built:
        if (
            not is_file(house / entry.filename)
            or sha256_of(house / entry.filename) != entry.sha256
        ):
            raise HashMismatchError(
                f"{entry.filename} is not the wheel that was built",
                hint=f"{quoted('patchkit', 'verify', house)}; build it again",
            )
    return read_listed_wheels(house, built)[0]


@contextlib.contextmanager
def _hold_downloads(house: Path) -> Iterator[Path]:
    """Hold the folder of downloads alone; it stays after a failure if there is something in it."""
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
    place: Path,
    progress: Progress,
    tell: Callable[[str], None],
) -> dict[str, Path]:
    """Return where each wheel lies; what is not in the wheelhouse comes from an index."""
    there: dict[str, Path] = {}
    for wheel in chosen:
        for file in (place / wheel.filename, house / wheel.filename):
            if is_file(file) and sha256_of(file) == wheel.sha256:
                there[wheel.filename] = file
    wanted = [wheel for wheel in chosen if wheel.filename not in there]
    if wanted:
        size, free = sum(wheel.size for wheel in wanted), shutil.disk_usage(place).free
        # Of an index that tells no sizes (PEP 503), nothing can be said before.
        amount = f", {size / 1e6:,.0f} MB; free: {free / 1e6:,.0f} MB" if size else ""
        tell(f"to download: {len(wanted)}{amount}")
        if size - sum(kept(place / wheel.filename) for wheel in wanted) > free:
            raise StorageError(
                f"{house}: the disk has no room for {size / 1e6:,.0f} MB of dependencies, "
                f"{free / 1e6:,.0f} MB are free; nothing was downloaded",
                hint="free some; or let the nodes download: --lock-only",
            )
    download_wheels(wanted, place, progress)
    return {wheel.filename: place / wheel.filename for wheel in chosen} | there


def download_wheels(
    wheels: Sequence[LockedWheel], folder: Path, progress: Progress
) -> None:
    """Download wheels into a folder; one is there once it is whole and the one that was locked.

    What is cut short stays, for the next run to go on with. Raises HashMismatchError, StorageError.
    """
    before, total = 0, sum(wheel.size for wheel in wheels)

    def report(before: int, now: int, _all: int) -> None:
        progress(before + now, max(total, before + now))

    with index_session(pip_settings()) as session, translated(at=folder):
        for wheel in wheels:
            place, url = folder / wheel.filename, urlsplit(wheel.url)
            if (
                place.is_symlink()
            ):  # nobody but fill puts something there, and fill makes no links
                place.unlink()
            # Only what is whole gets its name, so the next run can take it as it is.
            with continuing(place) as stream:
                if url.scheme == "file":
                    stream.truncate(0)
                    digest = hashlib.sha256()
                    with Path(unquote(url.path)).open("rb") as file:
                        for chunk in iter(partial(file.read, CHUNK), b""):
                            digest.update(chunk)
                            stream.write(chunk)
                    sha256 = digest.hexdigest()
                else:
                    ask = partial(opened, wheel.url, session)
                    done = partial(report, before)
                    sha256, _size = transfer(
                        stream, ask, wheel.sha256, wheel.size, done
                    )
                if sha256 != wheel.sha256:
                    stream.truncate(0)
                    raise HashMismatchError(
                        f"the download of {place.name} is not the file that was locked",
                        why=f"its sha256 is {sha256}; the index said {wheel.sha256}",
                        hint="run it again; if it stays so, the index or a proxy changes files",
                    )
            before += place.stat().st_size


def _proved_torch(
    chosen: Sequence[LockedWheel],
    node: NodePlatform,
    needed: Mapping[int, str],
    files: Mapping[str, Path],
) -> Torch | None:
    """Return what the torch is, known by its file if that is there. Raises ProofError."""
    wheel = next((wheel for wheel in chosen if wheel.name.project == "torch"), None)
    if wheel is None:
        return None
    # vLLM itself requires others of NVIDIA's; a torch for CUDA always has these beside it.
    requires = [
        each.name.pinned for each in chosen if _OF_TORCH.fullmatch(each.name.project)
    ]
    members = None
    if files:
        with WheelFile(files[wheel.filename]) as file:
            members = file.members
    torch = torch_of(wheel.name.version, requires, members)
    if torch.cuda and needed and torch.cuda not in needed:
        major, filename = next(iter(needed.items()))
        raise ProofError(
            f"torch {torch.version} for {node.machine} is for CUDA {torch.cuda}; {filename} needs "
            f"CUDA {major}",
            why="their libraries cannot be loaded into one process",
            hint=f"take torch from PyTorch's own index for CUDA {major} (pip's extra-index-url), "
            f"or wheels for CUDA {torch.cuda}",
        )
    if torch.cuda is None:
        raise ProofError(
            f"torch {torch.version} for {node.machine} is one for CPUs alone: {torch.seen}",
            why="for some CPUs and versions the package index has no other, as 2.10.0 for aarch64; "
            "kernels for CUDA cannot be loaded beside it",
            hint="take torch from PyTorch's own index of the CUDA that these wheels need (pip's "
            "extra-index-url), or a vLLM whose torch has CUDA there: 0.20 and later, torch 2.11",
        )
    return torch
