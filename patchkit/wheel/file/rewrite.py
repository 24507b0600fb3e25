"""A wheel made from another one: what does not change is copied as it is stored.

No member is compressed anew: that would take minutes, and its bytes would depend on the version of
zlib. What changes or is new is stored. Only zip's basic form is written, without zip64.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from patchkit.elf import damaged
from patchkit.errors import SourceError
from patchkit.wheel.file.members import opened, small

Progress = Callable[[int, int], None]
"""Told the bytes done and the bytes in all."""

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_FILE_MARK, _CENTRAL_MARK, _END_MARK = b"PK\3\4", b"PK\1\2", b"PK\5\6"
_UNIX, _READER = 3, 20  # who wrote it, and the version of zip that reads it
_DATE, _TIME = 1 << 5 | 1, 0  # 1980-01-01, the earliest that a zip can hold
_UTF8 = 0x800
_SECRET = 0x1
_MOST_BYTES, _MOST_MEMBERS = (1 << 32) - (1 << 26), (1 << 16) - 1  # the rest is for headers
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """What becomes one member; ``offset`` is where the source has its bytes, ``data`` else."""

    path: str
    method: int
    crc: int
    stored: int
    size: int
    program: bool
    offset: int = 0
    data: bytes | None = None
    row: tuple[str, str] = ("", "")


def rewrite(
    source: Path,
    dest: Path,
    home: tuple[str, str],
    changed: Mapping[str, bytes],
    progress: Progress | None = None,
) -> None:
    """Write ``source`` anew as ``dest``, with ``changed`` in the place of its members or added.

    ``home`` is the .dist-info folder before and after; the paths of ``changed`` are those after.
    RECORD is made here: lines of what did not change are taken over. Members are sorted, .dist-info
    last, and bear one date. Raises SourceError if the wheel is damaged, or made to harm, or if
    its RECORD does not name a member.
    """
    record = f"{home[1]}/RECORD"
    with opened(source) as (bundle, infos), source.open("rb") as stream:
        rows = _rows(source, bundle, f"{home[0]}/RECORD")
        kept = [_kept(source, stream, info, home, rows) for info in infos]
        members = {m.path: m for m in kept if m.path not in changed and m.path != record}
        programs = {m.path for m in kept if m.program}
        members |= {path: _new(path, data, path in programs) for path, data in changed.items()}
        ordered = sorted(members.values(), key=lambda m: (m.path.startswith(f"{home[1]}/"), m.path))
        ordered.append(_new(record, _record(ordered, record), program=False))
        with dest.open("xb") as sink:
            _write(sink, stream, ordered, progress)


def _rows(source: Path, bundle: zipfile.ZipFile, record: str) -> dict[str, tuple[str, str]]:
    """The lines of RECORD: path → digest and size."""
    if record not in bundle.namelist():
        raise damaged(str(source), f"it has no {record}")
    data = small(source, bundle, bundle.getinfo(record))
    table = csv.reader(io.StringIO(data.decode(), newline=""))
    return {row[0]: (row[1], row[2]) for row in table if len(row) == 3}


def _kept(
    source: Path,
    stream: IO[bytes],
    info: zipfile.ZipInfo,
    home: tuple[str, str],
    rows: Mapping[str, tuple[str, str]],
) -> _Member:
    path, own = info.filename, f"{home[0]}/"
    if info.flag_bits & _SECRET:
        raise damaged(str(source), f"{path} is encrypted")
    row = rows.get(path, ("", ""))
    if not row[0] and path != f"{own}RECORD":
        raise damaged(str(source), f"its RECORD has no digest of {path}")
    return _Member(
        path=f"{home[1]}/{path.removeprefix(own)}" if path.startswith(own) else path,
        method=info.compress_type,
        crc=info.CRC,
        stored=info.compress_size,
        size=info.file_size,
        program=bool((info.external_attr >> 16) & stat.S_IXUSR),
        offset=_offset(source, stream, info),
        row=row,
    )


def _offset(source: Path, stream: IO[bytes], info: zipfile.ZipInfo) -> int:
    """Where the bytes of a member begin: behind its own header, which may differ in length."""
    stream.seek(info.header_offset)
    head = stream.read(_LOCAL.size)
    if len(head) < _LOCAL.size or not head.startswith(_FILE_MARK):
        raise damaged(str(source), f"{info.filename} is not where the list of members says")
    *_fields, name, extra = _LOCAL.unpack(head)
    return info.header_offset + _LOCAL.size + int(name) + int(extra)


def _new(path: str, data: bytes, program: bool) -> _Member:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return _Member(
        path=path,
        method=zipfile.ZIP_STORED,
        crc=zlib.crc32(data),
        stored=len(data),
        size=len(data),
        program=program,
        data=data,
        row=(f"sha256={digest}", str(len(data))),
    )


def _record(members: list[_Member], own: str) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows((member.path, *member.row) for member in members)
    writer.writerow((own, "", ""))
    return text.getvalue().encode()


def _write(
    sink: IO[bytes], stream: IO[bytes], members: list[_Member], progress: Progress | None
) -> None:
    total = sum(member.stored for member in members)
    if total > _MOST_BYTES or len(members) > _MOST_MEMBERS:
        raise SourceError("the wheel is larger than a zip without zip64 can be")
    done, directory = 0, []
    for member in members:
        directory.append(_central(member, sink.tell()))
        sink.write(_local(member))
        for chunk in _bytes(stream, member):
            sink.write(chunk)
            done += len(chunk)
            if progress:
                progress(done, total)
    start = sink.tell()
    sink.writelines(directory)
    count, size = len(members), sink.tell() - start
    sink.write(_END.pack(_END_MARK, 0, 0, count, count, size, start, 0))


def _bytes(stream: IO[bytes], member: _Member) -> Iterator[bytes]:
    if member.data is not None:
        yield member.data
        return
    stream.seek(member.offset)
    left = member.stored
    while left:
        chunk = stream.read(min(left, _CHUNK))
        if not chunk:
            raise damaged(stream.name, f"{member.path} is cut off")
        left -= len(chunk)
        yield chunk


def _common(member: _Member) -> tuple[int, ...]:
    """Fields that both headers of a member have, from the reader's version to the extra field."""
    name = member.path.encode()
    flags = 0 if member.path.isascii() else _UTF8
    sizes = (member.crc, member.stored, member.size)
    return (_READER, flags, member.method, _TIME, _DATE, *sizes, len(name), 0)


def _local(member: _Member) -> bytes:
    return _LOCAL.pack(_FILE_MARK, *_common(member)) + member.path.encode()


def _central(member: _Member, offset: int) -> bytes:
    mode = (stat.S_IFREG | (0o755 if member.program else 0o644)) << 16
    made_by = _UNIX << 8 | _READER
    fields = (made_by, *_common(member), 0, 0, 0, mode, offset)
    return _CENTRAL.pack(_CENTRAL_MARK, *fields) + member.path.encode()
