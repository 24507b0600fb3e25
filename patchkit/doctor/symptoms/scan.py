"""Look for many texts in a log of any length: in a stream, with little memory.

grep takes out the lines that may matter, with those around them: it reads a gigabyte in seconds,
for hundreds of texts at once. What is left is small, and looked at closely.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from patchkit.doctor.symptoms.lines import LONGEST, LogLine, log_line, without_quotes
from patchkit.doctor.symptoms.symptom import TextPattern
from patchkit.errors import HostError
from patchkit.follow import Follow

BEFORE, BEHIND = 3, 10  # lines around one that may matter: texts go over several
_MOST_HITS = 50  # that are kept of a text; the others are counted
_MOST_LINES = 100_000  # different ones that are looked at
_TRIED = 3  # how often a line is looked at that differs from others by numbers alone
_NUMBERED = re.compile(rb"(\d+)([:-])(.*)", re.DOTALL)
_DIGITS = re.compile(rb"\d+")
_LONG = re.compile(rb"[^\n]{%d}(?!\n)" % LONGEST)
_SHOWN = 1000  # bytes of a line around a hit
# 4xx is an answer, too: that request was wrong. /metrics and the list of models need no engine.
_ANSWERED = re.compile(
    rb'"(?:POST /[^ "\n]{1,200}|GET /health) HTTP/1.1" (?:200|4\d\d)'
)


@dataclass(frozen=True, slots=True)
class Hit:
    """A text that was found: the line that it begins in, its writer, what has names.

    ``text`` are all lines that it goes over; ``level`` is that of its logger, "" for none.
    """

    number: int
    who: str
    text: str
    values: dict[str, str]
    level: str = ""


@dataclass(slots=True)
class Scan:
    """What was found: hits by text, and the last line that each text was in.

    ``repeats`` are the texts of lines that were only counted. ``lines`` are those around the first
    hit of each text.
    """

    hits: dict[str, list[Hit]] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    repeats: Counter[tuple[str, ...]] = field(default_factory=Counter)
    lines: dict[int, str] = field(default_factory=dict)

    def hits_of(self, texts: Iterable[str]) -> Iterator[Hit]:
        """Yield where these texts were found."""
        return (hit for text in texts for hit in self.hits.get(text, ()))

    def count(self, *texts: str) -> int:
        """Return in how many places one of these texts was found."""
        places = {hit.number for hit in self.hits_of(texts)}
        repeats = (
            count
            for found, count in self.repeats.items()
            if not {*texts}.isdisjoint(found)
        )
        return len(places) + sum(repeats)

    def add(self, text: str, hit: Hit, window: Sequence[tuple[int, bytes]]) -> bool:
        """Add a hit, unless the other half of the text has found it already."""
        hits = self.hits.setdefault(text, [])
        if any(known.number == hit.number for known in hits):
            return False
        self.last[text] = hit.number
        if not hits:
            self.lines |= {
                n: raw[:_SHOWN].decode(errors="replace") for n, raw in window
            }
        if len(hits) < _MOST_HITS:
            hits.append(hit)
        else:
            self.repeats[text,] += 1
        return True


@dataclass(slots=True)
class _Kind:
    """Lines that differ by numbers alone: whose, what is in them, how often one was read."""

    stream: str
    texts: dict[str, None] = field(default_factory=dict)
    looks: int = 0


@dataclass(slots=True)
class LogScan:
    """What was found in a log by its streams: containers or nodes, "" for one that names none.

    ``streams`` have what the last start of a server wrote, ``before`` what the start before it
    did, and ``begun`` counts the starts. ``answered`` are the last lines that say that a request
    was answered. ``unread`` says what was not looked at, "" if all was.
    """

    streams: dict[str, Scan] = field(default_factory=dict)
    before: dict[str, Scan] = field(default_factory=dict)
    begun: Counter[str] = field(default_factory=Counter)
    answered: dict[str, int] = field(default_factory=dict)
    unread: str = ""

    def begin(self, stream: str, kinds: Iterable[_Kind]) -> None:
        """Take what follows in a stream for another start; known lines are read once more."""
        for kind in kinds:
            kind.looks = min(kind.looks, _TRIED - 1)
        if stream in self.streams:
            self.before[stream] = self.streams[stream]
        self.streams[stream] = Scan()
        self.begun[stream] += 1


def merged_scan(streams: Mapping[str, Scan]) -> Scan:
    """Return what was found in several streams as in one."""
    merged = Scan()
    for scan in streams.values():
        for text, hits in scan.hits.items():
            merged.hits.setdefault(text, []).extend(hits)
            merged.last[text] = max(scan.last[text], merged.last.get(text, 0))
        merged.repeats += scan.repeats
        merged.lines |= scan.lines
    for hits in merged.hits.values():
        hits.sort(key=lambda hit: hit.number)
    return merged


def scan(
    chunks: Iterable[bytes],
    texts: Sequence[TextPattern],
    quoting: Collection[str] = (),
    starts: Collection[str] = (),
) -> LogScan:
    """Return where texts are in a log, which comes in pieces of any size.

    What a text of ``quoting`` quotes, such as an error that may come, is not there by itself. With
    one of ``starts`` a server begins anew.

    Raises what ``chunks`` raises, HostError if grep does not run.
    """
    log = LogScan()
    kinds: dict[bytes, _Kind] = {}
    by_anchor: dict[str, list[TextPattern]] = {}
    for text in texts:
        for anchor in text.anchors:
            by_anchor.setdefault(anchor, []).append(text)
    for window, here in _line_windows(_whole_lines(chunks, log.answered), by_anchor):
        number, raw = window[here]
        key = _DIGITS.sub(b"0", raw)
        kind = kinds.get(key)
        if kind and kind.looks >= _TRIED:
            if kind.texts:
                part = log.streams[kind.stream]
                part.last.update(dict.fromkeys(kind.texts, number))
                part.repeats[tuple(kind.texts)] += 1
            continue
        if kind is None and len(kinds) >= _MOST_LINES:
            log.unread = (
                f"after line {number}: {_MOST_LINES} different lines were looked at"
            )
            break
        lines = [
            log_line(number, raw.decode(errors="replace")) for number, raw in window
        ]
        kind = kind or kinds.setdefault(key, _Kind(lines[here].stream))
        found = list(_find_texts(lines, here, by_anchor, quoting))
        if any(text.text in starts for text, _hit in found):
            log.begin(kind.stream, kinds.values())
        kind.looks += 1
        part = log.streams.setdefault(kind.stream, Scan())
        for text, hit in found:
            if part.add(text.text, hit, window):
                kind.texts[text.text] = None
    return log


def _find_texts(
    window: Sequence[LogLine],
    here: int,
    by_anchor: Mapping[str, Collection[TextPattern]],
    quoting: Collection[str],
) -> Iterator[tuple[TextPattern, Hit]]:
    """Yield the texts that are in a line; those around it complete it."""
    line = window[here]
    low = line.text.lower()
    near = [other for other in window if other.who == line.who or not other.who]
    whole = "\n".join(other.text for other in near)
    texts = {
        text: None
        for anchor in by_anchor
        if anchor in low
        for text in by_anchor[anchor]
    }
    matches = [
        (text, match) for text in texts for match in text.pattern.finditer(whole)
    ]
    start = sum(len(other.text) + 1 for other in near if other.number < line.number)
    for text, match in matches:
        if match.start() > start + len(line.text) or match.end() < start:
            continue
        if any(
            # It is there only as a part of another text.
            wider.start() <= match.start() <= match.end() <= wider.end()
            and other != text
            and text.text.lower() in other.text.lower()
            for other, wider in matches
            if other.text in quoting
        ):
            continue
        first = near[whole.count("\n", 0, match.start())]
        begin = whole.rfind("\n", 0, match.start()) + 1
        shown = whole[begin : whole.find("\n", match.end()) % (len(whole) + 1)]
        yield text, Hit(first.number, first.who, shown, match.groupdict(), first.level)


def _line_windows(
    given: Iterable[bytes], anchors: Iterable[str]
) -> Iterator[tuple[Sequence[tuple[int, bytes]], int]]:
    """Yield each line that has an anchor, within those around it, and its place there.

    Raises HostError if grep does not run.
    """
    nothing: tuple[int, bytes, bool] | None = None
    lines = deque([nothing] * (BEFORE + 1 + BEHIND), maxlen=BEFORE + 1 + BEHIND)
    with tempfile.NamedTemporaryFile() as file:
        file.write("\n".join(sorted(anchors)).encode())
        file.flush()
        options = ("-a", "-n", "-i", "-F", f"-B{BEFORE}", f"-A{BEHIND}")
        words = ("grep", *options, "-f", file.name)
        # In bytes: a log need not be UTF-8.
        with Follow(*words, given=given, env={"LC_ALL": "C"}) as running:
            for raw in chain(filter(None, running), ["--"]):
                parts = _NUMBERED.fullmatch(raw.encode().rstrip(b"\n"))
                # Between two groups stands --: nothing is behind the lines of the first one.
                new = (
                    [(int(parts[1]), parts[3], parts[2] == b":")]
                    if parts
                    else [nothing] * BEHIND
                )
                for line in new:
                    lines.append(line)
                    middle = lines[BEFORE]
                    if middle and middle[2]:
                        window = [each[:2] for each in lines if each]
                        yield window, window.index(middle[:2])
    if running.done.status not in (0, 1):  # 1: nothing was found
        raise running.done.error(HostError)


def _whole_lines(chunks: Iterable[bytes], answered: dict[str, int]) -> Iterator[bytes]:
    """Yield whole lines, several at once; one that is too long in pieces, without quotes.

    ``answered`` gets the last line of each stream that says that a request was answered.
    """
    rest, number, quoting = b"", 0, False
    for chunk in chunks:
        data = rest + chunk
        held = data[-1:] == b"\r"  # a line feed may come
        data = data[: len(data) - held].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        end = data.find(b"\n") + 1
        if quoting and not end:
            rest = b"\r" * held
            continue
        data = data[end:] if quoting else data
        end = data.rfind(b"\n") + 1
        whole, rest, quoting = (
            without_quotes(data[:end]),
            data[end:] + b"\r" * held,
            False,
        )
        if max(map(len, whole.split(b"\n"))) > LONGEST:
            whole = _LONG.sub(rb"\g<0>\n", whole)
        # The last line that says that an engine lives: a request was answered.
        near = max(0, whole.rfind(b' HTTP/1.1" ') - LONGEST)
        if found := next(reversed([*_ANSWERED.finditer(whole, near)]), None):
            begin = whole.rfind(b"\n", 0, found.start()) + 1
            stream = log_line(
                0, whole[begin : found.start()].decode(errors="replace")
            ).stream
            answered[stream] = number + whole.count(b"\n", 0, found.start()) + 1
        number += whole.count(b"\n")
        yield whole
        while len(rest) > LONGEST:
            piece = without_quotes(rest[:LONGEST])
            quoting = len(piece) < LONGEST
            rest = b"" if quoting else rest[LONGEST:]
            number += 1
            yield piece + b"\n"
    yield without_quotes(rest)
