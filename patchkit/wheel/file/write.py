"""Write a wheel so that equal contents are equal bytes: sorted, dated 1980, with a new RECORD.

Nothing is compressed here: that would take minutes, and a deflated byte depends on the version of
zlib. What comes from another wheel unchanged is copied as it is stored there. Only zip's basic form
is written, without zip64.
"""

from __future__ import annotations

import csv
import io
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from patchkit import __version__
from patchkit.elf import damaged
from patchkit.errors import ProofError, SourceError
from patchkit.wheel.file.wheelfile import WheelFile, record_digest

EPOCH = 315532800
"""SOURCE_DATE_EPOCH of every build: 1980-01-01, the earliest time that a zip can hold."""

Progress = Callable[[int, int], None]
"""Takes the bytes written and the bytes in all."""

# APPNOTE.TXT of the zip format: 4.3.7 local header, 4.3.12 central header, 4.3.16 end.
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_FILE_MARK, _CENTRAL_MARK, _END_MARK = b"PK\3\4", b"PK\1\2", b"PK\5\6"
_UNIX, _READER = 3, 20  # who wrote it, and the version of zip that reads it
# MS-DOS: years since 1980 from bit 9 on, the month from bit 5 on, the day.
_DATE, _TIME = 1 << 5 | 1, 0  # 1980-01-01
_UTF8 = 0x800  # flag, bit 11: the name is UTF-8
_MOST_BYTES, _MOST_MEMBERS = (1 << 32) - (1 << 26), (1 << 16) - 1  # the rest is for headers
_REPLACED = re.compile(rb"^(Tag|Generator):.*(\n|\Z)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewMember:
    """A member to write: ``chunks`` gives its bytes as they are stored, ``row`` is for RECORD.

    ``attributes`` are the zip's external attributes, of which only the executable bit counts.
    """

    path: str
    chunks: Callable[[], Iterable[bytes]]
    row: tuple[str, str]
    size: int
    crc: int
    attributes: int
    stored: int
    method: int = zipfile.ZIP_STORED


def seal_wheel(
    raw: Path, folder: Path, platform: str, added: Mapping[str, str] | None = None
) -> Path:
    """Write a freshly built wheel anew into ``folder``, with one platform tag; return its path.

    ``added`` are texts that go into its .dist-info, by their path there; METADATA names those in
    ``licenses/``. Members are stored: most of a library is compressed already. Raises ProofError
    for a wheel without WHEEL, SourceError for a damaged one.
    """
    name, version, *_, interpreter, abi, _platform = raw.stem.split("-")
    home, tag = f"{name}-{version}.dist-info", f"{interpreter}-{abi}-{platform}"
    with WheelFile(raw) as wheel:
        if f"{home}/WHEEL" not in wheel.members:
            raise ProofError(f"{raw.name} holds no {home}/WHEEL", why="the build did not finish")
        changed = {f"{home}/{path}": text.encode() for path, text in (added or {}).items()}
        changed[f"{home}/WHEEL"] = set_tag(wheel.read(f"{home}/WHEEL"), tag)
        licenses = [p.removeprefix("licenses/") for p in added or () if p.startswith("licenses/")]
        if licenses:
            # PEP 639: License-File, behind the other fields and in front of the description.
            head, gap, body = wheel.read(f"{home}/METADATA").rstrip(b"\n").partition(b"\n\n")
            lines = [head, *(f"License-File: {license_}".encode() for license_ in sorted(licenses))]
            changed[f"{home}/METADATA"] = b"\n".join(lines) + gap + body + b"\n"
        members = {}
        for path, info in wheel.members.items():
            members[path] = NewMember(
                path=path,
                chunks=partial(wheel.unpacked, path),
                row=(record_digest(wheel.unpacked(path)), str(info.file_size)),
                size=info.file_size,
                crc=info.CRC,
                attributes=info.external_attr,
                stored=info.file_size,
            )
        sealed = folder / f"{name}-{version}-{tag}.whl"
        _write_zip(sealed, home, members, changed)
    return sealed


def rewrite_wheel(
    source: WheelFile,
    dest: Path,
    home: tuple[str, str],
    changed: Mapping[str, bytes],
    progress: Progress | None = None,
    dropped: Collection[str] = (),
) -> None:
    """Write ``source`` anew as ``dest``, with ``changed`` in the place of its members or added.

    ``home`` is the .dist-info folder before and after; the paths of ``changed`` are those after.
    Members that are ``dropped`` leave. What does not change keeps its line of RECORD. Raises
    SourceError if the wheel is damaged or its RECORD does not name a member.
    """
    own = f"{home[0]}/RECORD"
    rows = source.record(own)
    members = {}
    for path, info in source.members.items():
        if path in dropped:
            continue
        row = rows.get(path, ("", ""))
        # Its digest is taken over from upstream's RECORD, so one has to be there.
        if not row[0] and path != own:
            raise damaged(str(source.path), f"its RECORD has no digest of {path}")
        moved = path.startswith(f"{home[0]}/")
        after = f"{home[1]}/{path.removeprefix(f'{home[0]}/')}" if moved else path
        members[after] = NewMember(
            path=after,
            chunks=partial(source.stored, path),
            row=row,
            size=info.file_size,
            crc=info.CRC,
            attributes=info.external_attr,
            stored=info.compress_size,
            method=info.compress_type,
        )
    _write_zip(dest, home[1], members, changed, progress)


def set_tag(wheel: bytes, tag: str) -> bytes:
    """Return the text of a WHEEL file with this one tag, and patchkit as its generator."""
    rest = _REPLACED.sub(b"", wheel).rstrip(b"\n")
    return rest + f"\nGenerator: patchkit {__version__}\nTag: {tag}\n".encode()


def _write_zip(
    dest: Path,
    home: str,
    members: Mapping[str, NewMember],
    changed: Mapping[str, bytes],
    progress: Progress | None = None,
) -> None:
    """Write members in order, .dist-info last as the specification recommends, then RECORD."""

    def new(path: str, data: bytes) -> NewMember:
        return NewMember(
            path=path,
            chunks=lambda: [data],
            row=(record_digest([data]), str(len(data))),
            size=len(data),
            crc=zlib.crc32(data),
            attributes=members[path].attributes if path in members else 0,
            stored=len(data),
        )

    own = f"{home}/RECORD"
    chosen = {**members, **{path: new(path, data) for path, data in changed.items()}}
    chosen.pop(own, None)
    ordered = sorted(chosen.values(), key=lambda m: (m.path.startswith(f"{home}/"), m.path))
    record = io.StringIO()
    # csv writes CRLF by default; RECORD has neither digest nor size of itself.
    rows = csv.writer(record, lineterminator="\n")
    rows.writerows([*((member.path, *member.row) for member in ordered), (own, "", "")])
    ordered.append(new(own, record.getvalue().encode()))
    total = sum(member.stored for member in ordered)
    if total > _MOST_BYTES or len(ordered) > _MOST_MEMBERS:
        raise SourceError(
            f"{dest.name}: {total:,} bytes in {len(ordered):,} members do not fit into a zip",
            why="wheels are written without zip64, which holds 4 GB in 65,535 members",
            hint="leave extensions out, or build for fewer archs",
        )
    done, directory = 0, []
    with dest.open("wb") as sink:
        for member in ordered:
            path = member.path.encode()
            flags = 0 if member.path.isascii() else _UTF8
            sizes = (member.crc, member.stored, member.size, len(path), 0)
            # Both headers share these: from the reader's version to the extra field.
            common = (_READER, flags, member.method, _TIME, _DATE, *sizes)
            program = member.attributes >> 16 & stat.S_IXUSR
            mode = stat.S_IFREG | (0o755 if program else 0o644)
            # The upper half of the external attributes is st_mode, since the writer is Unix.
            fields = (_UNIX << 8 | _READER, *common, 0, 0, 0, mode << 16, sink.tell())
            directory.append(_CENTRAL.pack(_CENTRAL_MARK, *fields) + path)
            sink.write(_LOCAL.pack(_FILE_MARK, *common) + path)
            for chunk in member.chunks():
                sink.write(chunk)
                done += len(chunk)
                if progress:
                    progress(done, total)
        start = sink.tell()
        sink.writelines(directory)
        count, size = len(ordered), sink.tell() - start
        sink.write(_END.pack(_END_MARK, 0, 0, count, count, size, start, 0))
