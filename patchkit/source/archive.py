"""Unpacking source distributions: the whole tree or nothing, and nothing outside it."""

from __future__ import annotations

import enum
import lzma
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal, TypeVar

from patchkit.errors import PatchkitError, SourceError, StorageError
from patchkit.source.fetch import Progress

T = TypeVar("T")

_MODES: Mapping[str, Literal["r:gz", "r:xz"]] = {
    ".gz": "r:gz",
    ".tgz": "r:gz",
    ".xz": "r:xz",
    ".txz": "r:xz",
}
_TRY_AGAIN = "fetch the archive again, from a source that you trust"


def unpack(archive: Path, dest: Path, *, progress: Progress | None = None) -> Path:
    """Unpack a .tar.gz, .tar.xz, .tar or .zip archive so that ``dest`` is the root of its tree.

    The archive's single top-level folder is stripped. ``dest`` must not exist or be an empty
    directory; missing parents are created. On any failure nothing is left behind. ``progress``
    counts unpacked bytes. Returns ``dest``.

    Raises SourceError if the archive is damaged or unsafe (naming the member) or if ``dest`` is
    taken, StorageError if the disk refuses.
    """
    with _explained(archive, dest):
        target = dest.resolve()
        _require_file(archive)
        _require_vacant(target)
        # In the nearest folder that exists: same file system, so the rename is atomic.
        beside = next(parent for parent in target.parents if parent.exists())
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=beside) as scratch:
            extract = _extract_zip if archive.suffix.lower() == ".zip" else _extract_tar
            tree = Path(scratch) / extract(archive, Path(scratch), progress)
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                tree.rename(target)
            except OSError:
                _require_vacant(target)  # another process may have been quicker
                raise
    return dest


@contextmanager
def _explained(archive: Path, dest: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # Decompressors report bad data as an OSError that no system call stands behind.
        raise (
            _damaged(archive, error) if error.errno is None else _refused(archive, dest, error)
        ) from error
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
        EOFError,
        ArithmeticError,  # numbers in a header that no clock or file can hold
        ValueError,
        RuntimeError,  # zipfile: encrypted, or a compression that it does not know
    ) as error:
        raise _damaged(archive, error) from error


def _damaged(archive: Path, error: Exception) -> PatchkitError:
    return SourceError(
        f"{archive} cannot be unpacked: {error or type(error).__name__}",
        why="the file is damaged, cut short, or no .tar.gz, .tar.xz, .tar or .zip archive at all",
        hint=_TRY_AGAIN,
    )


def _refused(archive: Path, dest: Path, error: OSError) -> PatchkitError:
    return StorageError(
        f"cannot unpack {archive} to {dest}: {error.strerror}",
        why="the disk is full, or a file or folder may not be read or written",
        hint="free some space, check the permissions, or choose another destination",
    )


def _require_file(archive: Path) -> None:
    if not archive.is_file():
        raise SourceError(
            f"there is no archive at {archive}",
            why="the path is mistyped, or it names a folder",
            hint="give the path of a .tar.gz, .tar.xz, .tar or .zip source distribution",
        )


def _require_vacant(target: Path) -> None:
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise SourceError(
            f"{target} is already there and not an empty folder",
            why="an archive is never unpacked over other files",
            hint="choose a destination that does not exist yet, or empty this one",
        )


def _extract_tar(archive: Path, root: Path, progress: Progress | None) -> str:
    _require_data_filter()
    with tarfile.open(archive, _MODES.get(archive.suffix.lower(), "r:")) as tar:
        infos = tar.getmembers()
        # tarfile stops at the end marker, but gzip's checksum of it all comes after that.
        while tar.fileobj is not None and tar.fileobj.read(1 << 20):
            pass
        top = _require_safe(
            archive,
            [_ArchiveMember(i.name, _parts(i.name), _tar_kind(i), i.linkname) for i in infos],
        )
        reported = _reported(infos, lambda info: info.size, progress)
        # PEP 706's filter besides: it drops owners, set-uid bits and others' right to write.
        tar.extractall(root, reported, filter="data")
    return top


def _extract_zip(archive: Path, root: Path, progress: Progress | None) -> str:
    with zipfile.ZipFile(archive) as bundle:
        infos = bundle.infolist()
        top = _require_safe(
            archive, [_ArchiveMember(i.filename, _parts(i.filename), _zip_kind(i)) for i in infos]
        )
        for info in _reported(infos, lambda info: info.file_size, progress):
            path = Path(bundle.extract(info, root))
            if not info.is_dir() and _unix_mode(info) & stat.S_IXUSR:
                path.chmod(0o755)  # zipfile drops the modes, and scripts need theirs
    return top


def _require_data_filter() -> None:
    if not hasattr(tarfile, "data_filter"):
        raise SourceError(
            "this Python cannot unpack archives safely: its tarfile has no data filter",
            why="Python has it since 3.11.4",
            hint="run patchkit with Python 3.11.4 or later, or unpack the archive yourself",
        )


def _reported(
    items: Sequence[T], size: Callable[[T], int], progress: Progress | None
) -> Iterator[T]:
    """Yield the items, and report each to ``progress`` once the consumer is through with it."""
    if progress is None:
        yield from items
        return
    done, total = 0, sum(map(size, items))
    for item in items:
        yield item
        done += size(item)
        progress(done, total)


class _Kind(enum.Enum):
    FILE = enum.auto()
    FOLDER = enum.auto()
    SYMLINK = enum.auto()
    HARDLINK = enum.auto()
    SPECIAL = enum.auto()


_Parts = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _ArchiveMember:
    """An entry of an archive. ``target``: where a link leads, in the archive's own words."""

    name: str
    parts: _Parts
    kind: _Kind
    target: str = ""


_Complaints = Iterator[tuple[_ArchiveMember, str]]


def _tar_kind(info: tarfile.TarInfo) -> _Kind:
    if info.isreg():
        return _Kind.FILE
    if info.isdir():
        return _Kind.FOLDER
    if info.issym():
        return _Kind.SYMLINK
    return _Kind.HARDLINK if info.islnk() else _Kind.SPECIAL


def _zip_kind(info: zipfile.ZipInfo) -> _Kind:
    # Links count as special: zipfile would write them as files that hold the link's target.
    # 0: written where files have no modes.
    if stat.S_IFMT(_unix_mode(info)) not in {0, stat.S_IFREG, stat.S_IFDIR}:
        return _Kind.SPECIAL
    return _Kind.FOLDER if info.is_dir() else _Kind.FILE


def _unix_mode(info: zipfile.ZipInfo) -> int:
    return info.external_attr >> 16  # the upper half is st_mode where Unix made the zip


def _parts(name: str) -> _Parts:
    return tuple(part for part in name.split("/") if part not in {"", "."})


def _require_safe(archive: Path, members: Sequence[_ArchiveMember]) -> str:
    """Return the name of the one top-level folder. Raises SourceError at the first complaint."""
    # Every name is judged before anything is written: nothing has to be taken back.
    complaints = chain(
        _bad_names(members), _bad_tops(members), _bad_places(members), _bad_links(members)
    )
    for member, complaint in complaints:
        raise SourceError(
            f"{archive}: the member {member.name!r} {complaint}",
            why="no source distribution is built like that; nothing was unpacked",
            hint=_TRY_AGAIN,
        )
    top = next((member.parts[0] for member in members if member.parts), None)
    if top is None:
        raise SourceError(f"{archive} has no top-level folder: it holds no files", hint=_TRY_AGAIN)
    return top


def _bad_names(members: Sequence[_ArchiveMember]) -> _Complaints:
    for member in members:
        if member.name.startswith("/"):
            yield member, "has an absolute name"
        elif ".." in member.parts:
            yield member, "leads out of the tree with '..'"
        elif member.kind is _Kind.SPECIAL:
            yield member, "is neither a file nor a folder (a device, a pipe or the like)"
        elif not member.parts and member.kind is not _Kind.FOLDER:
            yield member, "has no name"


def _bad_tops(members: Sequence[_ArchiveMember]) -> _Complaints:
    top = None
    for member in members:
        if len(member.parts) == 1 and member.kind is not _Kind.FOLDER:
            yield member, "lies beside the top-level folder, not in it"
        elif member.parts:
            top = top or member.parts[0]
            if member.parts[0] != top:
                yield member, f"is in a second top-level folder, beside {top!r}"


def _bad_places(members: Sequence[_ArchiveMember]) -> _Complaints:
    """Return the members that would be written over, or through, another one that is no folder."""
    leaves: set[_Parts] = set()
    for member in members:
        if member.kind is not _Kind.FOLDER:
            if member.parts in leaves:
                yield member, "is there twice"
            leaves.add(member.parts)
    for member in members:
        depth = len(member.parts) + (member.kind is _Kind.FOLDER)
        if any(member.parts[:length] in leaves for length in range(1, depth)):
            yield member, "lies inside another member that is a file or a link"


def _bad_links(members: Sequence[_ArchiveMember]) -> _Complaints:
    symlinks = {member.parts for member in members if member.kind is _Kind.SYMLINK}
    files: set[_Parts] = set()
    for member in members:
        if member.kind is _Kind.FILE:
            files.add(member.parts)
        elif member.kind is _Kind.SYMLINK and not _stays_inside(member, symlinks):
            yield member, f"is a link that leads out of the tree: {member.target!r}"
        # Unlike a symlink's, the target of a hard link counts from the archive's root.
        elif member.kind is _Kind.HARDLINK and _parts(member.target) not in files:
            yield member, f"is a hard link to no earlier file of the tree: {member.target!r}"


def _stays_inside(link: _ArchiveMember, symlinks: set[_Parts]) -> bool:
    """Return whether a link's target lies in the top-level folder, whatever the other links do."""
    if link.target.startswith("/"):
        return False
    position = link.parts[:-1]
    for part in _parts(link.target):
        # Behind another link, '..' is not what the text of the target says.
        if position in symlinks:
            return False
        position = position[:-1] if part == ".." else (*position, part)
        if not position:
            return False
    return True
