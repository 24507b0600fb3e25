"""Take a log for a text, or say by name what else it is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from patchkit.errors import SourceError
from patchkit.quoting import quoted

STDIN = "standard input"

_READ = 1 << 16  # bytes that tell what it is
_UNPRINTED = re.compile(r"[\x00-\x07\x0b\x0e-\x1a\ufffd]")


def text_chunks(chunks: Iterable[bytes], where: str) -> Iterator[bytes]:
    """Yield a text in pieces, as they come. Raises SourceError for what is empty or no UTF-8."""
    pieces = iter(chunks)
    # A log that was cut while it was written begins with zeros, megabytes of them.
    first = next((piece for piece in pieces if piece.strip(b"\0")), b"")
    zeros = len(first) - len(first.lstrip(b"\0"))
    start = first[zeros // 2 * 2 :][:_READ]
    shown = start.lstrip(b"\0").decode(errors="replace")
    if not start:
        raise SourceError(
            f"{where}: is empty",
            why="a container's log goes to standard error, too",
            hint="docker logs vllm 2>&1 | patchkit doctor --log -",
        )
    if encoding := _two_byte_encoding(start):
        file = () if where == STDIN else (where,)
        convert = quoted("iconv", "-f", encoding, "-t", "UTF-8", *file)
        raise SourceError(
            f"{where}: is {encoding}, not UTF-8",
            why="PowerShell writes that",
            hint=" | ".join((convert, "patchkit doctor --log -")),
        )
    if 10 * len(_UNPRINTED.findall(shown)) > len(shown):
        raise SourceError(f"{where}: is binary, not a text", hint="name the log itself")
    yield first
    yield from pieces


def _two_byte_encoding(data: bytes) -> str:
    """Return which UTF-16 it is, "" for none: every other byte is 0 where the text is English."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16"
    even, odd = data[::2].count(0), data[1::2].count(0)
    if 3 * max(even, odd) < len(data) or 10 * min(even, odd) > max(even, odd):
        return ""
    return "UTF-16BE" if even > odd else "UTF-16LE"
