"""Open a wheel, and read its name, its members, its metadata and its libraries.

When a wheel is opened, its list of members is checked for what a hostile wheel could do: paths that
lead out of it, two members of one name or with the same bytes, sizes that explode. All reading then
uses the same open file: if another file takes its path, what was checked is still what is read.
What in the metadata contradicts the file name or RECORD is found on demand.
"""

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
from typing import Any, Self, TypeVar

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.tags import parse_tag
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
from patchkit.frozen import Texts, Values, frozen
from patchkit.source.releases import ANY as ANY
from patchkit.source.releases import wheel_cpus
from patchkit.wheel.file.library_rules import library_rules

T = TypeVar("T")
FACTS = "patchkit.json"
"""Name of the file in .dist-info that holds the facts."""

Facts = dict[str, Any]
"""A JSON object in which patchkit states how it made the wheel."""

_FACTS_PATH = rf"[^/]*\.dist-info/{re.escape(FACTS)}"
_HEAD = struct.Struct("<16xHH")  # of an ELF file: e_type and e_machine
# In elf.h: ET_EXEC, ET_DYN (e_type), EM_CUDA (e_machine).
_PROGRAM = 2
_SHARED = 3
_CUDA = 190
# Header of a member in a zip file: its mark, and the sizes of name and extra field.
_LOCAL = struct.Struct("<4s22xHH")
_LOCAL_MARK = b"PK\3\4"
_ENCRYPTED = 0x1
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_MOST_MEMBERS = 100_000  # torch has 14,000
# How many times larger than the wheel its members may be: compressed libraries have a third to a
# tenth of their size, and deflate can reach a thousandth.
_MOST_GROWTH = 100
_FREE_GROWTH = 1 << 26  # bytes that are allowed in addition, for small wheels
# Bytes; the largest text of vLLM, a script of its web pages, has 1.5 million.
_MOST_TEXT = 1 << 26
_CHUNK = 1 << 18  # bytes; of a larger chunk, zlib would copy the unread rest many times
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
    """A wheel that is open for reading and has passed the checks; use it in a ``with``.

    ``members`` maps the path of each file to its header, in the order of the archive. ``size`` is
    in bytes. Every method raises SourceError for a damaged wheel and StorageError if the disk
    fails.
    """

    def __init__(self, path: Path) -> None:
        """Open and check a wheel. Raises SourceError if it is not for Linux, damaged or hostile."""
        self.path = path
        self.name = WheelName(path.name)
        if path.is_fifo():  # to open it would wait for a writer
            raise damaged(str(path), "it is a pipe")
        # If a check fails, `opened` closes the files. Else pop_all leaves them open for __exit__.
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
            # Compared as paths, since a/b and a//b are two names of one file.
            place = PurePosixPath(info.filename)
            if place.is_absolute() or ".." in place.parts or "\\" in info.filename:
                raise self._hostile(info, "leads out of the wheel")
            if place in places:
                raise self._hostile(
                    info, "is there twice, and either could be installed"
                )
            places.add(place)

            # A kind of zip bomb: many members that all unpack the same few bytes.
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
        """Return the sha256 of the wheel in hex."""
        with self._reading():
            self._stream.seek(0)
            return hashlib.file_digest(self._stream, "sha256").hexdigest()

    @cached_property
    def dist_info(self) -> str:
        """Return the name of the only .dist-info folder.

        Raises SourceError unless there is exactly one, and it has the project and the version of
        the file name.
        """
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

    @property
    def distribution(self) -> str:
        """Return the name of the package as its .dist-info folder spells it."""
        return self.dist_info.removesuffix(".dist-info").rpartition("-")[0]

    @cached_property
    def facts(self) -> Facts:
        """Return the contents of patchkit.json; empty if patchkit did not make the wheel.

        Raises SourceError if the file is not a JSON object.
        """
        paths = [path for path in self.members if re.fullmatch(_FACTS_PATH, path)]
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
        """Return whether a project and a version, in any spelling, are those of the file name."""
        versions = {
            canonicalize_version(spelling, strip_trailing_zero=True)
            for spelling in (version, self.name.version)
        }
        return canonicalize_name(project) == self.name.project and len(versions) == 1

    def message(self, name: str) -> Message:
        """Read METADATA or WHEEL, files of the .dist-info folder that are lists of fields."""
        return HeaderParser().parsestr(self.text(f"{self.dist_info}/{name}"))

    def record(self, path: str) -> dict[str, tuple[str, str]]:
        """Read a RECORD and return path → (digest, size), as texts: ``sha256=…`` and bytes."""
        table = io.StringIO(self.text(path), newline="")
        with self._reading():
            rows = [[*row, "", ""] for row in csv.reader(table) if row]
        return {path: (digest, size) for path, digest, size, *_rest in rows}

    def text(self, path: str) -> str:
        data = self.read(path)
        with self._reading():
            return data.decode()

    def read(self, path: str) -> bytes:
        """Read a small member whole. Raises SourceError if it is missing or larger than 64 MiB."""
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
        """Yield the path and contents of each member that is neither a library nor a program."""
        for path in self.members:
            if not self._is_program(path):
                yield path, self.read(path)

    def read_libraries(
        self,
        read: Callable[[str, BufferedIOBase], T],
        only: Collection[str] | None = None,
    ) -> list[T]:
        """Return the result of ``read(path, contents)`` for each ELF library and program.

        ``only`` limits this to some paths. Unpacking takes most of the time, so several members are
        unpacked at once, each into a temporary file without a name.
        """

        def unpack_member(path: str) -> T:
            with tempfile.TemporaryFile() as contents:
                contents.writelines(self.unpacked(path))
                return read(path, contents)

        with self._reading(), ThreadPoolExecutor() as pool:
            paths = [path for path in self.members if only is None or path in only]
            return list(pool.map(unpack_member, filter(self._is_program, paths)))

    def unpacked(self, path: str) -> Iterator[bytes]:
        """Yield the decompressed contents of a member in pieces, for members of any size."""
        with self._reading(), self._archive.open(self.members[path]) as member:
            while chunk := member.read(_CHUNK):
                yield chunk

    def copy_member(self, path: str, dest: Path) -> Path:
        """Write a member to the file ``dest``, make its folders, and return ``dest``."""
        dest.parent.mkdir(parents=True, exist_ok=True)
        with dest.open("wb") as sink:
            sink.writelines(self.unpacked(path))
        return dest

    def stored(self, path: str) -> Iterator[bytes]:
        """Yield the bytes of a member as the archive stores them: compressed ones stay compressed.

        Raises SourceError if the member is encrypted, cut off, or not where the archive's list of
        members says.
        """
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

            # Name and extra field are measured here, since the archive's list of members may have
            # an extra field of another size.
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
        """Return whether a member begins like an ELF library or program for a CPU."""
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
        """Turn the errors that zipfile raises for damage into a SourceError that names the wheel.

        An error of the disk becomes a StorageError.
        """
        try:
            yield
        except _DAMAGE as error:
            # Damage can raise an OSError, too: without an errno from a decompressor, EINVAL for a
            # position that cannot exist.
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise StorageError(
                    f"cannot unpack {self.path}: {error}",
                    why="the disk is full, or the file cannot be read",
                    hint="free some space, or set TMPDIR to a folder that has some",
                ) from error

            raise damaged(str(self.path), str(error) or type(error).__name__) from error


def record_digest(chunks: Iterable[bytes]) -> str:
    """Return the digest of contents as RECORD writes it: ``sha256=`` and base64 without ``=``."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return f"sha256={base64.urlsafe_b64encode(digest.digest()).rstrip(b'=').decode()}"


_CHARACTERS = r"[\w.+!-]+"


class WheelName(str):
    """The file name of a wheel, with its parts.

    ``tag`` is ``python-abi-platform`` as written. ``cpus`` are the CPUs that it is for, in the
    spelling of ``platform.machine()``; ``any`` stands for all. Raises SourceError unless the text
    is the name of a wheel for Linux or for any platform.
    """

    __slots__ = ("cpus", "project", "tag", "version")
    cpus: frozenset[str]
    project: str
    tag: str
    version: Version

    def __new__(cls, text: str) -> Self:
        try:
            if not re.fullmatch(_CHARACTERS, text):
                raise InvalidWheelFilename(
                    "a character that file names of wheels do not have"
                )
            project, version, _build, _tags = parse_wheel_filename(text)
        except ValueError as error:
            raise SourceError(
                f"{text}: is not the name of a wheel: {error}",
                hint="rename it as it was built: NAME-VERSION-PYTHON-ABI-PLATFORM.whl",
            ) from None

        # Split from the right, since a build number may stand between version and tag (PEP 427).
        parts = text.removesuffix(".whl").rsplit("-", 3)
        cpus = wheel_cpus(text)
        if not cpus:
            raise SourceError(f"{text}: is for {parts[-1]}, not for Linux")

        name = super().__new__(cls, text)
        name.cpus = frozenset(cpus)
        name.project = project
        name.tag = "-".join(parts[1:])
        name.version = version
        return name

    @property
    def pinned(self) -> str:
        return f"{self.project}=={self.version}"


@frozen
class WheelMetadata:
    """Metadata of a wheel, which stays valid after the file is closed.

    ``members`` are the paths of all files, ``sboms`` those of SBOMs. ``requires`` is Requires-Dist.
    ``facts`` are the contents of patchkit.json, empty if patchkit did not make the wheel.
    ``faults`` are sentences about malformed parts.
    """

    name: WheelName
    members: Texts
    requires: tuple[Requirement, ...]
    requires_python: str
    sboms: Texts
    facts: Facts
    faults: Texts

    @property
    def pins(self) -> Values:
        """Return project → version for each requirement with ``==`` that belongs to no extra."""
        pins: dict[str, str] = {}
        for requirement in self.requires:
            specifiers = list(requirement.specifier)
            # A requirement with a second specifier, such as ==1.0,!=1.0.1, is no pin.
            if len(specifiers) != 1 or "extra" in str(requirement.marker or ""):
                continue

            (specifier,) = specifiers
            is_exact = specifier.operator in ("==", "===")
            if is_exact and not specifier.version.endswith(".*"):
                pins[canonicalize_name(requirement.name)] = specifier.version

        return pins

    @property
    def decisive_pins(self) -> Values:
        """Return the pins of the projects that ``wheel_rules.toml`` lists as decisive.

        They decide which wheels fit together.
        """
        rules = library_rules().pins
        return {name: pin for name, pin in self.pins.items() if rules.cover(name)}


def read_metadata(wheel: WheelFile) -> WheelMetadata:
    """Read the metadata of a wheel. A malformed part becomes a fault in the result, not an error.

    Raises StorageError if the disk fails.
    """
    faults: list[str] = []

    def tried(read: Callable[[], T], default: T) -> T:
        try:
            return read()
        except SourceError as error:
            faults.append(_without_path(error, wheel.path))
        except InvalidSpecifier as error:
            faults.append(str(error).splitlines()[0])
        return default

    members = tuple(wheel.members)
    home = tried(lambda: wheel.dist_info, "")
    headers = tried(lambda: wheel.message("METADATA"), Message())
    python = headers.get("Requires-Python", "")
    # Only to note a fault if Requires-Python is malformed.
    tried(lambda: SpecifierSet(python), SpecifierSet())

    requires = []
    for line in headers.get_all("Requires-Dist", []):
        try:
            requires.append(Requirement(line))
        except InvalidRequirement as error:
            faults.append(f"Requires-Dist: {str(error).splitlines()[0]}: {line[:80]!r}")

    sboms = sorted(path for path in members if path.startswith(f"{home}/sboms/"))
    return WheelMetadata(
        name=wheel.name,
        members=members,
        requires=tuple(requires),
        requires_python=python,
        sboms=tuple(sboms),
        facts=tried(lambda: wheel.facts, {}),
        faults=tuple(dict.fromkeys(faults)),
    )


def native_claim(facts: Facts, key: str) -> Collection[str]:
    """Return the libraries that patchkit.json names under a key; none if it has another form.

    Anybody can write that claim: ``assembled``, ``compiled_at_first_use``.
    """
    native = facts.get("native")
    names = native.get(key) if isinstance(native, dict) else None
    return names if isinstance(names, dict) else ()


def _without_path(error: SourceError, path: Path) -> str:
    return error.what.removeprefix(str(path)).removeprefix(":").lstrip()


def find_faults(path: Path) -> Iterator[str]:
    """Yield a sentence for each contradiction between a wheel, its file name and its RECORD.

    If the wheel is damaged, a sentence says so and is the last one. Raises StorageError if the disk
    fails.
    """
    try:
        with WheelFile(path) as wheel:
            yield from _check_identity(wheel)
            yield from _check_record(wheel)
    except SourceError as error:
        yield _without_path(error, path)


def _check_identity(wheel: WheelFile) -> Iterator[str]:
    name = wheel.name
    metadata = wheel.message("METADATA")
    project = metadata.get("Name", "")
    version = metadata.get("Version", "")
    if not wheel.is_of(project, version):
        yield f"METADATA is of {project} {version}, not {name.pinned}"

    tags = wheel.message("WHEEL").get_all("Tag", [])
    # WHEEL lists single tags. A file name may join several: py2.py3-none-any (PEP 425).
    if set().union(*map(parse_tag, tags)) != parse_tag(name.tag):
        yield f"WHEEL says {', '.join(tags) or 'no tag'}, the file name {name.tag}"


def _check_record(wheel: WheelFile) -> Iterator[str]:
    home = wheel.dist_info
    rows = wheel.record(f"{home}/RECORD")
    # Files that have no digest in RECORD (PEP 427).
    unsigned = {f"{home}/RECORD{suffix}" for suffix in ("", ".jws", ".p7s")}
    for path in wheel.members:
        if path not in rows and path not in unsigned:
            yield f"{path}: is not in RECORD"

    for member, (digest, size) in rows.items():
        info = wheel.members.get(member)
        if info is None:
            yield f"{member}: is in RECORD only"
        elif member in unsigned:
            continue
        elif not digest.startswith("sha256="):
            yield f"{member}: has no sha256 in RECORD"
        elif size and str(info.file_size) != size:
            yield f"{member}: has {info.file_size} bytes, {size} in RECORD"
        elif record_digest(wheel.unpacked(member)) != digest:
            yield f"{member}: its sha256 is not the one in RECORD"
