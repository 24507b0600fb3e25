"""Take from a line of a log what its writers put before the text: time, host, process, rank.

Loggers nest: journald around docker around Ray around vLLM around NCCL. What each puts there has a
form of its own, and is taken off until nothing of that kind is left.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from patchkit.quoting import quoted
from patchkit.records import RECIPES, read_toml
from patchkit.runtime.rules.refusals import refusal

STDIN = "standard input"

LONGEST = 8192
"""Bytes of a line; a longer line is taken for several."""

_FIRST_BYTES = 1 << 16  # tell whether a file is a text
_UNPRINTED = re.compile(r"[\x00-\x07\x0b\x0e-\x1a\ufffd]")
_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])"
)
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]+")
FORMS = read_toml(dict[str, Any], RECIPES / "doctor" / "log_lines.toml")
_PART = re.compile("|".join(FORMS["parts"]))


def _compile_prefix(form: str) -> re.Pattern[str]:
    """Return the pattern of a form, with the words of [parts] filled in."""
    return re.compile(_PART.sub(lambda part: FORMS["parts"][part[0]], form))


_PREFIXES = [_compile_prefix(form) for form in FORMS["prefix"]]
_QUOTES = [re.compile(form.encode()) for form in FORMS["quote"]]


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a log: its number from 1, its writer ("" if the line names none), and the text.

    ``level`` is that of its logger, ``stream`` the container or node; "" if the line names none.
    """

    number: int
    who: str
    text: str
    level: str = ""
    stream: str = ""


def without_quotes(data: bytes) -> bytes:
    """Remove from lines what programs quote: prompts, answers, why a tactic was skipped."""
    for quote in _QUOTES:
        data = quote.sub(rb"\1", data)

    return data


@lru_cache(maxsize=64)  # a line is in the windows of those around it
def log_line(number: int, raw: str) -> LogLine:
    """Split the text of a line from what its writers put before it.

    Escape sequences and unprintable characters are removed.
    """
    text = _UNSEEN.sub(" ", _ESCAPES.sub("", raw))
    text = text.replace("\ufeff", "").rstrip()

    writers: dict[str, None] = {}
    level = ""
    stream = ""
    former = ""
    while text != former:
        former = text
        for prefix in _PREFIXES:
            match = prefix.match(text)
            if match is None:
                continue

            text = text[match.end() :]

            groups = match.groupdict()
            if "who" in groups:
                writers[groups["who"]] = None

            level = level or groups.get("level") or ""
            stream = stream or groups.get("stream") or ""
    return LogLine(
        number,
        " ".join(writers),
        text.rstrip(),
        level,
        stream,
    )


def text_chunks(chunks: Iterable[bytes], where: str) -> Iterator[bytes]:
    """Yield a text in pieces, as they come. Raise SourceError if it is empty or not UTF-8."""
    pieces = iter(chunks)

    # A log that was cut while it was written begins with zeros, megabytes of them.
    first = next((piece for piece in pieces if piece.strip(b"\0")), b"")
    start = first.lstrip(b"\0")[:_FIRST_BYTES]
    if not start:
        raise refusal("log-empty", where=where)

    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        file = () if where == STDIN else (where,)
        convert = quoted("iconv", "-f", "UTF-16", "-t", "UTF-8", *file)
        raise refusal(
            "log-utf16",
            where=where,
            convert=convert,
        )

    shown = start.decode(errors="replace")
    if 10 * len(_UNPRINTED.findall(shown)) > len(shown):
        raise refusal("log-binary", where=where)

    yield first
    yield from pieces
