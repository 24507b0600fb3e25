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
    kept = {row[0]: row for row in _record_rows(record) if row[0] not in dropped}
    return _write_record(record, kept.values(), back)


def rewrite_record(record: str, changed: Mapping[str, bytes], added: Iterable[str]) -> str:
    """Return RECORD with hashes and sizes for ``changed`` and lines for ``added``.

    Paths are relative to site-packages; a changed file that has no line yet was created. Added
    files carry no hash, as pip itself does for files that may change: the ledger names the digest
    of RECORD, so RECORD cannot name the ledger's.
    """
    rows = _record_rows(record)
    new = sorted({*changed, *added} - {row[0] for row in rows})
    return _write_record(record, [*rows, *([path, "", ""] for path in new)], changed)


def _write_record(record: str, rows: Iterable[list[str]], changed: Mapping[str, bytes]) -> str:
    """Return rows as RECORD's text, with the hash and the size of each changed file."""
    out = io.StringIO()
    # pip writes CRLF, uv writes LF; lines that do not change must stay as they are.
    writer = csv.writer(out, lineterminator="\r\n" if "\r\n" in record else "\n")
    for row in rows:
        data = changed.get(row[0])
        if data is None:
            writer.writerow(row)
        else:
            # PEP 376 and 427: URL-safe base64 without its padding.
            encoded = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
            writer.writerow([row[0], f"sha256={encoded.decode()}", str(len(data))])
    return out.getvalue()


def _record_rows(record: str) -> list[list[str]]:
    """Return the rows of RECORD. Raises SourceError if it is not as pip writes it."""
    try:
        # newline="": csv has to see the line ends as they are, quoted ones too.
        return [row for row in csv.reader(io.StringIO(record, newline="")) if row]
    except csv.Error as error:
        raise SourceError(
            f"RECORD cannot be read: {error}",
            why="it was edited, or its package was not installed by pip",
            hint="pip install --force-reinstall --no-deps vllm==<version>",
        ) from None
