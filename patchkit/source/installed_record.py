"""The RECORD of an installed package, kept true so that pip check and uninstall stay right."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
from collections.abc import Iterable, Mapping

from patchkit.errors import SourceError


def restored_record(record: str, originals: Mapping[str, bytes | None], gone: Iterable[str]) -> str:
    """Return RECORD without a patch: ``originals`` by path, None for files that the patch created.

    For a package that was patched before pip installed it, so that no RECORD of upstream's is
    kept. ``gone`` are patchkit's own files.
    """
    back = {path: data for path, data in originals.items() if data is not None}
    dropped = {*gone, *(originals.keys() - back.keys())}
    kept = {row[0]: row for row in _rows(record) if row and row[0] not in dropped}
    out = io.StringIO()
    writer = csv.writer(out, lineterminator=_line_end(record))
    writer.writerows(_row(path, back) if path in back else row for path, row in kept.items())
    return out.getvalue()


def rewrite_record(record: str, changed: Mapping[str, bytes], added: Iterable[str]) -> str:
    """Return RECORD with hashes and sizes for ``changed`` and lines for ``added``.

    Paths are relative to site-packages; a changed file that has no line yet was created. Added
    files carry no hash, as pip itself does for files that may change: the ledger names the digest
    of RECORD, so RECORD cannot name the ledger's.
    """
    rows = _rows(record)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator=_line_end(record))
    for row in rows:
        if row:
            writer.writerow(_row(row[0], changed) if row[0] in changed else row)
    known = {row[0] for row in rows if row}
    for path in sorted({*changed, *added} - known):
        writer.writerow(_row(path, changed))
    return out.getvalue()


def _rows(record: str) -> list[list[str]]:
    """Return the rows of RECORD. Raises SourceError if it is not as pip writes it."""
    try:
        # newline="": csv has to see the line ends as they are, quoted ones too.
        return list(csv.reader(io.StringIO(record, newline="")))
    except csv.Error as error:
        raise SourceError(
            f"RECORD cannot be read: {error}",
            why="it was edited, or its package was not installed by pip",
            hint="pip install --force-reinstall --no-deps vllm==<version>",
        ) from None


def _line_end(record: str) -> str:
    # pip writes CRLF, uv writes LF; lines that do not change must stay as they are.
    return "\r\n" if "\r\n" in record else "\n"


def _row(path: str, changed: Mapping[str, bytes]) -> list[str]:
    data = changed.get(path)
    return [path, "", ""] if data is None else [path, _hash(data), str(len(data))]


def _hash(data: bytes) -> str:
    # PEP 376 and 427: URL-safe base64 without its padding.
    encoded = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return f"sha256={encoded.decode()}"
