"""The RECORD of an installed package, kept true so that pip check and uninstall stay right."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Collection, Iterable, Mapping

from patchkit.errors import SourceError


def rewrite_record(
    record: str,
    changed: Mapping[str, tuple[str, int]],
    added: Iterable[str] = (),
    dropped: Collection[str] = (),
) -> str:
    """Return RECORD with ``changed`` as it is now, lines for ``added``, none for ``dropped``.

    ``changed``: path → its sha256, in hex, and its size. Paths are relative to site-packages; a
    changed file that has no line yet was created. Added files carry no hash, as pip itself does
    for files that may change: the ledger names the digest of RECORD, so RECORD cannot name the
    ledger's. Raises SourceError if RECORD is not as pip writes it.
    """
    try:
        # newline="": csv has to see the line ends as they are, quoted ones too.
        rows = [row for row in csv.reader(io.StringIO(record, newline="")) if row]
    except csv.Error as error:
        raise SourceError(
            f"RECORD cannot be read: {error}",
            why="it was edited, or its package was not installed by pip",
            hint="install the package again: pip install --force-reinstall --no-deps ...",
        ) from None

    listed = {row[0] for row in rows}
    rows += [[path, "", ""] for path in sorted({*changed, *added} - listed)]

    out = io.StringIO()
    # pip writes CRLF, uv writes LF; lines that do not change must stay as they are.
    line_end = "\r\n" if "\r\n" in record else "\n"
    writer = csv.writer(out, lineterminator=line_end)
    for row in rows:
        path = row[0]
        if path in changed:
            sha256, size = changed[path]
            # PEP 376 and 427: URL-safe base64 without its padding.
            encoded = base64.urlsafe_b64encode(bytes.fromhex(sha256))
            text = encoded.decode().rstrip("=")
            writer.writerow([path, f"sha256={text}", size])
        elif path not in dropped:
            writer.writerow(row)
    return out.getvalue()
