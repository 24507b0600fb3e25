"""Look for many texts in a log of any length: in a stream, with little memory.

grep takes out the lines that may matter, with those around them: it reads a gigabyte in seconds,
for hundreds of texts at once. What is left is small, and looked at closely.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from patchkit.errors import HostError
from patchkit.process import sieve
from patchkit.runtime.symptoms.lines import LONGEST, LogLine, log_line
from patchkit.runtime.symptoms.said import SaidText

_BEFORE, _BEHIND = 3, 10  # lines around one that may matter: texts go over several
_MOST_HITS = 50  # that are kept of a text; the others are counted
_MOST_LINES = 100_000  # different ones that are looked at
_TRIED = 3  # how often a line is looked at that differs from others by numbers alone
_NUMBERED = re.compile(rb"(\d+)([:-])(.*)", re.DOTALL)
_DIGITS = re.compile(rb"\d+")


@dataclass(frozen=True, slots=True)
class Hit:
    """A text that was found: the line that it begins in, its writer, what has names.

    ``text`` are all lines that it goes over.
    """

    number: int
    who: str
    text: str
    values: dict[str, str]


@dataclass(slots=True)
class Scan:
    """What was found: hits by text, and how often each text was there.

    ``unread`` says what was not looked at, "" if all was.
    """

    hits: dict[str, list[Hit]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    unread: str = ""

    def has(self, text: str) -> bool:
        """Return whether a text was found."""
        return bool(self.counts.get(text))


def scan(chunks: Iterable[bytes], texts: Sequence[SaidText], quoting: Collection[str] = ()) -> Scan:
    """Return where texts are in a log, which comes in pieces of any size.

    What a text of ``quoting`` quotes, such as an error that may come, is not there by itself.

    Raises what ``chunks`` raises, HostError if grep does not run.
    """
    found = Scan()
    seen: dict[bytes, int] = {}  # lines without their numbers, how often they came
    known: dict[bytes, list[str]] = {}  # the texts that were in them
    for window, here in _windows(chunks, texts):
        key = _DIGITS.sub(b"0", window[here][1])
        seen[key] = seen.get(key, 0) + 1
        if seen[key] > _TRIED:
            for text in known.get(key, ()):
                found.counts[text] += 1
        elif len(seen) > _MOST_LINES:
            number = window[here][0]
            found.unread = f"after line {number}: {_MOST_LINES} different lines were looked at"
            break
        else:
            lines = [log_line(number, raw.decode(errors="replace")) for number, raw in window]
            known[key] = list(_look(found, lines, here, texts, quoting))
    return found


def _look(
    found: Scan,
    window: Sequence[LogLine],
    here: int,
    texts: Sequence[SaidText],
    quoting: Collection[str],
) -> Iterator[str]:
    """Add what is in a line, and yield the texts; those around it complete it."""
    line = window[here]
    low = line.text.lower()
    near = [each for each in window if each.who == line.who or not each.who]
    whole = "\n".join(each.text for each in near)
    matches = [
        (text, match)
        for text in texts
        if any(anchor in low for anchor in text.anchors)
        for match in text.pattern.finditer(whole)
    ]
    quotes = [each for each in matches if each[0].text in quoting]
    start = sum(len(each.text) + 1 for each in near if each.number < line.number)
    for text, match in matches:
        if match.start() > start + len(line.text) or match.end() < start:
            continue
        if any(_is_quoted(text, match, *quote) for quote in quotes):
            continue
        first = near[whole.count("\n", 0, match.start())]
        hits = found.hits.setdefault(text.text, [])
        if any(each.number == first.number for each in hits):
            continue  # found by its other half already
        found.counts[text.text] = found.counts.get(text.text, 0) + 1
        yield text.text
        if len(hits) < _MOST_HITS:
            begin = whole.rfind("\n", 0, match.start()) + 1
            shown = whole[begin : whole.find("\n", match.end()) % (len(whole) + 1)]
            hits.append(Hit(first.number, first.who, shown, match.groupdict()))


def _is_quoted(text: SaidText, match: re.Match[str], other: SaidText, wider: re.Match[str]) -> bool:
    """Return whether a text is there only as a part of another one."""
    around = wider.start() <= match.start() and match.end() <= wider.end()
    return around and other != text and text.text.lower() in other.text.lower()


def _windows(
    chunks: Iterable[bytes], texts: Sequence[SaidText]
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
            while len(lines) - waiting > _BEFORE:
                lines.popleft()
                marked.popleft()

    for raw in _sieved(chunks, texts):
        parts = _NUMBERED.fullmatch(raw.rstrip(b"\n"))
        if parts is None:  # -- between two groups
            yield from ready(0)
            lines.clear()
            marked.clear()
            continue
        lines.append((int(parts[1]), parts[3]))
        marked.append(parts[2] == b":")
        waiting += 1
        if waiting > _BEHIND:
            yield from ready(_BEHIND)
    yield from ready(0)


def _sieved(chunks: Iterable[bytes], texts: Sequence[SaidText]) -> Iterator[bytes]:
    """Yield what grep lets through. Raises HostError if it does not run."""
    import tempfile

    anchors = sorted({anchor for text in texts for anchor in text.anchors})
    with tempfile.NamedTemporaryFile() as file:
        file.write("\n".join(anchors).encode())
        file.flush()
        options = ("-a", "-n", "-i", "-F", f"-B{_BEFORE}", f"-A{_BEHIND}")
        # As bytes: a log need not be UTF-8.
        done = yield from sieve(
            "grep", *options, "-f", file.name, given=_lines(chunks), env={"LC_ALL": "C"}
        )
    if done.status not in (0, 1):  # 1: nothing was found
        raise done.error(HostError)


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield whole lines, several at once; one that is too long in pieces."""
    rest = b""
    for chunk in chunks:
        data = rest + chunk
        held = data[-1:] == b"\r"  # a line feed may come
        data = data[: len(data) - held].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        end = data.rfind(b"\n") + 1
        whole, rest = data[:end], data[end:] + b"\r" * held
        if max(map(len, whole.split(b"\n"))) > LONGEST:
            whole = b"".join(_cut(each) for each in whole.splitlines(keepends=True))
        yield whole
        while len(rest) > LONGEST:
            yield rest[:LONGEST] + b"\n"
            rest = rest[LONGEST:]
    yield rest


def _cut(line: bytes) -> bytes:
    return b"\n".join(line[at : at + LONGEST] for at in range(0, len(line), LONGEST))
