"""Look for many texts in a log of any length: in a stream, with little memory.

grep takes out the lines that may matter, with those around them: it reads a gigabyte in seconds,
for hundreds of texts at once. What is left is small, and looked at closely.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

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
_SHOWN = 1000  # bytes of a line around a hit
# 4xx is an answer, too: that request was wrong. /metrics and the list of models need no engine.
_ANSWERED = re.compile(rb'"(?:POST /[^ "\n]{1,200}|GET /health) HTTP/1.1" (?:200|4\d\d)')


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
    hit of each text, ``answered`` is the last line that says that a request was answered.
    """

    hits: dict[str, list[Hit]] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    repeats: Counter[tuple[str, ...]] = field(default_factory=Counter)
    lines: dict[int, str] = field(default_factory=dict)
    answered: int = 0

    def has(self, text: str) -> bool:
        """Return whether a text was found."""
        return text in self.hits

    def count(self, *texts: str) -> int:
        """Return in how many places one of these texts was found."""
        places = {hit.number for text in texts for hit in self.hits.get(text, ())}
        repeats = (count for found, count in self.repeats.items() if not {*texts}.isdisjoint(found))
        return len(places) + sum(repeats)

    def add(self, text: str, hit: Hit, window: Sequence[tuple[int, bytes]]) -> bool:
        """Add a hit, unless the other half of the text has found it already."""
        hits = self.hits.setdefault(text, [])
        if any(known.number == hit.number for known in hits):
            return False
        self.last[text] = hit.number
        if not hits:
            shown = ((number, raw[:_SHOWN].decode(errors="replace")) for number, raw in window)
            self.lines.update(shown)
        if len(hits) < _MOST_HITS:
            hits.append(hit)
        else:
            self.repeats[text,] += 1
        return True

    def repeat(self, number: int, texts: Iterable[str]) -> None:
        """Count a line that differs from others by numbers alone."""
        self.last.update(dict.fromkeys(texts, number))
        self.repeats[tuple(texts)] += 1


@dataclass(slots=True)
class LogScan:
    """What was found in a log by its streams: containers or nodes, "" for one that names none.

    ``streams`` have what the last start of a server wrote, ``before`` what the start before it
    did, and ``begun`` counts the starts. ``unread`` says what was not looked at, "" if all was.
    """

    streams: dict[str, Scan] = field(default_factory=dict)
    before: dict[str, Scan] = field(default_factory=dict)
    begun: Counter[str] = field(default_factory=Counter)
    unread: str = ""

    def begin(self, stream: str) -> None:
        """Take what follows in a stream for another start."""
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


@dataclass(slots=True)
class _Seen:
    """Lines that differ by numbers alone: whose they are, how often one was looked at, for what."""

    stream: str
    texts: dict[str, TextPattern] = field(default_factory=dict)
    looks: int = 0


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
    seen: dict[bytes, _Seen] = {}
    by_anchor = _group_by_anchor(texts)
    tried: Counter[bytes] = Counter()  # of this start
    answered: dict[str, int] = {}
    for window, here in _line_windows(_whole_lines(chunks, answered), texts):
        number, raw = window[here]
        key = _DIGITS.sub(b"0", raw)
        tried[key] += 1
        past = seen.get(key)
        if past and tried[key] > (1 if past.looks >= _TRIED else _TRIED):
            if past.texts:
                log.streams[past.stream].repeat(number, past.texts)
            continue
        if past is None and len(seen) >= _MOST_LINES:
            log.unread = f"after line {number}: {_MOST_LINES} different lines were looked at"
            break
        lines = [_log_line(number, raw) for number, raw in window]
        past = past or seen.setdefault(key, _Seen(lines[here].stream))
        # In a new start a line that is known is only looked at for what was in it before.
        looked = by_anchor if past.looks < _TRIED else _group_by_anchor(past.texts.values())
        past.looks += 1
        found = list(_find_texts(lines, here, looked, quoting))
        if any(text.text in starts for text, _hit in found):
            log.begin(past.stream)
            tried = Counter({key: 1})
        kept = log.streams.setdefault(past.stream, Scan())
        for text, hit in found:
            if kept.add(text.text, hit, window):
                past.texts[text.text] = text
    for stream, number in answered.items():
        if stream in log.streams:
            log.streams[stream].answered = number
    return log


def _group_by_anchor(texts: Iterable[TextPattern]) -> Mapping[str, Collection[TextPattern]]:
    found: dict[str, list[TextPattern]] = {}
    for text in texts:
        for anchor in text.anchors:
            found.setdefault(anchor, []).append(text)
    return found


@lru_cache(maxsize=64)  # a line is in the windows of those around it
def _log_line(number: int, raw: bytes) -> LogLine:
    return log_line(number, raw.decode(errors="replace"))


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
    texts = {text: None for anchor in by_anchor if anchor in low for text in by_anchor[anchor]}
    matches = [(text, match) for text in texts for match in text.pattern.finditer(whole)]
    quotes = [match for match in matches if match[0].text in quoting]
    start = sum(len(other.text) + 1 for other in near if other.number < line.number)
    for text, match in matches:
        if match.start() > start + len(line.text) or match.end() < start:
            continue
        if any(_is_quoted(text, match, *quote) for quote in quotes):
            continue
        first = near[whole.count("\n", 0, match.start())]
        begin = whole.rfind("\n", 0, match.start()) + 1
        shown = whole[begin : whole.find("\n", match.end()) % (len(whole) + 1)]
        yield text, Hit(first.number, first.who, shown, match.groupdict(), first.level)


def _is_quoted(
    text: TextPattern, match: re.Match[str], other: TextPattern, wider: re.Match[str]
) -> bool:
    """Return whether a text is there only as a part of another one."""
    around = wider.start() <= match.start() and match.end() <= wider.end()
    return around and other != text and text.text.lower() in other.text.lower()


def _line_windows(
    given: Iterable[bytes], texts: Sequence[TextPattern]
) -> Iterator[tuple[Sequence[tuple[int, bytes]], int]]:
    """Yield each line that has a part of a text, within those around it, and its place there.

    What is yielded changes when one goes on.
    """
    lines: deque[tuple[int, bytes]] = deque()
    marked: deque[bool] = deque()
    waiting = 0  # of ``lines``, those whose followers are not all there

    def ready(least: int) -> Iterator[tuple[Sequence[tuple[int, bytes]], int]]:
        nonlocal waiting
        while waiting > least:
            here = len(lines) - waiting
            if marked[here]:
                yield lines, here
            waiting -= 1
            while len(lines) - waiting > BEFORE:
                lines.popleft()
                marked.popleft()

    for raw in _run_grep(given, texts):
        parts = _NUMBERED.fullmatch(raw.rstrip(b"\n"))
        if parts is None:  # -- between two groups
            yield from ready(0)
            lines.clear()
            marked.clear()
            continue
        lines.append((int(parts[1]), parts[3]))
        marked.append(parts[2] == b":")
        waiting += 1
        if waiting > BEHIND:
            yield from ready(BEHIND)
    yield from ready(0)


def _run_grep(given: Iterable[bytes], texts: Sequence[TextPattern]) -> Iterator[bytes]:
    """Yield what grep lets through. Raises HostError if it does not run."""
    import tempfile

    anchors = sorted({anchor for text in texts for anchor in text.anchors})
    with tempfile.NamedTemporaryFile() as file:
        file.write("\n".join(anchors).encode())
        file.flush()
        options = ("-a", "-n", "-i", "-F", f"-B{BEFORE}", f"-A{BEHIND}")
        # As bytes: a log need not be UTF-8.
        words = ("grep", *options, "-f", file.name)
        with Follow(*words, given=given, env={"LC_ALL": "C"}) as running:
            yield from (line.encode() for line in running)
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
        whole, rest, quoting = without_quotes(data[:end]), data[end:] + b"\r" * held, False
        if max(map(len, whole.split(b"\n"))) > LONGEST:
            whole = b"".join(map(_cut_line, whole.splitlines(keepends=True)))
        _note_answer(whole, number, answered)
        number += whole.count(b"\n")
        yield whole
        while len(rest) > LONGEST:
            piece = without_quotes(rest[:LONGEST])
            quoting = len(piece) < LONGEST
            rest = b"" if quoting else rest[LONGEST:]
            number += 1
            yield piece + b"\n"
    yield without_quotes(rest)


def _note_answer(lines: bytes, number: int, answered: dict[str, int]) -> None:
    """Note the last of ``lines`` that says that an engine lives: a request was answered."""
    near = max(0, lines.rfind(b' HTTP/1.1" ') - LONGEST)
    if found := next(reversed([*_ANSWERED.finditer(lines, near)]), None):
        begin = lines.rfind(b"\n", 0, found.start()) + 1
        stream = log_line(0, lines[begin : found.start()].decode(errors="replace")).stream
        answered[stream] = number + lines.count(b"\n", 0, found.start()) + 1


def _cut_line(line: bytes) -> bytes:
    return b"\n".join(line[at : at + LONGEST] for at in range(0, len(line), LONGEST))
