"""Write RECORD, which has the digest of each file, and find what in a wheel contradicts it."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.tags import parse_tag

from patchkit.errors import SourceError
from patchkit.wheel.file.wheelfile import WheelFile

_UNSIGNED = ("RECORD", "RECORD.jws", "RECORD.p7s")  # of .dist-info; PEP 427 gives them no digest


def digest_of(chunks: Iterable[bytes]) -> str:
    """Return the digest of some contents as RECORD writes it: ``sha256=…``."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return f"sha256={base64.urlsafe_b64encode(digest.digest()).rstrip(b'=').decode()}"


def record_text(rows: Iterable[tuple[str, str, str]], own: str) -> bytes:
    """Write RECORD: path, digest and size of each file, and its ``own`` path, which has neither."""
    text = io.StringIO()
    # csv writes CRLF by default.
    csv.writer(text, lineterminator="\n").writerows([*rows, (own, "", "")])
    return text.getvalue().encode()


def find_faults(path: Path) -> Iterator[str]:
    """Yield a sentence for each thing in a wheel that its name or its RECORD contradicts.

    A damaged wheel gives one such sentence, too. Raises StorageError if the disk fails.
    """
    try:
        with WheelFile(path) as wheel:
            yield from _find_contradictions(wheel)
    except SourceError as error:
        yield error.what.removeprefix(str(path)).removeprefix(":").lstrip()


def _find_contradictions(wheel: WheelFile) -> Iterator[str]:
    home, name = wheel.dist_info, wheel.name
    metadata = wheel.message("METADATA")
    said = metadata.get("Name", ""), metadata.get("Version", "")
    if not wheel.is_of(*said):
        yield f"METADATA is of {' '.join(said)}, not {name.pinned}"
    tags = wheel.message("WHEEL").get_all("Tag", [])
    # WHEEL lists tags one by one, a file name may join them: py2.py3-none-any (PEP 425).
    if set().union(*map(parse_tag, tags)) != parse_tag(name.tag):
        yield f"WHEEL says {', '.join(tags) or 'no tag'}, the file name {name.tag}"
    rows = wheel.record(f"{home}/RECORD")
    unsigned = {f"{home}/{file}" for file in _UNSIGNED}
    listed = {*rows, *unsigned}
    yield from (f"{path}: is not in RECORD" for path in wheel.members if path not in listed)
    for path, (digest, size) in rows.items():
        info = wheel.members.get(path)
        if info is None:
            yield f"{path}: is in RECORD only"
        elif path in unsigned:
            continue
        elif not digest.startswith("sha256="):
            yield f"{path}: has no sha256 in RECORD"
        elif size and str(info.file_size) != size:
            yield f"{path}: has {info.file_size} bytes, {size} in RECORD"
        elif digest_of(wheel.unpacked(path)) != digest:
            yield f"{path}: its sha256 is not the one in RECORD"
