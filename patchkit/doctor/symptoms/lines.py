"""Take from a line of a log what its writers put before the text: time, host, process, rank.

Loggers nest: journald around docker around Ray around vLLM around NCCL. What each puts there has a
form of its own, and is taken off until nothing of that kind is left.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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
    for quoted in _QUOTES:
        data = quoted.sub(rb"\1", data)
    return data


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
