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

_READ = 1 << 16  # bytes that tell what it is
_UNPRINTED = re.compile(r"[\x00-\x07\x0b\x0e-\x1a\ufffd]")
LONGEST = 8192
"""Bytes of a line; what is longer is taken for several."""

_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])"
)
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]+")
FORMS = read_toml(dict[str, Any], RECIPES / "doctor" / "log_lines.toml")
_PART = re.compile("|".join(FORMS["parts"]))
_PREFIXES = [
    re.compile(_PART.sub(lambda m: FORMS["parts"][m[0]], f)) for f in FORMS["prefix"]
]
_QUOTES = [re.compile(form.encode()) for form in FORMS["quote"]]


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a log: its number from 1, who wrote it ("" if it does not say), and the text.

    ``level`` is that of its logger, ``stream`` the container or node; "" if it does not say.
    """

    number: int
    who: str
    text: str
    level: str = ""
    stream: str = ""


def without_quotes(data: bytes) -> bytes:
    """Return lines without what others wrote: prompts, answers, why a tactic was skipped."""
    for quote in _QUOTES:
        data = quote.sub(rb"\1", data)
    return data


@lru_cache(maxsize=64)  # a line is in the windows of those around it
def log_line(number: int, raw: str) -> LogLine:
    """Return a line without escapes, unprintable characters and what its writers put before it."""
    text = _UNSEEN.sub(" ", _ESCAPES.sub("", raw)).replace("\ufeff", "").rstrip()
    who: list[str] = []
    named = {"level": "", "stream": ""}
    taken = True
    while taken:
        taken = False
        for prefix in _PREFIXES:
            found = prefix.match(text)
            if found and found.end():
                text, taken = text[found.end() :], True
                groups = found.groupdict()
                if "who" in groups and groups["who"] not in who:
                    who.append(groups["who"])
                named = {
                    name: value or groups.get(name) or ""
                    for name, value in named.items()
                }
    return LogLine(number, " ".join(who), text.rstrip(), **named)


def text_chunks(chunks: Iterable[bytes], where: str) -> Iterator[bytes]:
    """Yield a text in pieces, as they come. Raises SourceError for what is empty or no UTF-8."""
    pieces = iter(chunks)
    # A log that was cut while it was written begins with zeros, megabytes of them.
    first = next((piece for piece in pieces if piece.strip(b"\0")), b"")
    start = first.lstrip(b"\0")[:_READ]
    if not start:
        raise refusal("log-empty", where=where)
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        file = () if where == STDIN else (where,)
        convert = quoted("iconv", "-f", "UTF-16", "-t", "UTF-8", *file)
        raise refusal("log-utf16", where=where, convert=convert)
    shown = start.decode(errors="replace")
    if 10 * len(_UNPRINTED.findall(shown)) > len(shown):
        raise refusal("log-binary", where=where)
    yield first
    yield from pieces
