"""The RECORD of an installed package, kept true so that pip check and uninstall stay right."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
from collections.abc import Iterable, Mapping


def rewrite_record(record: str, changed: Mapping[str, bytes], added: Iterable[str]) -> str:
    """RECORD text with new hashes and sizes for ``changed`` and lines for ``added``.

    Paths are relative to site-packages. Added files carry no hash, as pip itself does for files
    that may change: the ledger names the digest of RECORD, so RECORD cannot name the ledger's.
    """
    rows = list(csv.reader(io.StringIO(record, newline="")))
    out = io.StringIO()
    # pip writes CRLF, uv writes LF; lines that do not change must stay as they are.
    writer = csv.writer(out, lineterminator="\r\n" if "\r\n" in record else "\n")
    for row in rows:
        if row and row[0] in changed:
            writer.writerow([row[0], _hash(changed[row[0]]), str(len(changed[row[0]]))])
        elif row:
            writer.writerow(row)
    known = {row[0] for row in rows if row}
    for path in sorted(set(added) - known):
        writer.writerow([path, "", ""])
    return out.getvalue()


def _hash(data: bytes) -> str:
    encoded = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return f"sha256={encoded.decode()}"
