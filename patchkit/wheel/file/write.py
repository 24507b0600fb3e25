"""Write a wheel so that equal contents give equal bytes: sorted, dated 1980, with a new RECORD.

Nothing is compressed: that would take minutes, and its result depends on the version of zlib.
Unchanged members of another wheel are copied as they are stored there, compressed or not.
A wheel that patchkit made has its facts as JSON, and a digest of the content in its version.
"""

import csv
import io
import json
import re
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from patchkit import __version__
from patchkit.digests import digest
from patchkit.elf import MAGIC, damaged
from patchkit.frozen import Values, frozen
from patchkit.source.archive import Progress
from patchkit.wheel.file.wheelfile import FACTS, Facts, WheelFile, record_digest

EPOCH = 315532800
"""SOURCE_DATE_EPOCH of every build: 1980-01-01, the earliest time that a zip file can hold."""

# create_system of a zip member: with this value, the upper 16 bits of external_attr are st_mode.
_UNIX = 3
_REPLACED = re.compile(rb"^(Tag|Generator):.*(\n|\Z)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class _Member:
    """A member to write: header, stored bytes, and digest and size for its row of RECORD."""

    info: zipfile.ZipInfo
    chunks: Callable[[], Iterable[bytes]]
    row: tuple[str, str]


def seal_wheel(
    raw: Path,
    folder: Path,
    platform: str,
    added: Values,
    replaced: Mapping[str, bytes],
) -> Path:
    """Write a freshly built wheel anew into ``folder``, with one platform tag; return its path.

    ``added`` maps a path below .dist-info to the text of a new file; files in ``licenses/`` are
    also named in METADATA. ``replaced`` maps a member's path to its new bytes. All members are
    stored without compression, since most of a library is compressed already. Raises SourceError
    for a damaged wheel.
    """
    name, version, *_, interpreter, abi, _platform = raw.stem.split("-")
    home = f"{name}-{version}.dist-info"
    tag = f"{interpreter}-{abi}-{platform}"
    sealed = folder / f"{name}-{version}-{tag}.whl"

    changed = dict(replaced)
    licenses = []
    for path, text in added.items():
        changed[f"{home}/{path}"] = text.encode()
        if path.startswith("licenses/"):
            licenses.append(path.removeprefix("licenses/"))

    with WheelFile(raw) as wheel:
        changed[f"{home}/WHEEL"] = set_tag(wheel.read(f"{home}/WHEEL"), tag)
        if licenses:
            metadata = wheel.read(f"{home}/METADATA")
            changed[f"{home}/METADATA"] = _add_licenses(metadata, licenses)
        rewrite_wheel(wheel, sealed, changed, unpack=True)

    return sealed


def _add_licenses(metadata: bytes, licenses: Iterable[str]) -> bytes:
    """Return METADATA with a License-File field (PEP 639) for each path.

    The fields go behind the other fields, in front of the description.
    """
    head, gap, body = metadata.rstrip(b"\n").partition(b"\n\n")
    fields = "".join(f"\nLicense-File: {path}" for path in sorted(licenses))
    return head + fields.encode() + gap + body + b"\n"


def rewrite_wheel(
    source: WheelFile,
    dest: Path,
    changed: Mapping[str, bytes],
    progress: Progress = lambda _done, _total: None,
    *,
    unpack: bool = False,
) -> None:
    """Write the wheel ``source`` anew as ``dest``, with some members replaced or added.

    The .dist-info folder gets the name and version of ``dest``. ``changed`` maps paths in ``dest``
    to new contents. All other members keep their stored bytes and their row of RECORD; with
    ``unpack`` they are stored without compression and get a new row. ``progress`` is called with
    bytes written and in all. Raises SourceError if the wheel is damaged, or, without ``unpack``, if
    its RECORD has no digest of a member.
    """
    old_home = source.dist_info
    new_home = "-".join(dest.name.split("-")[:2]) + ".dist-info"
    old_record = f"{old_home}/RECORD"
    record = f"{new_home}/RECORD"
    rows = {} if unpack else source.record(old_record)

    members: dict[str, _Member] = {}
    for path in source.members:
        if path == old_record:
            continue

        new_path = path
        if path.startswith(f"{old_home}/"):
            new_path = f"{new_home}{path.removeprefix(old_home)}"

        row = None if unpack else rows.get(path, ("", ""))
        members[new_path] = _old_member(source, path, new_path, row)

    for path, data in changed.items():
        attributes = 0
        if path in members:
            attributes = members[path].info.external_attr
        members[path] = _new_member(path, data, attributes)

    # .dist-info comes last, as the specification recommends, and RECORD at its end.
    paths = sorted(path for path in members if not path.startswith(f"{new_home}/"))
    paths += sorted(members.keys() - paths)
    ordered = [members[path] for path in paths]
    ordered.append(_make_record(record, ordered))
    _write_archive(dest, ordered, progress)


def _make_record(path: str, members: Iterable[_Member]) -> _Member:
    table = io.StringIO()
    # csv writes CRLF by default.
    writer = csv.writer(table, lineterminator="\n")
    for member in members:
        writer.writerow((member.info.filename, *member.row))

    # The row of RECORD itself has neither digest nor size.
    writer.writerow((path, "", ""))
    return _new_member(path, table.getvalue().encode())


def _write_archive(dest: Path, members: Sequence[_Member], progress: Progress) -> None:
    done = 0
    total = sum(member.info.compress_size for member in members)
    with dest.open("wb") as sink, zipfile.ZipFile(sink, "w") as archive:
        # zipfile has no method that copies stored bytes. So each member is written here, and added
        # to `filelist`: from that list, close() writes the archive's directory at `start_dir`.
        for member in members:
            member.info.header_offset = sink.tell()
            sink.write(member.info.FileHeader())

            for chunk in member.chunks():
                sink.write(chunk)
                done += len(chunk)
                progress(done, total)

            archive.filelist.append(member.info)
            archive.start_dir = sink.tell()


def set_tag(wheel: bytes, tag: str) -> bytes:
    """Return a WHEEL file with ``tag`` as its only tag, and patchkit as its generator."""
    fields = _REPLACED.sub(b"", wheel).rstrip(b"\n")
    return fields + f"\nGenerator: patchkit {__version__}\nTag: {tag}\n".encode()


def set_version(metadata: bytes, version: str) -> bytes:
    """Return the text of METADATA with another version."""
    line = f"Version: {version}".encode()
    return re.sub(rb"(?m)^Version:.*$", line, metadata, count=1)


def _old_member(
    source: WheelFile,
    path: str,
    new_path: str,
    row: tuple[str, str] | None,
) -> _Member:
    """Return a member that is copied from ``source`` as it is stored, with its row of RECORD.

    Without a row, the member is unpacked and gets a new row. Raises SourceError if the row has no
    digest.
    """
    old = source.members[path]
    info = _describe_member(new_path, old.file_size, old.CRC, old.external_attr)
    if row is None:
        row = (record_digest(source.unpacked(path)), str(old.file_size))
        return _Member(info, partial(source.unpacked, path), row)

    if not row[0]:
        raise damaged(str(source.path), f"its RECORD has no digest of {path}")
    info.compress_size = old.compress_size
    info.compress_type = old.compress_type
    return _Member(info, partial(source.stored, path), row)


def _new_member(path: str, data: bytes, attributes: int = 0) -> _Member:
    info = _describe_member(path, len(data), zlib.crc32(data), attributes)
    row = (record_digest([data]), str(len(data)))
    return _Member(info, lambda: [data], row)


def _describe_member(
    path: str,
    size: int,
    crc: int,
    attributes: int,
) -> zipfile.ZipInfo:
    """Return the header of a member that is stored without compression.

    Of its ``attributes``, only the executable bit is kept: the mode is 0755 or 0644.
    """
    info = zipfile.ZipInfo(path)  # its default date is 1980-01-01
    info.file_size = size
    info.compress_size = size
    info.CRC = crc
    info.create_system = _UNIX
    mode = 0o755 if attributes >> 16 & stat.S_IXUSR else 0o644
    info.external_attr = (stat.S_IFREG | mode) << 16
    return info


CUDA_LICENSE = "NVIDIA CUDA Toolkit EULA"
"""The name of a license for which SPDX has no identifier."""

UNLABELLED = "0" * 10
"""The place of the digest in a version, before the digest is known."""


_FORMAT = 4  # of a new wheel; goes up if the same request gives other bytes
# WHEEL repeats the build tag of the file name (PEP 427), which the new name has not.
_BUILD = re.compile(rb"^Build:.*\n", re.MULTILINE)


def as_text(value: object) -> str:
    """Return a value as JSON for a file of a wheel; keys are sorted, for reproducible bytes."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def digest_label(*texts: str) -> str:
    """Return a label for a local version: the first ten hex digits of the digest of all texts.

    If they are decimal digits only, the first is replaced by ``a``.
    """
    short = digest("\0".join(texts))[:10]
    # PEP 440 reads a segment of decimal digits as a number and drops leading zeros.
    return short if not short.isdigit() else f"a{short[1:]}"


@frozen
class NewWheel:
    """A wheel that is made of another one: its file name, its new members, and its facts."""

    filename: str
    members: Mapping[str, bytes]
    facts: Facts


def name_wheel(
    wheel: WheelFile,
    tag: str,
    facts: Facts,
    members: Mapping[str, bytes],
) -> NewWheel:
    """Name a wheel that is made of ``wheel`` by a digest of all its new members.

    ``facts["wheel"]`` is the version with UNLABELLED in the place of the digest; so do members that
    tell the version.
    """
    version = facts["wheel"]
    home = f"{wheel.distribution}-{version}.dist-info"
    metadata = wheel.read(f"{wheel.dist_info}/METADATA")
    build = wheel.read(f"{wheel.dist_info}/WHEEL")
    members = {
        **members,
        f"{home}/METADATA": set_version(metadata, version),
        f"{home}/WHEEL": set_tag(_BUILD.sub(b"", build), tag),
        f"{home}/{FACTS}": as_text(facts).encode(),
    }

    lines = [f"{_FORMAT}\n{wheel.sha256}\n{tag}\n"]
    lines += [f"{digest(data)}  {path}\n" for path, data in sorted(members.items())]
    label = version.partition("+")[2]
    final = label.replace(UNLABELLED, digest_label("".join(lines)))

    labelled = {}
    for path, data in members.items():
        # A library does not hold its version, and is large.
        if not data.startswith(MAGIC):
            data = data.replace(label.encode(), final.encode())
        labelled[path.replace(label, final)] = data

    version = version.replace(label, final)
    return NewWheel(
        filename=f"{wheel.distribution}-{version}-{tag}.whl",
        members=labelled,
        facts=facts | {"wheel": version},
    )
