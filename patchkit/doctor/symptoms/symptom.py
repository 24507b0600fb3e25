"""Read the symptoms: what programs print when something is wrong, why, and what cures it.

A symptom has texts as programs print them, with placeholders for the parts that vary:

    Free memory on device {} ({free}/{total} GiB) on startup ... utilization

``{name}`` stands for one word, whose value is kept under this name, ``{}`` for one word whose
value is not kept, and ``...`` for anything of up to 500 characters. A blank stands for blanks or
the end of a line; write two where programs print a run of blanks, as in a table. ``^`` in front of
a text is the start of a line, and ``$`` behind it the end of one. Upper and lower case are the
same. A name that comes again stands for the same word. A text has at least five plain ASCII
characters in a row: grep searches for them.
"""

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from typing import Literal

from patchkit.frozen import Fields, Texts, Values, frozen, positional
from patchkit.records import RECIPES, read_toml
from patchkit.runtime.rules.presets import Broken, load_broken
from patchkit.runtime.rules.rule import Grounded

SYMPTOM_FILES = sorted((RECIPES / "symptoms").glob("*.toml"))
"""The files with symptoms, one for each area, sorted by name."""

# A half of a run of characters is searched for by itself if it has at least so many characters.
_RARE = 12
# grep ignores the case of ASCII letters alone.
_RUN_END = re.compile(r"\{[a-z_]*\}|\s*\.\.\.\s*|\s\s+|[^\x20-\x7e]+|^\^|\$$")
_WORD_FIRST = re.compile(r"\{[a-z_]*\}")
_WORD = r"[^\s]{1,200}?"
_PART = re.compile(
    r"\{(?P<name>[a-z_]*)\}|\s*(?P<gap>\.\.\.)\s*|(?P<blank>\s+)"
    r"|(?P<start>^\^)|(?P<end>\$$)"
)
_FIXED_PARTS = {
    "gap": r"[\s\S]{0,500}?",
    "blank": r"\s+",
    "start": r"(?m:^)[ \t]*",
    "end": r"(?m:$)",
}


@positional
class TextPattern:
    """A text to look for, as a regular ``expression``.

    Where the text matches, a line contains one of the ``anchors``, which are in small letters.
    ``weight`` is the number of characters that do not vary: a text with more is more specific.
    """

    text: str
    anchors: Texts
    expression: str
    weight: int = 0


@cache
def text_pattern(text: str) -> TextPattern:
    """Return the pattern of a text of a symptom."""
    expression = ""
    end = 0
    for part in _PART.finditer(text):
        expression += re.escape(text[end : part.start()])
        repeated = f"(?P={part['name']})"
        is_new = f"(?P<{part['name']}>" not in expression

        expression += _part_expression(part) if is_new else repeated
        end = part.end()

    expression += re.escape(text[end:])

    # If the text begins or ends with a letter or digit, a word must begin or end there. So must a
    # leading {name}, which takes very long if it is looked for from each character on.
    begins = r"(?<!\w)" if text[:1].isalnum() else ""
    if _WORD_FIRST.match(text):
        begins = r"(?<!\S)"

    ends = r"(?!\w)" if text[-1:].isalnum() else ""
    return TextPattern(
        text=text,
        anchors=_anchors(text),
        expression=f"{begins}{expression}{ends}",
        weight=len(_PART.sub("", text)),
    )


def _part_expression(part: re.Match[str]) -> str:
    if part.lastgroup in _FIXED_PARTS:
        return _FIXED_PARTS[part.lastgroup]

    # Nothing follows the last word, so it goes on to the next blank.
    is_last = part.end() == len(part.string)
    word = _WORD.rstrip("?") if is_last else _WORD
    return f"(?P<{part['name']}>{word})" if part["name"] else word


def _anchors(text: str) -> Texts:
    """Return the longest run of plain characters of a text, or both halves of a long run.

    A program may break a long line at a blank; then at least one half is whole in a line.
    """
    runs = [run.strip() for run in _RUN_END.split(text)]
    longest = max(runs, key=len).lower()
    blanks = (blank.start() for blank in re.finditer(" ", longest))
    middle = min(
        blanks,
        key=lambda place: abs(2 * place - len(longest)),
        default=0,
    )

    halves = (longest[:middle], longest[middle + 1 :])
    return halves if min(map(len, halves)) >= _RARE else (longest,)


@frozen
class Cause(Grounded):
    """A cause of a symptom, possible if the condition ``when`` holds, and its cure.

    The log must have a hit that the pattern ``matches`` fits, all texts of ``seen``, one of
    ``either``, and none of ``unseen``; ``cause`` and ``cure`` may quote the {names} of ``seen``.
    ``command`` cures the cause or shows it, ``costs`` is the drawback of the cure, and the command
    ``tell`` distinguishes this cause from the others of its symptom. ``harmless``: nothing is
    wrong, so the finding is a note.
    """

    cause: str
    cure: str
    matches: str = ""
    seen: Texts = ()
    either: Texts = ()
    unseen: Texts = ()
    command: str = ""
    costs: str = ""
    tell: str = ""
    harmless: bool = False


def filled_cause(texts: Values, values: Values) -> Cause:
    """Return the cause of these texts, in which {names} are replaced by values."""
    cause: Fields = {name: text.format_map(values) for name, text in texts.items()}
    return Cause(**cause)


@frozen
class Symptom:
    """Something that programs print if it is wrong: its texts ``says``, and causes by likelihood.

    ``follows``: the symptom only says that something else failed before. ``yields``: it is a
    consequence if the same log has another error. ``ends``: no server outlives it. ``lasts``: it
    goes on although a server serves. ``request``: a client of the server caused it. ``general``:
    any more specific text of the same line describes it better. ``frames``: the library of the
    deepest frame before it has the causes, if it is known. ``pinned``: what vLLM's release
    requires of a package decides, if a package is named. ``answers``: a note that answers a
    question about a running server. ``silent``: it does not say what happened, so the cure of the
    step before it is told. ``example`` are texts that are this symptom, ``other``
    similar texts that are not. ``broken`` names rows of recipes/env/broken.toml, which come
    before the other causes.
    """

    id: str
    title: str
    says: Texts
    level: Literal["error", "warning", "note"]
    cause: tuple[Cause, ...] = ()
    broken: Texts = ()
    example: Texts
    other: Texts = ()
    follows: bool = False
    yields: bool = False
    ends: bool = False
    lasts: bool = False
    request: bool = False
    general: bool = False
    frames: bool = False
    pinned: bool = False
    answers: bool = False
    silent: bool = False


@cache
def symptoms() -> Mapping[str, Symptom]:
    """Return all symptoms by their ids, in the order of the files and of their entries.

    Raise UsageError for an invalid file, with the line.
    """
    entries: dict[str, Symptom] = {}
    for file in SYMPTOM_FILES:
        for symptom in read_toml(tuple[Symptom, ...], file, key="symptom"):
            entries[symptom.id] = _with_broken(symptom)

    return entries


def _with_broken(symptom: Symptom) -> Symptom:
    """Return a symptom whose first causes are the rows of broken.toml that it names."""
    shared = {part.name for part in fields(Cause)} & {
        part.name for part in fields(Broken)
    }

    causes = []
    for name in symptom.broken:
        row = load_broken()[name]
        values = {key: getattr(row, key) for key in shared}
        causes.append(Cause(**values))

    return replace(symptom, cause=(*causes, *symptom.cause))


@frozen
class KernelLibrary:
    """A part of the software: texts of its frames, causes of its errors, how it is switched off.

    ``reach`` is the number of lines before an error in which its frames count. ``options`` are
    texts of a log which tell that it is switched on, ``without`` that it is switched off.
    """

    id: str
    frames: Texts = ()
    options: Texts = ()
    without: Texts = ()
    reach: int = 80
    cause: tuple[Cause, ...] = ()
    off: str = ""


@cache
def libraries() -> tuple[KernelLibrary, ...]:
    """Return the content of recipes/doctor/libraries.toml."""
    place = RECIPES / "doctor" / "libraries.toml"
    return read_toml(tuple[KernelLibrary, ...], place, key="library")


@frozen
class LogFact:
    """A fact that a log states by one of the texts ``says``.

    Its value is ``value``; if that is empty, it is what ``pattern`` finds first at {value} in the
    text: by default a version. With both, the text states ``value`` if ``pattern`` fits {value}.
    """

    name: str
    says: Texts
    value: str = ""
    pattern: str = r"^v?(\d+(?:[.-]\d+)+)"


@frozen
class Step:
    """A step of a start: the lines ``says`` tell of it, ``cure`` changes it or shows more of it."""

    says: Texts
    cure: str


@frozen
class LogWords:
    """Texts that state facts, steps of a start, and ``marks``: event → texts that tell of it."""

    fact: tuple[LogFact, ...]
    step: tuple[Step, ...]
    marks: Mapping[str, Texts]


@cache
def log_words() -> LogWords:
    """Return the content of recipes/doctor/logs.toml."""
    return read_toml(LogWords, RECIPES / "doctor" / "logs.toml")
