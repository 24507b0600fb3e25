"""Whether a wheel is what its name and its own RECORD say."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from packaging.tags import Tag, parse_tag
from packaging.utils import (
    InvalidWheelFilename,
    canonicalize_name,
    canonicalize_version,
    parse_wheel_filename,
)
from packaging.version import Version

from patchkit.errors import SourceError

ANY = "any"
_CHARACTERS = re.compile(r"[\w.+!-]+")
_LINUX = re.compile(r"(?:(?:many|musl)?linux(?:\d+|_\d+_\d+)?)_(?P<cpu>[a-z]\w*)")
_UNSIGNED = ("RECORD", "RECORD.jws", "RECORD.p7s")  # of .dist-info; PEP 427 gives them no digest
_MOST = 64 << 20  # bytes of a metadata file; beyond that it is no metadata
_DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError),
    *(csv.Error, UnicodeDecodeError, ValueError, OSError),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelName:
    """What a wheel's file name says; ``cpus`` as ``platform.machine()`` gives them, or ``any``."""

    filename: str
    project: str
    version: Version
    tag: str
    cpus: frozenset[str]

    @property
    def pinned(self) -> str:
        return f"{self.project}=={self.version}"


def wheel_name(filename: str) -> WheelName:
    """Raises SourceError for what is not the name of a wheel for Linux, or for any platform."""
    try:
        if not _CHARACTERS.fullmatch(filename):
            raise InvalidWheelFilename("a character that file names of wheels do not have")
        project, version, _build, tags = parse_wheel_filename(filename)
    except ValueError as error:
        raise SourceError(
            f"{filename}: is not the name of a wheel: {error}",
            hint="NAME-VERSION-PYTHON-ABI-PLATFORM.whl; python -m build names wheels rightly",
        ) from None
    cpus = frozenset(_cpu(filename, tag) for tag in tags)
    tag = "-".join(filename.removesuffix(".whl").rsplit("-", 3)[1:])
    return WheelName(filename=filename, project=project, version=version, tag=tag, cpus=cpus)


def _cpu(filename: str, tag: Tag) -> str:
    match = _LINUX.fullmatch(tag.platform)
    if match is None and tag.platform != ANY:
        raise SourceError(f"{filename}: is for {tag.platform}, not for Linux")
    return match["cpu"] if match else ANY


def faults(wheel: Path) -> Iterator[str]:
    """What is wrong in a wheel, a sentence each; a damaged file gives one, never an exception."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield from _faults(archive, wheel_name(wheel.name))
    except SourceError as error:
        yield error.what.removeprefix(f"{wheel.name}: ")
    except _DAMAGE as error:
        yield f"cannot be read to its end: {error or type(error).__name__}"


def _faults(archive: zipfile.ZipFile, name: WheelName) -> Iterator[str]:
    counts = Counter(info.filename for info in archive.infolist() if not info.is_dir())
    yield from (f"{path}: is in it {times} times" for path, times in counts.items() if times > 1)
    home = dist_info(counts, name)
    yield from _metadata_faults(archive, home, name)
    record = csv.reader(io.StringIO(text_of(archive, f"{home}/RECORD")))
    rows = {row[0]: row[1:] for row in record if row}
    unsigned = {f"{home}/{file}" for file in _UNSIGNED}
    yield from (f"{path}: is not in RECORD" for path in counts if path not in {*rows, *unsigned})
    for path, row in rows.items():
        if path not in counts:
            yield f"{path}: is in RECORD only"
        elif path not in unsigned and (fault := _file_fault(archive, path, row)):
            yield f"{path}: {fault}"


def dist_info(paths: Iterable[str], name: WheelName) -> str:
    """The one .dist-info folder, which carries the wheel's own name and version."""
    homes = {path.partition("/")[0] for path in paths if ".dist-info/" in path}
    home = homes.pop() if len(homes) == 1 else ""
    project, _, version = home.removesuffix(".dist-info").rpartition("-")
    if canonicalize_name(project) != name.project or _version(version) != _version(name.version):
        raise SourceError(f"has no .dist-info folder of {name.pinned}")
    return home


def _version(version: Version | str) -> str:
    return canonicalize_version(version, strip_trailing_zero=True)


def _metadata_faults(archive: zipfile.ZipFile, home: str, name: WheelName) -> Iterator[str]:
    metadata = HeaderParser().parsestr(text_of(archive, f"{home}/METADATA"))
    said = canonicalize_name(metadata.get("Name", "")), _version(metadata.get("Version", ""))
    if said != (name.project, _version(name.version)):
        yield f"METADATA is of {metadata.get('Name')} {metadata.get('Version')}, not {name.pinned}"
    tags = HeaderParser().parsestr(text_of(archive, f"{home}/WHEEL")).get_all("Tag", [])
    if set().union(*map(parse_tag, tags)) != parse_tag(name.tag):
        yield f"WHEEL says {', '.join(tags) or 'no tag'}, the file name {name.tag}"


def text_of(archive: zipfile.ZipFile, path: str) -> str:
    """A metadata file. Raises SourceError if it is missing or too large."""
    try:
        info = archive.getinfo(path)
    except KeyError:
        raise SourceError(f"{path}: is missing") from None
    if info.file_size > _MOST:
        raise SourceError(f"{path}: {info.file_size} bytes are too many for metadata")
    return archive.read(info).decode()


def _file_fault(archive: zipfile.ZipFile, path: str, row: list[str]) -> str:
    """Compare a file with its line of RECORD, ``sha256=digest,size``."""
    known, size = (*row, "", "")[:2]
    if not known.startswith("sha256="):
        return "has no sha256 in RECORD"
    if size and archive.getinfo(path).file_size != int(size):
        return f"has {archive.getinfo(path).file_size} bytes, {size} in RECORD"
    with archive.open(path) as file:
        digest = hashlib.file_digest(file, "sha256").digest()  # type: ignore[arg-type]
    encoded = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
    return "" if known == f"sha256={encoded}" else "its sha256 is not the one in RECORD"
