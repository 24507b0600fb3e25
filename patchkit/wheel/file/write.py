"""Write a wheel so that equal contents are equal bytes: sorted, dated 1980, with a new RECORD.

Nothing is compressed here: that would take minutes, and a deflated byte depends on the version of
zlib. What comes from another wheel unchanged is copied as it is stored there.
"""

from __future__ import annotations

import csv
import io
import re
import stat
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path

from patchkit import __version__
from patchkit.elf import damaged
from patchkit.source.archive import Progress
from patchkit.wheel.file.wheelfile import WheelFile, record_digest

EPOCH = 315532800
"""SOURCE_DATE_EPOCH of every build: 1980-01-01, the earliest time that a zip can hold."""

_UNIX = 3  # who wrote it: the upper half of the external attributes is st_mode then
_REPLACED = re.compile(rb"^(Tag|Generator):.*(\n|\Z)", re.MULTILINE)

_Member = tuple[zipfile.ZipInfo, Callable[[], Iterable[bytes]], tuple[str, str]]
"""A member to write: its header, what gives its bytes as they are stored, and its row of RECORD."""


def seal_wheel(
    raw: Path,
    folder: Path,
    platform: str,
    added: Mapping[str, str] | None = None,
    replaced: Mapping[str, bytes] | None = None,
) -> Path:
    """Write a freshly built wheel anew into ``folder``, with one platform tag; return its path.

    ``added`` are texts that go into its .dist-info, by their path there; METADATA names those in
    ``licenses/``. Members that are ``replaced`` get these bytes. Members are stored: most of a
    library is compressed already. Raises SourceError for a damaged wheel.
    """
    name, version, *_, interpreter, abi, _platform = raw.stem.split("-")
    home, tag = f"{name}-{version}.dist-info", f"{interpreter}-{abi}-{platform}"
    sealed = folder / f"{name}-{version}-{tag}.whl"
    with WheelFile(raw) as wheel:
        changed = {
            f"{home}/{path}": text.encode() for path, text in (added or {}).items()
        }
        changed |= replaced or {}
        changed[f"{home}/WHEEL"] = set_tag(wheel.read(f"{home}/WHEEL"), tag)
        licenses = [
            p.removeprefix("licenses/")
            for p in added or ()
            if p.startswith("licenses/")
        ]
        if licenses:
            # PEP 639: License-File, behind the other fields and in front of the description.
            head, gap, body = (
                wheel.read(f"{home}/METADATA").rstrip(b"\n").partition(b"\n\n")
            )
            lines = [
                head,
                *(
                    f"License-File: {license_}".encode()
                    for license_ in sorted(licenses)
                ),
            ]
            changed[f"{home}/METADATA"] = b"\n".join(lines) + gap + body + b"\n"
        rewrite_wheel(wheel, sealed, (home, home), changed, unpack=True)
    return sealed


def rewrite_wheel(
    source: WheelFile,
    dest: Path,
    home: tuple[str, str],
    changed: Mapping[str, bytes],
    progress: Progress | None = None,
    dropped: Collection[str] = (),
    *,
    unpack: bool = False,
) -> None:
    """Write ``source`` anew as ``dest``, with ``changed`` in the place of its members or added.

    ``home`` is the .dist-info folder before and after; the paths of ``changed`` are those after.
    Members that are ``dropped`` leave. What does not change keeps its bytes and its line of RECORD;
    with ``unpack`` it is stored without compression, and gets a new line. Raises SourceError if the
    wheel is damaged or its RECORD does not name a member.
    """
    before, record = f"{home[0]}/RECORD", f"{home[1]}/RECORD"
    rows = {} if unpack else source.record(before)
    members: dict[str, _Member] = {}
    for path, old in source.members.items():
        if path in dropped or path == before:
            continue
        moved = path.startswith(f"{home[0]}/")
        after = f"{home[1]}/{path.removeprefix(f'{home[0]}/')}" if moved else path
        info = _describe_member(after, old.file_size, old.CRC, old.external_attr)
        if unpack:
            row = record_digest(source.unpacked(path)), str(old.file_size)
        else:
            row = rows.get(path, ("", ""))
            info.compress_size, info.compress_type = (
                old.compress_size,
                old.compress_type,
            )
        # Its digest is taken over from upstream's RECORD, so one has to be there.
        if not row[0]:
            raise damaged(str(source.path), f"its RECORD has no digest of {path}")
        members[after] = (
            info,
            partial(source.unpacked if unpack else source.stored, path),
            row,
        )
    for path, data in changed.items():
        attributes = members[path][0].external_attr if path in members else 0
        members[path] = _new_member(path, data, attributes)
    # .dist-info last, as the specification recommends, and RECORD after all of it.
    ordered = [
        members[p]
        for p in sorted(members, key=lambda p: (p.startswith(f"{home[1]}/"), p))
    ]
    table = io.StringIO()
    # csv writes CRLF by default; RECORD has neither digest nor size of itself.
    writer = csv.writer(table, lineterminator="\n")
    writer.writerows(
        [*((info.filename, *row) for info, _, row in ordered), (record, "", "")]
    )
    ordered.append(_new_member(record, table.getvalue().encode()))
    done, total = 0, sum(info.compress_size for info, *_ in ordered)
    with dest.open("wb") as sink, zipfile.ZipFile(sink, "w") as archive:
        # zipfile cannot copy what is stored; from this list it writes the directory at the end.
        for info, chunks, _row in ordered:
            info.header_offset = sink.tell()
            sink.write(info.FileHeader())
            for chunk in chunks():
                sink.write(chunk)
                done += len(chunk)
                if progress:
                    progress(done, total)
            archive.filelist.append(info)
            archive.start_dir = sink.tell()


def set_tag(wheel: bytes, tag: str) -> bytes:
    """Return the text of a WHEEL file with this one tag, and patchkit as its generator."""
    rest = _REPLACED.sub(b"", wheel).rstrip(b"\n")
    return rest + f"\nGenerator: patchkit {__version__}\nTag: {tag}\n".encode()


def _new_member(path: str, data: bytes, attributes: int = 0) -> _Member:
    info = _describe_member(path, len(data), zlib.crc32(data), attributes)
    return info, lambda: [data], (record_digest([data]), str(len(data)))


def _describe_member(
    path: str, size: int, crc: int, attributes: int
) -> zipfile.ZipInfo:
    """Return the header of a member that is not compressed; only its executable bit counts."""
    info = zipfile.ZipInfo(path)  # of 1980
    info.file_size = info.compress_size = size
    info.CRC, info.create_system = crc, _UNIX
    mode = 0o755 if attributes >> 16 & stat.S_IXUSR else 0o644
    info.external_attr = (stat.S_IFREG | mode) << 16
    return info
