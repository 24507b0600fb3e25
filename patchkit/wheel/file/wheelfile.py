"""Open a wheel, once: its name, members, metadata, and the libraries in it one at a time.

Opening checks what a hostile wheel could do: names that lead out of it, two members of one name or
with the same bytes, sizes that explode. Everything is then read through the one open file, so that
what was checked is what is used, whatever becomes of the path.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import errno
import hashlib
import io
import os
import re
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from email.parser import HeaderParser
from functools import cached_property
from io import BufferedIOBase
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from packaging.utils import (
    InvalidWheelFilename,
    canonicalize_name,
    canonicalize_version,
    parse_wheel_filename,
)
from packaging.version import Version

from patchkit.elf import MAGIC, damaged
from patchkit.errors import SourceError, StorageError
from patchkit.foreign import read_json
from patchkit.frozen import frozen

T = TypeVar("T")
FACTS = "patchkit.json"
"""The file in .dist-info that holds the facts."""

Facts = dict[str, Any]
"""JSON in which patchkit states how it made the wheel."""

_FACTS_PATH = re.compile(rf"[^/]*\.dist-info/{re.escape(FACTS)}")
_HEAD = struct.Struct("<16xHH")  # of an ELF file: e_type and e_machine
# ET_EXEC, ET_DYN, EM_CUDA
_PROGRAM = 2
_SHARED = 3
_CUDA = 190
# Of a member: the mark, and the sizes of name and extra field.
_LOCAL = struct.Struct("<4s22xHH")
_LOCAL_MARK = b"PK\3\4"
_ENCRYPTED = 0x1
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_MOST_MEMBERS = 100_000  # torch has 14,000
# Libraries shrink to a third or a tenth; deflate's limit is a thousandth.
_MOST_GROWTH = 100
_FREE_GROWTH = 1 << 26  # bytes that any wheel may have besides
# Bytes; the largest text of vLLM, a script of its web pages, has 1.5 million.
_MOST_TEXT = 1 << 26
_CHUNK = 1 << 18  # what zlib leaves over of a larger one is copied again and again
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    OSError,
    struct.error,
    csv.Error,
    ArithmeticError,  # numbers in a header that no file can hold
    LookupError,
    ValueError,
    RuntimeError,  # zipfile: encrypted
)


class WheelFile(contextlib.AbstractContextManager["WheelFile"]):
    """A wheel that is open for reading and was built to do no harm; use it in a ``with``.

    ``members`` are its files in the order of the archive, by path; ``size`` is in bytes. Every
    method raises SourceError for a damaged wheel and StorageError if the disk fails.
    """

    def __init__(self, path: Path) -> None:
        """Open and check. Raises SourceError if it is no wheel for Linux, damaged, or hostile."""
        self.path = path
        self.name = wheel_name(path.name)
        # Closes what is open if the checks fail; pop_all hands it over to __exit__ if not.
        with contextlib.ExitStack() as opened, self._reading():
            self._stream = opened.enter_context(path.open("rb"))
            self._archive = opened.enter_context(zipfile.ZipFile(self._stream))
            self.size = os.fstat(self._stream.fileno()).st_size

            infos = self._archive.infolist()
            self._check_members(infos)
            self.members = {info.filename: info for info in infos if not info.is_dir()}
            self._opened = opened.pop_all()

    def _check_members(self, infos: Sequence[zipfile.ZipInfo]) -> None:
        if len(infos) > _MOST_MEMBERS:
            raise damaged(str(self.path), f"it has more than {_MOST_MEMBERS:,} members")

        room = self.size * _MOST_GROWTH + _FREE_GROWTH
        places = set()
        starts = set()
        for info in infos:
            # As a path: a/b and a//b are two names of one file.
            place = PurePosixPath(info.filename)
            if place.is_absolute() or ".." in place.parts or "\\" in info.filename:
                raise self._hostile(info, "leads out of the wheel")
            if place in places:
                raise self._hostile(
                    info, "is there twice, and either could be installed"
                )
            places.add(place)

            # Zip bombs do that: many members, each of them the same few bytes.
            if info.header_offset in starts:
                raise self._hostile(info, "has the same bytes as another one")
            starts.add(info.header_offset)

            if info.compress_type not in _METHODS:
                raise self._hostile(info, "is compressed as no wheel is")

            room -= info.file_size
            if room < 0:
                raise self._hostile(
                    info, f"makes it more than {_MOST_GROWTH} times as large"
                )

    def __exit__(self, *_error: object) -> None:
        self._opened.close()

    @cached_property
    def sha256(self) -> str:
        """The SHA-256 of the file as hex."""
        with self._reading():
            self._stream.seek(0)
            return hashlib.file_digest(self._stream, "sha256").hexdigest()

    @cached_property
    def dist_info(self) -> str:
        """The one .dist-info folder. Raises SourceError unless it is of the name and version."""
        homes = {
            path.partition("/")[0] for path in self.members if ".dist-info/" in path
        }
        home = homes.pop() if len(homes) == 1 else ""

        project, _, version = home.removesuffix(".dist-info").rpartition("-")
        if not self.is_of(project, version):
            raise SourceError(
                f"{self.path}: has no .dist-info folder of {self.name.pinned}",
                why="it was renamed, or it is damaged",
                hint="download or build it again",
            )
        return home

    @cached_property
    def facts(self) -> Facts:
        """Contents of patchkit.json; empty if patchkit did not make the wheel."""
        paths = [path for path in self.members if _FACTS_PATH.fullmatch(path)]
        if len(paths) != 1:
            return {}

        (path,) = paths
        try:
            facts = read_json(self.text(path))
        except ValueError as error:
            raise SourceError(
                f"{self.path}: {path}: is no JSON: {str(error)[:80]}"
            ) from None
        if not isinstance(facts, dict):
            raise SourceError(f"{self.path}: {path}: is no JSON object")
        return facts

    def is_of(self, project: str, version: str) -> bool:
        """Compare a project and a version, in any spelling, with the file name."""
        versions = {
            canonicalize_version(spelling, strip_trailing_zero=True)
            for spelling in (version, self.name.version)
        }
        return canonicalize_name(project) == self.name.project and len(versions) == 1

    def message(self, name: str) -> Message:
        """Read a file of the .dist-info folder that is a list of fields: METADATA or WHEEL."""
        return HeaderParser().parsestr(self.text(f"{self.dist_info}/{name}"))

    def record(self, path: str) -> dict[str, tuple[str, str]]:
        """Read a RECORD: path → digest (``sha256=…``) and size, as they are written."""
        table = io.StringIO(self.text(path), newline="")
        with self._reading():
            rows = [[*row, "", ""] for row in csv.reader(table) if row]
        return {path: (digest, size) for path, digest, size, *_rest in rows}

    def text(self, path: str) -> str:
        data = self.read(path)
        with self._reading():
            return data.decode()

    def read(self, path: str) -> bytes:
        """Read a member that is no library. Raises SourceError if it is missing or too large."""
        info = self.members.get(path)
        if info is None:
            raise SourceError(
                f"{self.path}: {path}: is missing",
                hint="download or build the wheel again",
            )
        if info.file_size > _MOST_TEXT:
            raise self._hostile(info, f"has {info.file_size:,} bytes")

        with self._reading():
            return self._archive.read(info)

    def texts(self) -> Iterator[tuple[str, bytes]]:
        """Yield the path and contents of each member that no machine loads."""
        for path in self.members:
            if not self._is_program(path):
                yield path, self.read(path)

    def read_libraries(
        self,
        read: Callable[[str, BufferedIOBase], T],
        only: Collection[str] | None = None,
    ) -> list[T]:
        """Return the result of ``read(path, contents)`` for each ELF library and program.

        ``only`` are the paths to look at. Several members are unpacked at once, since that takes
        most of the time; no file gets a name from the wheel.
        """

        def unpack_member(path: str) -> T:
            with tempfile.TemporaryFile() as contents:
                contents.writelines(self.unpacked(path))
                return read(path, contents)

        with self._reading(), ThreadPoolExecutor() as pool:
            paths = [path for path in self.members if only is None or path in only]
            return list(pool.map(unpack_member, filter(self._is_program, paths)))

    def unpacked(self, path: str) -> Iterator[bytes]:
        """Yield the contents of a member piece by piece, whatever its size."""
        with self._reading(), self._archive.open(self.members[path]) as member:
            while chunk := member.read(_CHUNK):
                yield chunk

    def copy_member(self, path: str, dest: Path) -> Path:
        """Write a member as the file ``dest``, and return that; folders are made."""
        dest.parent.mkdir(parents=True, exist_ok=True)
        with dest.open("wb") as sink:
            sink.writelines(self.unpacked(path))
        return dest

    def extract(self, paths: Iterable[str], folder: Path) -> dict[str, Path]:
        """Write some members below a folder, each in one of its own; return their files by path."""
        return {
            path: self.copy_member(path, folder / str(number) / Path(path).name)
            for number, path in enumerate(paths)
        }

    def stored(self, path: str) -> Iterator[bytes]:
        """Yield the bytes of a member as they lie in the archive, compressed or not."""
        info = self.members[path]
        with self._reading():
            if info.flag_bits & _ENCRYPTED:
                raise damaged(str(self.path), f"{path} is encrypted")

            self._stream.seek(info.header_offset)
            mark, name, extra = _LOCAL.unpack(self._stream.read(_LOCAL.size))
            if mark != _LOCAL_MARK:
                raise damaged(
                    str(self.path),
                    f"{path} is not where the list of members says",
                )

            # The member's own header may be longer or shorter than the one in the directory.
            position = info.header_offset + _LOCAL.size + name + extra
            end = position + info.compress_size
            while position < end:
                self._stream.seek(position)
                chunk = self._stream.read(min(end - position, _CHUNK))
                if not chunk:
                    raise damaged(str(self.path), f"{path} is cut off")
                position += len(chunk)
                yield chunk

    def _is_program(self, path: str) -> bool:
        """Check whether a member begins like a library or a program for a CPU."""
        with self._reading(), self._archive.open(self.members[path]) as member:
            head = member.read(_HEAD.size)

        if len(head) < _HEAD.size or not head.startswith(MAGIC):
            return False
        kind, machine = _HEAD.unpack(head)
        return kind in (_PROGRAM, _SHARED) and machine != _CUDA

    def _hostile(self, info: zipfile.ZipInfo, complaint: str) -> SourceError:
        return SourceError(
            f"{self.path}: the member {info.filename!r} {complaint}",
            why="no wheel is built like that",
            hint="download or build it again, from a source that you trust",
        )

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Turn errors of zipfile that damage causes into an error that names the wheel."""
        try:
            yield
        except _DAMAGE as error:
            # Decompressors, and positions that damage made up, raise an OSError, too.
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise StorageError(
                    f"cannot unpack {self.path}: {error}",
                    why="the disk is full, or the file cannot be read",
                    hint="free some space, or set TMPDIR to a folder that has some",
                ) from error

            raise damaged(str(self.path), str(error) or type(error).__name__) from error


def record_digest(chunks: Iterable[bytes]) -> str:
    """Return the digest of some contents as RECORD writes it: ``sha256=…``."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return f"sha256={base64.urlsafe_b64encode(digest.digest()).rstrip(b'=').decode()}"


ANY = "any"
_CHARACTERS = re.compile(r"[\w.+!-]+")
_LINUX = re.compile(r"(?:(?:many|musl)?linux(?:\d+|_\d+_\d+)?)_(?P<cpu>[a-z]\w*)")


@frozen
class WheelName:
    """The parts of a wheel's file name.

    ``tag`` is ``python-abi-platform`` as written; ``cpus`` are named as by ``platform.machine()``,
    or ``any``.
    """

    filename: str
    project: str
    version: Version
    tag: str
    cpus: frozenset[str]

    @property
    def pinned(self) -> str:
        return f"{self.project}=={self.version}"


def wheel_name(filename: str) -> WheelName:
    """Parse a file name. Raises SourceError unless it names a wheel for Linux or any platform."""
    try:
        if not _CHARACTERS.fullmatch(filename):
            raise InvalidWheelFilename(
                "a character that file names of wheels do not have"
            )
        project, version, _build, tags = parse_wheel_filename(filename)
    except ValueError as error:
        raise SourceError(
            f"{filename}: is not the name of a wheel: {error}",
            hint="rename it as it was built: NAME-VERSION-PYTHON-ABI-PLATFORM.whl",
        ) from None

    cpus = set()
    for tag in tags:
        if match := _LINUX.fullmatch(tag.platform):
            cpus.add(match["cpu"])
        elif tag.platform == ANY:
            cpus.add(ANY)
        else:
            raise SourceError(f"{filename}: is for {tag.platform}, not for Linux")

    # From the right: a build tag may stand between version and tag (PEP 427).
    parts = filename.removesuffix(".whl").rsplit("-", 3)
    return WheelName(
        filename=filename,
        project=project,
        version=version,
        tag="-".join(parts[1:]),
        cpus=frozenset(cpus),
    )
