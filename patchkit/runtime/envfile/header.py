"""Write an env file; write and read its first line: facts, and a digest that shows edits.

::

    # patchkit env: role=head topology=roce vllm=0.25.1 format=env digest=0123456789abcdef

The digest is the start of the sha256 of the whole text, with zeros where it stands. A file comes
from elsewhere and is a claim: every fact has a form here, and any other is a problem.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence

from patchkit.errors import UsageError
from patchkit.runtime.envfile.syntax import EnvEntry, Format, assignment, comment
from patchkit.runtime.rules.presets import find
from patchkit.runtime.rules.releases import read_env_data
from patchkit.runtime.rules.rule import CHOICES

MARK = "patchkit env:"
BLANK = "0" * 16  # stands for the digest while it is computed
_FACT = re.compile(r"[A-Za-z_]+=[!#-\[\]-~]*")
_LINE = re.compile(rf"\A# {MARK}(?P<facts>[^\n]*) digest=(?P<digest>[0-9a-f]{{16}})(?=\n)")
_VERSION = re.compile(r"v?(\d+!)?\d[0-9A-Za-z.+_-]{0,80}", re.ASCII)
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
# In its one spelling, as two nodes compare it as text.
_ADDRESS = re.compile(rf"{_BYTE}(\.{_BYTE}){{3}}", re.ASCII)
_NAMES = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(,[A-Za-z_][A-Za-z0-9_]*)*")
_IDS = re.compile(r"[a-z0-9][a-z0-9-]*(,[a-z0-9][a-z0-9-]*)*")
_NUMBER = re.compile(r"[1-9][0-9]{0,5}")

NODES_MAX = int(read_env_data("network")["plan"]["nodes_max"])
"""The most nodes of a cluster."""


def render_env_file(kind: Format, header: Sequence[str], entries: Sequence[EnvEntry]) -> str:
    """Return a whole file: facts (``role=head …``), lines to read, entries. Raises UsageError."""
    first, *notes = header or [""]
    if wrong := [fact for fact in first.split() if not _FACT.fullmatch(fact)]:
        raise UsageError(f"{wrong[0]!r} cannot stand in the first line of an env file")
    known = dict(fact.split("=", 1) for fact in first.split()) | {"format": str(kind)}
    names = [entry.name for entry in entries]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"{', '.join(twice)}: set twice in one file")
    first = " ".join(f"{name}={value}" for name, value in known.items())
    head = [f"# {MARK} {first} digest={BLANK}", *(row for line in notes for row in comment(line))]
    blocks = [[*comment(entry.comment), assignment(kind, entry)] for entry in entries]
    return sealed("\n\n".join("\n".join(block) for block in [head, *blocks]) + "\n")


def head_facts(text: str) -> dict[str, str]:
    """Return the facts of the first line; none if patchkit did not write the file."""
    match = _LINE.match(text)
    found = match["facts"].split() if match else []
    # A damaged or hostile header is not one of patchkit's.
    return dict(fact.split("=", 1) for fact in found) if all(map(_FACT.fullmatch, found)) else {}


def sealed(text: str) -> str:
    """Return the text with its digest; without a place for one as it is."""
    match = _LINE.match(text)
    if not match:
        return text
    start, end = match.span("digest")
    # Half a surrogate pair is no UTF-8, and must not raise here.
    blank = (text[:start] + BLANK + text[end:]).encode(errors="surrogatepass")
    return text[:start] + hashlib.sha256(blank).hexdigest()[:16] + text[end:]


def is_untouched(text: str) -> bool:
    """Return whether patchkit wrote this file, and nobody changed it since."""
    return _LINE.match(text) is not None and sealed(text) == text


def fact_problems(facts: Mapping[str, str]) -> dict[str, str]:
    """Return what is wrong with each fact that is wrong, in words: name → ``takes …``."""
    found = {}
    for name, value in facts.items():
        if name not in _FORMS:
            found[name] = "is not a fact that this patchkit knows"
        elif not _FORMS[name][0](value):
            found[name] = f"takes {_FORMS[name][1]}"
    return found


_WORDS = {
    **{name: CHOICES[name] for name in ("role", "topology", "twin", "executor")},
    **{name: CHOICES[name] for name in ("target", "quantization")},
    "format": tuple(Format),
}
_FORMS: Mapping[str, tuple[Callable[[str], object], str]] = {
    **{name: (words.__contains__, ", ".join(words)) for name, words in _WORDS.items()},
    "vllm": (_VERSION.fullmatch, "a version, such as 0.25.1"),
    "nccl": (_VERSION.fullmatch, "a version, such as 2.30.7"),
    "nodes": (
        lambda value: _NUMBER.fullmatch(value) and int(value) <= NODES_MAX,
        f"a number from 1 to {NODES_MAX}",
    ),
    "head": (_ADDRESS.fullmatch, "an IPv4 address"),
    "model": (
        lambda value: (preset := find(value)) and preset.id == value,
        "a model of `patchkit serve-args --list`",
    ),
    "set": (_NAMES.fullmatch, "names of variables"),
    "with": (_IDS.fullmatch, "ids of rules"),
    "without": (_IDS.fullmatch, "ids of rules"),
}
