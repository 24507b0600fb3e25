"""Update the RECORD of an installed package, so that pip can still check and uninstall it."""

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
    """Return the text of a RECORD with the rows of some files changed, added or dropped.

    ``changed`` maps a path to its sha256 in hex and its size in bytes; a changed file without a row
    gets one. Paths are relative to site-packages. The rows of ``added`` files have no hash, since
    the ledger is among them, and it contains the digest of RECORD. Raises SourceError if the RECORD
    is not CSV.
    """
    try:
        # With newline="", csv gets the line ends unchanged, also those in quotes.
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
    # pip writes CRLF, uv writes LF. Rows that do not change must keep their bytes.
    line_end = "\r\n" if "\r\n" in record else "\n"
    writer = csv.writer(out, lineterminator=line_end)
    for row in rows:
        path = row[0]
        if path in changed:
            sha256, size = changed[path]
            # URL-safe base64 without padding (PEP 376 and 427).
            text = base64.urlsafe_b64encode(bytes.fromhex(sha256)).decode()
            writer.writerow([path, "sha256=" + text.rstrip("="), size])
        elif path not in dropped:
            writer.writerow(row)
    return out.getvalue()
