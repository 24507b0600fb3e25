"""The RECORD of an installed package, kept true so that pip check and uninstall stay right."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
from collections.abc import Iterable, Mapping


def rewrite_record(record: str, changed: Mapping[str, bytes], added: Iterable[str]) -> str:
    """RECORD text with hashes and sizes for ``changed`` and lines for ``added``.

    Paths are relative to site-packages; a changed file that has no line yet was created. Added
    files carry no hash, as pip itself does for files that may change: the ledger names the digest
    of RECORD, so RECORD cannot name the ledger's.
    """
    rows = list(csv.reader(io.StringIO(record, newline="")))
    out = io.StringIO()
    # pip writes CRLF, uv writes LF; lines that do not change must stay as they are.
    writer = csv.writer(out, lineterminator="\r\n" if "\r\n" in record else "\n")
    for row in rows:
        if row:
            writer.writerow(_row(row[0], changed) if row[0] in changed else row)
    known = {row[0] for row in rows if row}
    for path in sorted({*changed, *added} - known):
        writer.writerow(_row(path, changed))
    return out.getvalue()


def _row(path: str, changed: Mapping[str, bytes]) -> list[str]:
    data = changed.get(path)
    return [path, "", ""] if data is None else [path, _hash(data), str(len(data))]


def _hash(data: bytes) -> str:
    encoded = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return f"sha256={encoded.decode()}"
