"""Take from a line of a log what its writers put before the text: time, host, process, rank.

Loggers nest: journald around docker around Ray around vLLM around NCCL. What each puts there has a
form of its own, and is taken off until nothing of that kind is left.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from patchkit.errors import SourceError
from patchkit.quoting import quoted

STDIN = "standard input"

_READ = 1 << 16  # bytes that tell what it is
_UNPRINTED = re.compile(r"[\x00-\x07\x0b\x0e-\x1a\ufffd]")
LONGEST = 8192
"""Bytes of a line; what is longer is taken for several."""

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]+")
_CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d+)?"
_DAY = r"\d{4}-\d\d-\d\d"
_ZONE = r"(?:Z|[+-]\d\d:?\d\d)?"
_LEVEL = r"(?P<level>DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)"
# Where `who` is named, it tells one writer from another; the rest is the same for all of them. A
# `stream` is a container or a node: all that one start of a server writes.
_PREFIXES = tuple(
    map(
        re.compile,
        (
            r"\s*(?:>+|E)\s+(?=\S)",  # a quotation in a report, pytest
            rf"(?:{_DAY}[T ]{_CLOCK}{_ZONE})(?:\s+(?:stdout|stderr)\s+[FP](?=\s))?[:,]?\s+",
            rf"\[{_DAY}[T ]{_CLOCK}{_ZONE}\]\s+",
            rf"[A-Z][a-z]{{2}} [ \d]\d {_CLOCK}\s+[\w.-]+\s+(?P<who>[\w.@/()-]+(?:\[\d+\])?): ",
            r"[\w.-]+\s+(?P<who>[\w.@/-]+\[\d+\]|kernel|systemd): ",  # journald behind another date
            r"\[\s*\d+\.\d{6}\]\s",  # the kernel
            rf"\[[A-Z][a-z]{{2}} [A-Z][a-z]{{2}} [ \d]\d {_CLOCK} \d{{4}}\]\s",
            r"<\d>\s?",
            r"(?:#\d+\s+)?\d+\.\d{3}\s+(?=\S)",  # docker build
            r"(?P<who>(?P<stream>[A-Za-z][\w.-]*?))\s*\|\s+",  # docker compose
            r"(?P<who>\([\w:. -]+(?:, [\w=. ]+)*\bpid=\d+[^)\n]*\))\s?",  # vLLM, Ray
            rf"{_LEVEL}\s+(?:\d\d-\d\d\s+{_CLOCK}\s+)?\[[\w/.-]+:\d+\]\s?",  # vLLM
            rf"{_LEVEL}:?\s+(?=\S)",
            r"\[(?P<who>rank ?\d+)\]:?\s*",
            rf"\[[WEIF]\d{{4}} {_CLOCK}(?: \d+)? [\w/.-]+:\d+\]\s?",  # torch, in C++
            rf"[WEIF]\d{{4}} {_CLOCK}\s+\d+ [\w/.-]+:\d+\]\s?",
            r"(?P<who>[\w.-]+:\d+:\d+) \[\d+\]\s+(?:[\w./]+:\d+\s+)?(?=NCCL )",
        ),
    )
)
# What vLLM, SGLang and FlashInfer put into a line is not of the server: no error of it is one.
_QUOTES = tuple(
    map(
        re.compile,
        (
            rb"(Received request [^\s:]{1,200}: prompt:)[^\n]+",
            rb"(Request [^\s:]{1,200} details: prompt:)[^\n]+",
            rb"(Generated response [^\n:]{1,200}: output:)[^\n]+",
            rb"(obj=GenerateReqInput\()[^\n]+",
            rb"(Skipping tactic )[^\n]+",
        ),
    )
)


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
                named = {name: value or groups.get(name) or "" for name, value in named.items()}
    return LogLine(number, " ".join(who), text.rstrip(), **named)


def text_chunks(chunks: Iterable[bytes], where: str) -> Iterator[bytes]:
    """Yield a text in pieces, as they come. Raises SourceError for what is empty or no UTF-8."""
    pieces = iter(chunks)
    # A log that was cut while it was written begins with zeros, megabytes of them.
    first = next((piece for piece in pieces if piece.strip(b"\0")), b"")
    start = first.lstrip(b"\0")[:_READ]
    if not start:
        raise SourceError(
            f"{where}: is empty",
            why="a container's log goes to standard error, too",
            hint="docker logs vllm 2>&1 | patchkit doctor --log -",
        )
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        file = () if where == STDIN else (where,)
        convert = quoted("iconv", "-f", "UTF-16", "-t", "UTF-8", *file)
        raise SourceError(
            f"{where}: is UTF-16, not UTF-8",
            why="PowerShell writes that",
            hint=" | ".join((convert, "patchkit doctor --log -")),
        )
    shown = start.decode(errors="replace")
    if 10 * len(_UNPRINTED.findall(shown)) > len(shown):
        raise SourceError(f"{where}: is binary, not a text", hint="name the log itself")
    yield first
    yield from pieces
