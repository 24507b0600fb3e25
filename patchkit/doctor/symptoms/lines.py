"""Separate the text of a log line from the prefixes of its writers: time, host, process, rank.

Writers nest: journald around docker around Ray around vLLM around NCCL. Each prefix has a form of
its own. Prefixes are removed until none of these forms matches.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from patchkit.quoting import quoted
from patchkit.records import RECIPES, read_toml
from patchkit.runtime.rules.releases import refusal

STDIN = "standard input"

LONGEST = 8192
"""The most bytes of a line; a longer line is split into several."""

_FIRST_BYTES = 1 << 16  # enough to tell whether a file is a text
_UNPRINTED = re.compile(r"[\x00-\x07\x0b\x0e-\x1a\ufffd]")
ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])"
)
"""An escape sequence of a terminal, such as a colour."""

_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]+")
FORMS = read_toml(dict[str, Any], RECIPES / "doctor" / "log_lines.toml")
_PART = re.compile("|".join(FORMS["parts"]))
# The patterns of [parts] replace their names.
_PREFIXES = [
    re.compile(_PART.sub(lambda part: FORMS["parts"][part[0]], form))
    for form in FORMS["prefix"]
]
_QUOTES = [re.compile(form.encode()) for form in FORMS["quote"]]


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a log: its number from 1, its writer ``who``, and its text without prefixes.

    ``level`` is the level of the logger, ``stream`` the container or node. Each is "" if the
    line does not name it.
    """

    number: int
    who: str
    text: str
    level: str
    stream: str


def without_quotes(data: bytes) -> bytes:
    """Return lines without texts that programs quote, which may contain words of an error.

    Such texts are prompts, answers, and reasons why a tactic was skipped.
    """
    for quote in _QUOTES:
        data = quote.sub(rb"\1", data)

    return data


@lru_cache(maxsize=64)  # a line is read again in the windows of the lines near it
def log_line(number: int, raw: str) -> LogLine:
    """Return a line with its text separated from the prefixes of its writers.

    Escape sequences and unprintable characters are removed.
    """
    text = _UNSEEN.sub(" ", ESCAPES.sub("", raw))
    text = text.replace("\ufeff", "")

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
    """Yield the pieces of a text, without pieces of zeros at its start.

    Raise SourceError if the text is empty, UTF-16 or binary.
    """
    pieces = iter(chunks)

    # A log that was truncated while a program wrote it begins with megabytes of zero bytes.
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
