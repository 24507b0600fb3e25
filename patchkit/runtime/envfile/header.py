"""Write an env file; write and read its first line: facts, and a digest that shows edits.

::

    # patchkit env: role=head topology=roce vllm=0.25.1 format=env digest=0123456789abcdef

The digest is the start of the sha256 of the whole text, with zeros where it stands. A file comes
from elsewhere and is a claim: every fact has a form here, and any other is a problem.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

from patchkit.errors import UsageError
from patchkit.runtime.envfile.syntax import EnvEntry, Format, assignment, comment
from patchkit.runtime.rules.presets import find_preset
from patchkit.runtime.rules.releases import read_env_data
from patchkit.runtime.rules.rule import CHOICES

MARK = "patchkit env:"
BLANK = "0" * 16  # stands for the digest while it is computed
_FACT = re.compile(r"[A-Za-z_]+=[!#-\[\]-~]*")
_LINE = re.compile(
    rf"\A# {MARK}(?P<facts>[^\n]*) digest=(?P<digest>[0-9a-f]{{16}})(?=\n)"
)

NODES_MAX = int(read_env_data("network")["plan"]["nodes_max"])
"""The most nodes of a cluster."""

_LISTED = ("role", "topology", "twin", "executor", "target", "quantization")
_WORDS = {**{name: CHOICES[name] for name in _LISTED}, "format": tuple(Format)}
_FORMS: Mapping[str, Mapping[str, str]] = {
    **{
        name: {"form": "|".join(them), "takes": ", ".join(them)}
        for name, them in _WORDS.items()
    },
    **read_env_data("facts")["header"],
}


def render_env_file(
    kind: Format, header: Sequence[str], entries: Sequence[EnvEntry]
) -> str:
    """Return a whole file: facts (``role=head …``), lines to read, entries. Raises UsageError."""
    first, *notes = header or [""]
    if wrong := [fact for fact in first.split() if not _FACT.fullmatch(fact)]:
        raise UsageError(f"{wrong[0]!r} cannot stand in the first line of an env file")
    known = dict(fact.split("=", 1) for fact in first.split()) | {"format": str(kind)}
    names = [entry.name for entry in entries]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"{', '.join(twice)}: set twice in one file")
    first = " ".join(f"{name}={value}" for name, value in known.items())
    head = [
        f"# {MARK} {first} digest={BLANK}",
        *(row for line in notes for row in comment(line)),
    ]
    blocks = [[*comment(entry.comment), assignment(kind, entry)] for entry in entries]
    return sealed("\n\n".join("\n".join(block) for block in [head, *blocks]) + "\n")


def head_facts(text: str) -> dict[str, str]:
    """Return the facts of the first line; none if patchkit did not write the file."""
    match = _LINE.match(text)
    found = match["facts"].split() if match else []
    # A damaged or hostile header is not one of patchkit's.
    return (
        dict(fact.split("=", 1) for fact in found)
        if all(map(_FACT.fullmatch, found))
        else {}
    )


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
        row = _FORMS.get(name)
        if row is None:
            found[name] = "is not a fact that this patchkit knows"
            continue
        fits = re.fullmatch(row["form"], value, re.ASCII) is not None
        too_many = fits and name == "nodes" and int(value) > NODES_MAX
        preset = find_preset(value) if name == "model" else None
        if (
            not fits
            or too_many
            or (name == "model" and (preset is None or preset.id != value))
        ):
            found[name] = f"takes {row['takes'].format(most=NODES_MAX)}"
    return found
