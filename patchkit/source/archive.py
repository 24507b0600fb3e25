"""Unpack source distributions: completely or not at all, and with no file outside a folder."""

import lzma
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tarfile import TarInfo

from patchkit.errors import SourceError, StorageError

Progress = Callable[[int, int], None]
"""A callback that gets the number of bytes or steps that are done, and the number of all."""

_DAMAGE = (tarfile.TarError, zlib.error, lzma.LZMAError)
_Parts = tuple[str, ...]  # the parts of a path
_TRY_AGAIN = "fetch the archive again, from a source that you trust"


def unpack(archive: Path, dest: Path) -> Path:
    """Unpack a .tar.gz, .tar.xz or .tar archive so that ``dest`` is the root of its tree.

    The archive's single top-level folder is stripped. ``dest`` must be absent or an empty folder;
    missing parents are created. After a failure nothing is left. Returns ``dest``.

    Raises SourceError if the archive is missing, damaged or unsafe (naming the member), or if
    ``dest`` is taken; StorageError if the disk fails.
    """
    if not archive.is_file():
        raise SourceError(
            f"there is no archive at {archive}",
            why="the path is mistyped, or it names a folder",
            hint="give the path of a .tar.gz, .tar.xz or .tar source distribution",
        )
    with _explain_failures(archive, dest):
        target = dest.resolve()
        _require_vacant(target)

        # Unpack in the nearest existing parent, so that both folders are on one file system and the
        # rename is atomic.
        beside = next(parent for parent in target.parents if parent.exists())
        with tempfile.TemporaryDirectory(
            prefix=f".{target.name}.", dir=beside
        ) as scratch:
            with tarfile.open(archive) as tar:
                members = tar.getmembers()
                # tarfile stops at the end marker. Read the rest, so that gzip checks its checksum.
                while tar.fileobj is not None and tar.fileobj.read(1 << 20):
                    pass

                # Check every name before anything is written, so that nothing has to be undone.
                top = _check_members(archive, members)
                # The filter "data" (PEP 706) also drops owners, set-uid bits and write permission
                # for others.
                tar.extractall(scratch, members, filter="data")

            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                Path(scratch, top).rename(target)
            except OSError:
                # Another process may have unpacked something there meanwhile.
                _require_vacant(target)
                raise
    return dest


@contextmanager
def _explain_failures(archive: Path, dest: Path) -> Iterator[None]:
    try:
        yield
    # Numbers in a header that are too large raise ArithmeticError or ValueError.
    except (*_DAMAGE, OSError, EOFError, ArithmeticError, ValueError) as error:
        # Decompressors report bad data as an OSError without errno; a system call sets errno.
        if isinstance(error, OSError) and error.errno is not None:
            raise StorageError(
                f"cannot unpack {archive} to {dest}: {error.strerror}",
                hint="free some space, check the permissions, or choose another destination",
            ) from error

        problem = str(error).partition("\n")[0] or type(error).__name__
        raise SourceError(
            f"{archive} cannot be unpacked: {problem}",
            why="the file is damaged, cut short, or no archive of tar's at all",
            hint=_TRY_AGAIN,
        ) from error


def _require_vacant(target: Path) -> None:
    is_empty = target.is_dir() and not any(target.iterdir())
    if target.exists() and not is_empty:
        raise SourceError(
            f"{target} is already there and not an empty folder",
            why="an archive is never unpacked over other files",
            hint="choose a destination that does not exist yet, or empty this one",
        )


def _check_members(archive: Path, members: list[TarInfo]) -> str:
    """Return the name of the only top-level folder. Raises SourceError for an unsafe member."""
    named = [(member, PurePosixPath(member.name).parts) for member in members]
    tops = [parts[0] for _member, parts in named if parts]
    if not tops:
        raise SourceError(f"{archive} holds no files", hint=_TRY_AGAIN)

    top = tops[0]
    leaves: set[_Parts] = set()
    for member, parts in named:
        complaint = _complaint(member, parts, top)
        if not complaint and not member.isdir():
            complaint = "is there twice" if parts in leaves else ""
            leaves.add(parts)
        if complaint:
            raise _unsafe_member(archive, member, complaint)

    for member, parts in named:
        lengths = range(1, len(parts) + member.isdir())
        folders = [parts[:length] for length in lengths]
        if not leaves.isdisjoint(folders):
            what = "lies inside another member that is a file or a link"
            raise _unsafe_member(archive, member, what)
    return top


def _unsafe_member(archive: Path, member: TarInfo, complaint: str) -> SourceError:
    return SourceError(
        f"{archive}: the member {member.name!r} {complaint}",
        why="no source distribution is built like that; nothing was unpacked",
        hint=_TRY_AGAIN,
    )


def _complaint(member: TarInfo, parts: _Parts, top: str) -> str:
    """Return what is wrong with a member by itself, "" if nothing."""
    if member.name.startswith("/") or ".." in parts:
        return "leads out of the tree"
    if not (member.isfile() or member.isdir() or member.issym()):
        return "is neither a file, a folder nor a symbolic link (a device, a hard link or the like)"

    is_beside = len(parts) < 2 and not member.isdir()
    if is_beside or parts[:1] not in ((), (top,)):
        return f"lies beside the top-level folder {top!r}, not in it"
    if member.issym() and _leads_out(member.linkname, depth=len(parts) - 2):
        return f"is a link that leads out of the tree: {member.linkname!r}"
    return ""


def _leads_out(link: str, depth: int) -> bool:
    """Return whether a link leads out of the tree, from ``depth`` folders below its root."""
    target = PurePosixPath(link).parts
    up = target.count("..")
    # Accept '..' only at the beginning: behind a name, which may be a link, its effect is unknown.
    return link.startswith("/") or ".." in target[up:] or up > depth
