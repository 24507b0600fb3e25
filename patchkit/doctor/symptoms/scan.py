"""Look for many texts in a log of any length: in a stream, with little memory.

grep selects the lines that contain an anchor, and the lines around them: it reads a gigabyte in
seconds, for hundreds of texts at once. Only these few lines are matched with the texts' patterns.
"""

import re
from codecs import getincrementaldecoder
from collections import deque
from collections.abc import (
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from functools import cache
from io import IncrementalNewlineDecoder
from itertools import chain
from typing import NamedTuple

from patchkit.doctor.symptoms.lines import (
    FORMS,
    LONGEST,
    LogLine,
    log_line,
    without_quotes,
)
from patchkit.doctor.symptoms.symptom import TextPattern
from patchkit.errors import HostError
from patchkit.follow import Follow

BEFORE = 3
"""Lines in front of a line that may matter which are read with it, since texts span several."""
BEHIND = 10
"""Lines behind such a line which are read with it."""

SEVERE_LINE = "a line whose level says that something failed"
"""The hits of this name are lines, not texts."""

_SEVERE = FORMS["severe"]
_WINDOW = BEFORE + 1 + BEHIND
_MOST_HITS = 50  # of a text that are kept
_START = 5  # characters by which anchors are looked up: the least that an anchor has
_MOST_SEARCHED = 500_000_000  # characters, times texts: a quarter of a minute
_MOST_LOOKS = 3  # lines of a kind that are looked at
_NUMBERED = re.compile(r"(\d+)([:-])(.*)", re.DOTALL)
_DIGITS = re.compile("[0-9]+")
_HARMLESS = re.compile("|".join(_SEVERE["harmless"]))
_LONG = re.compile(rb"[^\n]{%d}(?!\n)" % LONGEST)
_SHOWN = 1000  # characters of a line around the one that is looked at
_ANSWERED = {
    kind: [re.compile(form.encode()) for form in forms]
    for kind, forms in FORMS["answered"].items()
}

_compiled = cache(re.compile)
"""`re` itself remembers 512 patterns, and a log may have texts of 4,000."""

Answers = dict[tuple[str, str], int]
"""Kind of an answer to a request, and stream → the last line which tells of such an answer."""


class GrepLine(NamedTuple):
    """A line as grep prints it; a line without an anchor is near a line that has one."""

    number: int
    text: str
    has_anchor: bool


@dataclass(frozen=True, slots=True)
class Hit:
    """A place where a text matches: the number and writer of its first line, and {name} → value.

    ``text`` are all lines of the match, joined by line feeds. ``level`` is the level of the
    logger, "" if the line names none.
    """

    number: int
    who: str
    text: str
    values: dict[str, str]
    level: str = ""


@dataclass(slots=True)
class Scan:
    """The texts that a stream has: text → hits, and text → number of the last line with it.

    ``lines`` is number → text of the lines around the first hit of each text.
    """

    hits: dict[str, list[Hit]] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    lines: dict[int, str] = field(default_factory=dict)

    def hits_of(self, texts: Iterable[str]) -> Iterator[Hit]:
        """Yield the hits of these texts."""
        return (hit for text in texts for hit in self.hits.get(text, ()))

    def first_line_of(self, texts: Iterable[str]) -> int:
        """Return the first line that has one of these texts, 0 for none."""
        return min((hit.number for hit in self.hits_of(texts)), default=0)

    def last_line_of(self, texts: Iterable[str]) -> int:
        """Return the last line that has one of these texts, 0 for none."""
        return max((self.last.get(text, 0) for text in texts), default=0)

    def add(
        self,
        text: str,
        hit: Hit,
        window: Sequence[GrepLine],
    ) -> bool:
        """Add a hit of a text, and return whether it is a new one.

        A text with two anchors leads to the same hit twice. ``window`` are the lines around it.
        """
        hits = self.hits.setdefault(text, [])
        if any(earlier.number == hit.number for earlier in hits):
            return False

        self.last[text] = hit.number
        if not hits:
            self.lines |= {line.number: line.text[:_SHOWN] for line in window}

        if len(hits) < _MOST_HITS:
            hits.append(hit)

        return True


@dataclass(slots=True)
class _Kind:
    """A kind of lines, which differ only by numbers: their stream and their texts.

    ``looks`` is the number of these lines that were looked at.
    """

    stream: str
    texts: dict[str, None] = field(default_factory=dict)
    looks: int = 0


@dataclass(slots=True)
class LogScan:
    """The texts that a log has, by stream: the name of a container or node, "" if lines name none.

    ``streams`` has the texts of a server's last start, ``before`` those of the start before that;
    ``begun`` counts the starts, ``answered`` has the last answers, and ``unread`` says what was
    not looked at, "" if all was.
    """

    streams: dict[str, Scan] = field(default_factory=dict)
    before: dict[str, Scan] = field(default_factory=dict)
    begun: int = 0
    answered: Answers = field(default_factory=dict)
    unread: str = ""

    def begin(self, stream: str, kinds: Iterable[_Kind]) -> None:
        """Begin a new start of a server in a stream.

        One more line of each of the ``kinds`` will be looked at, since the new start has no hits.
        """
        for kind in kinds:
            kind.looks = min(kind.looks, _MOST_LOOKS - 1)

        if stream in self.streams:
            self.before[stream] = self.streams[stream]

        self.streams[stream] = Scan()
        self.begun += 1

    def note_repeat(self, kind: _Kind, number: int) -> None:
        """Note a line without looking at it: enough lines of its kind were looked at."""
        self.streams[kind.stream].last |= dict.fromkeys(kind.texts, number)


def merged_scan(streams: Mapping[str, Scan]) -> Scan:
    """Return the texts of several streams as if they were one."""
    merged = Scan()
    for part in streams.values():
        for text, hits in part.hits.items():
            merged.hits.setdefault(text, []).extend(hits)
            last_line = merged.last.get(text, 0)
            merged.last[text] = max(part.last[text], last_line)
        merged.lines |= part.lines

    for hits in merged.hits.values():
        hits.sort(key=lambda hit: hit.number)

    return merged


def scan(
    chunks: Iterable[bytes],
    texts: Sequence[TextPattern],
    quoting: Collection[str],
    starts: Collection[str],
    most: int = _MOST_SEARCHED,
) -> LogScan:
    """Return the places of texts in a log, which comes in pieces of any size.

    A hit within a hit of a longer text of ``quoting`` does not count: a note may quote an error
    that did not happen. A text of ``starts`` means that a server starts. After ``most`` characters,
    each counted once and once more for each text that is looked for in it, the rest is unread.

    Raise what ``chunks`` raises, and HostError if grep does not run.
    """
    log = LogScan()
    kinds: dict[str, _Kind] = {}
    anchored = [(anchor, text) for text in texts for anchor in text.anchors]
    by_start: _ByStart = {}
    for anchor, text in anchored:
        by_start.setdefault(anchor[:_START], []).append((anchor, text))

    searched = 0
    whole_lines = _whole_lines(chunks, log.answered)
    anchors = {*_SEVERE["anchors"], *dict(anchored)}
    for window, line in _line_windows(whole_lines, anchors):
        shape = _DIGITS.sub("0", line.text)
        kind = kinds.get(shape)
        if kind and kind.looks >= _MOST_LOOKS:
            log.note_repeat(kind, line.number)
            continue

        if searched > most:
            log.unread = (
                f"after line {line.number}: {len(kinds)} different lines were looked at"
            )
            break

        read_lines = [log_line(near.number, near.text[:_SHOWN]) for near in window]
        middle = log_line(line.number, line.text)
        read_lines[window.index(line)] = middle
        if kind is None:
            kind = kinds[shape] = _Kind(middle.stream)

        anchored_texts = _anchored_texts(middle.text.lower(), by_start)
        length = sum(len(near.text) for near in read_lines)
        searched += length * (1 + len(anchored_texts))
        hits = list(_find_hits(read_lines, middle, anchored_texts, quoting))

        if any(found_text in starts for found_text, _hit in hits):
            log.begin(kind.stream, kinds.values())

        kind.looks += 1
        part = log.streams.setdefault(kind.stream, Scan())
        for found_text, hit in hits:
            if part.add(found_text, hit, window):
                kind.texts[found_text] = None

    return log


# The first characters of anchors → these anchors, each with a text.
_ByStart = dict[str, list[tuple[str, TextPattern]]]

# A text, and its match in lines that are joined by line feeds.
_Match = tuple[TextPattern, re.Match[str]]


def _find_hits(
    window: Sequence[LogLine],
    line: LogLine,
    anchored_texts: Iterable[TextPattern],
    quoting: Collection[str],
) -> Iterator[tuple[str, Hit]]:
    """Yield each text that matches at least partly in ``line``, and its hit.

    The rest of the text may be in lines of the window that have the same writer or none.
    """
    neighbours = [neighbour for neighbour in window if neighbour.who in (line.who, "")]
    joined = "\n".join(neighbour.text for neighbour in neighbours)
    start = sum(
        len(neighbour.text) + 1
        for neighbour in neighbours
        if neighbour.number < line.number
    )
    end = start + len(line.text)

    matches: list[_Match] = []
    for text in anchored_texts:
        pattern = _compiled(text.expression, re.IGNORECASE)
        matches += ((text, match) for match in pattern.finditer(joined))

    if line.level in _SEVERE["levels"] and not _HARMLESS.match(line.text):
        yield SEVERE_LINE, Hit(line.number, line.who, line.text, {}, line.level)

    wider_matches = [pair for pair in matches if pair[0].text in quoting]

    for text, match in matches:
        touches_line = match.start() <= end and match.end() >= start
        if touches_line and not _is_quoted(text, match, wider_matches):
            yield text.text, _make_hit(match, neighbours)


def _anchored_texts(line: str, by_start: _ByStart) -> dict[TextPattern, None]:
    """Return the texts that have an anchor in a line of small letters, each once."""
    return {
        text: None
        for place in range(len(line))
        for anchor, text in by_start.get(line[place : place + _START], ())
        if line.startswith(anchor, place)
    }


def _is_quoted(
    text: TextPattern,
    match: re.Match[str],
    wider_matches: Iterable[_Match],
) -> bool:
    """Return whether a match is only a part of a match of a longer text that contains the text."""
    low = text.text.lower()
    for wider, wide_match in wider_matches:
        has_text = wider != text and low in wider.text.lower()
        starts_before = wide_match.start() <= match.start()
        if has_text and starts_before and match.end() <= wide_match.end():
            return True

    return False


def _make_hit(match: re.Match[str], lines: Sequence[LogLine]) -> Hit:
    before = match.string.count("\n", 0, match.start())
    behind = match.string.count("\n", 0, match.end()) + 1
    first_line = lines[before]
    return Hit(
        first_line.number,
        first_line.who,
        "\n".join(line.text for line in lines[before:behind]),
        match.groupdict(),
        first_line.level,
    )


def _line_windows(
    chunks: Iterable[bytes],
    anchors: Iterable[str],
) -> Iterator[tuple[Sequence[GrepLine], GrepLine]]:
    """Yield each line that has an anchor, with the lines around it.

    Raise HostError if grep does not run.
    """
    lines: deque[GrepLine | None] = deque([None] * _WINDOW, maxlen=_WINDOW)
    # In the locale C grep matches bytes, since a log need not be UTF-8.
    grep = Follow(
        "grep",
        "-aniF",
        f"-B{BEFORE}",
        f"-A{BEHIND}",
        # Linux takes no argument of 128 KiB, which all of them together are.
        *(f"-e{anchor}" for anchor in sorted(anchors)),
        given=chunks,
        env={"LC_ALL": "C"},
    )
    with grep as running:
        for printed in chain(filter(None, running), ["--"]):
            for line in _parse_printed(printed):
                lines.append(line)
                middle = lines[BEFORE]
                if middle and middle.has_anchor:
                    yield [near for near in lines if near], middle

    if running.done.status not in (0, 1):  # 1: nothing matches
        raise running.done.error(HostError)


def _parse_printed(printed: str) -> list[GrepLine] | list[None]:
    """Return the line that grep printed; for the ``--`` between groups of lines, ten times None.

    So no window has lines of the next group behind a line of this group.
    """
    parts = _NUMBERED.fullmatch(printed.rstrip("\n"))
    if parts is None:
        return [None] * BEHIND

    number, sign, text = parts.groups()
    return [GrepLine(int(number), text, has_anchor=sign == ":")]


def _whole_lines(
    chunks: Iterable[bytes],
    answered: Answers,
) -> Iterator[bytes]:
    """Yield whole lines without quoted texts, several at once; a line that is too long in pieces.

    Store the last answers in ``answered``.
    """
    latin_1 = getincrementaldecoder("latin-1")()
    line_feeds = IncrementalNewlineDecoder(latin_1, translate=True)
    unfinished = b""
    number = 0
    skips_line = False  # the rest of the current line is part of a quoted text
    for chunk in chunks:
        data = unfinished + line_feeds.decode(chunk).encode("latin-1")

        if skips_line:
            _quote, line_feed, data = data.partition(b"\n")
            if not line_feed:
                unfinished = b""
                continue
            skips_line = False

        end = data.rfind(b"\n") + 1
        lines = without_quotes(data[:end])
        unfinished = data[end:]

        if max(map(len, lines.split(b"\n"))) > LONGEST:
            lines = _LONG.sub(rb"\g<0>\n", lines)

        _note_answer(lines, number, answered)
        number += lines.count(b"\n")

        yield lines

        while len(unfinished) > LONGEST:
            piece = without_quotes(unfinished[:LONGEST])
            skips_line = len(piece) < LONGEST
            unfinished = b"" if skips_line else unfinished[LONGEST:]
            number += 1
            yield piece + b"\n"

    yield without_quotes(unfinished)


def _note_answer(
    lines: bytes,
    number: int,
    answered: Answers,
) -> None:
    """Store the last of these lines which tells of each kind of answer to a request.

    ``number`` is the number of lines before ``lines``.
    """
    for kind, forms in _ANSWERED.items():
        answers = chain.from_iterable(form.finditer(lines) for form in forms)
        place = max((answer.start() for answer in answers), default=-1)
        if place < 0:
            continue

        begin = lines.rfind(b"\n", 0, place) + 1
        before = lines[begin:place].decode(errors="replace")
        stream = log_line(0, before).stream

        lines_before = lines.count(b"\n", 0, begin)
        answered[kind, stream] = number + lines_before + 1
