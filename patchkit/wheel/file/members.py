"""The libraries and programs inside a wheel, one at a time; none is written under its own name."""

from __future__ import annotations

import shutil
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path, PurePosixPath

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from patchkit.elf import MAGIC, damaged, failed_disk
from patchkit.errors import SourceError, StorageError
from patchkit.target import targets

_HEAD = struct.Struct("<16xHH")
_PROGRAM, _SHARED, _CUDA = 2, 3, 190  # ET_EXEC, ET_DYN, EM_CUDA
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_MOST_MEMBERS = 100_000  # torch has 14,000
# Libraries shrink to a third or a tenth; deflate's limit is a thousandth.
_MOST_GROWTH = 100
_FREE_GROWTH = 1 << 26
_MOST_TEXT = 1 << 26  # bytes; the largest of vLLM, a script of its web pages, has 1.5 million


def cpus(wheel: Path) -> frozenset[str]:
    """The CPUs that the tags in the wheel's name promise; empty if they promise none.

    Raises SourceError if the name is not one of a wheel.
    """
    try:
        tags = parse_wheel_filename(wheel.name)[3]
    except InvalidWheelFilename as error:
        raise SourceError(
            f"{wheel}: the name is not one of a wheel",
            why=str(error),
            hint="rename it as it was built: name-version-python-abi-platform.whl",
        ) from error
    known = {target.cpu for target in targets().values()}
    return frozenset(cpu for cpu in known for tag in tags if tag.platform.endswith(f"_{cpu}"))


def libraries(wheel: Path) -> Iterator[tuple[str, BufferedIOBase]]:
    """The name and contents of each ELF library or program; valid until the next one.

    Raises SourceError if the wheel is damaged, or built to harm.
    """
    with _explained(wheel), zipfile.ZipFile(wheel) as bundle:
        infos = bundle.infolist()
        _require_safe(wheel, infos)
        room = _room(wheel)
        for info in infos:
            with bundle.open(info) as member:
                head = member.read(_HEAD.size)
                if not _is_program(head):
                    continue
                room -= info.file_size
                if room < 0:
                    raise _unsafe(wheel, info, f"makes it more than {_MOST_GROWTH} times as large")
                with tempfile.TemporaryFile() as contents:
                    contents.write(head)
                    shutil.copyfileobj(member, contents, 1 << 20)
                    yield info.filename, contents


def texts(wheel: Path) -> Iterator[tuple[str, bytes]]:
    """The path and contents of each member that no machine loads, folders left out.

    Raises SourceError as ``libraries`` does.
    """
    with opened(wheel) as (bundle, infos):
        for info in infos:
            with bundle.open(info) as member:
                program = _is_program(member.read(_HEAD.size))
            if not program:
                yield info.filename, small(wheel, bundle, info)


@contextmanager
def opened(wheel: Path) -> Iterator[tuple[zipfile.ZipFile, list[zipfile.ZipInfo]]]:
    """A wheel and its members without folders, none of which is there to harm.

    Raises SourceError if the wheel is damaged, or made to harm, also while it is read.
    """
    with _explained(wheel), zipfile.ZipFile(wheel) as bundle:
        infos = bundle.infolist()
        _require_safe(wheel, infos)
        if sum(info.file_size for info in infos) > _room(wheel):
            raise _unsafe(wheel, infos[0], f"and others make it over {_MOST_GROWTH} times as large")
        yield bundle, [info for info in infos if not info.is_dir()]


def small(wheel: Path, bundle: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """The contents of a member that is no library. Raises SourceError if it is too large."""
    if info.file_size > _MOST_TEXT:
        raise _unsafe(wheel, info, f"has {info.file_size:,} bytes")
    return bundle.read(info)


def _room(wheel: Path) -> int:
    """How many bytes may come out of a wheel."""
    return wheel.stat().st_size * _MOST_GROWTH + _FREE_GROWTH


def _is_program(head: bytes) -> bool:
    """Whether a file begins as what a machine loads does; objects and device code do not count."""
    if len(head) < _HEAD.size or not head.startswith(MAGIC):
        return False
    kind, machine = _HEAD.unpack(head)
    return kind in (_PROGRAM, _SHARED) and machine != _CUDA


@contextmanager
def _explained(wheel: Path) -> Iterator[None]:
    try:
        yield
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        OSError,
        struct.error,
        ArithmeticError,  # numbers in a header that no file can hold
        LookupError,
        ValueError,
        RuntimeError,  # zipfile: encrypted
    ) as error:
        if failed_disk(error):
            raise StorageError(
                f"cannot unpack {wheel}: {error}",
                why="the disk is full, or the file cannot be read",
                hint="free some space, or set TMPDIR to a folder that has some",
            ) from error
        raise damaged(str(wheel), str(error) or type(error).__name__) from error


def _require_safe(wheel: Path, infos: list[zipfile.ZipInfo]) -> None:
    if len(infos) > _MOST_MEMBERS:
        raise damaged(str(wheel), f"it has more than {_MOST_MEMBERS:,} members")
    seen, starts = set(), set()
    for info in infos:
        path = PurePosixPath(info.filename)
        if path.is_absolute() or ".." in path.parts or "\\" in info.filename:
            raise _unsafe(wheel, info, "leads out of the wheel")
        if path in seen:
            raise _unsafe(wheel, info, "is there twice, and nobody can say which one is installed")
        if info.header_offset in starts:
            raise _unsafe(wheel, info, "has the same bytes as another one")
        if info.compress_type not in _METHODS:
            raise _unsafe(wheel, info, "is compressed as no wheel is")
        seen.add(path)
        starts.add(info.header_offset)


def _unsafe(wheel: Path, info: zipfile.ZipInfo, complaint: str) -> SourceError:
    return SourceError(
        f"{wheel}: the member {info.filename!r} {complaint}",
        why="no wheel is built like that",
        hint="download or build it again, from a source that you trust",
    )
