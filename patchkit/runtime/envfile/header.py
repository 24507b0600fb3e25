"""Write an env file; write and read its first line: facts, and a digest that shows edits.

::

    # patchkit env: role=head topology=roce vllm=0.25.1 format=env digest=0123456789abcdef

The digest is the start of the sha256 of the whole text, in which zeros stand for the digest. A
file may come from anybody, so each fact is checked: it must be known, and have a certain form.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from patchkit.errors import UsageError
from patchkit.runtime.envfile.syntax import (
    EnvEntry,
    Format,
    render_assignment,
    render_comment,
)
from patchkit.runtime.rules.presets import find_preset
from patchkit.runtime.rules.releases import read_env_data
from patchkit.runtime.rules.rule import CHOICES, Values

MARK = "patchkit env:"
BLANK = "0" * 16  # in place of the digest while the digest is computed
_FACT = re.compile(r"[A-Za-z_]+=[!#-\[\]-~]*")
_LINE = re.compile(
    rf"\A# {MARK}(?P<facts>[^\n]*) digest=(?P<digest>[0-9a-f]{{16}})(?=\n)"
)

NODES_MAX = int(read_env_data("network")["plan"]["nodes_max"])
"""The largest number of nodes in a cluster."""

_CHOSEN = ("role", "topology", "twin", "executor", "target", "quantization")
_CHOICES = {**{name: CHOICES[name] for name in _CHOSEN}, "format": tuple(Format)}
_FORMS: Mapping[str, Values] = {
    **{
        name: {"form": "|".join(words), "takes": ", ".join(words)}
        for name, words in _CHOICES.items()
    },
    **read_env_data("facts")["header"],
}


def render_env_file(
    kind: Format, header: Sequence[str], entries: Sequence[EnvEntry]
) -> str:
    """Return the text of an env file.

    ``header`` has the facts (``role=head …``) and then lines for comments. Raise UsageError if an
    entry or a fact is invalid, or a variable is set twice.
    """
    first, *notes = header or [""]
    counts = Counter(entry.name for entry in entries)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise UsageError(f"{', '.join(twice)}: set twice in one file")

    facts = {**_read_facts(first), "format": str(kind)}
    shown = " ".join(f"{name}={value}" for name, value in facts.items())

    head = [f"# {MARK} {shown} digest={BLANK}"]
    for note in notes:
        head += render_comment(note)

    blocks = [head]
    for entry in entries:
        assignment = render_assignment(kind, entry)
        blocks.append([*render_comment(entry.comment), assignment])

    text = "\n\n".join("\n".join(block) for block in blocks)
    return with_digest(f"{text}\n")


def _read_facts(line: str) -> dict[str, str]:
    """Return name → value of ``role=head …``. Raise UsageError for a word that is no fact."""
    for fact in line.split():
        if not _FACT.fullmatch(fact):
            raise UsageError(f"{fact!r} cannot stand in the first line of an env file")

    return dict(fact.split("=", 1) for fact in line.split())


def head_facts(text: str) -> dict[str, str]:
    """Return the facts of the first line, {} if the line is not one that patchkit writes."""
    match = _LINE.match(text)
    try:
        return _read_facts(match["facts"]) if match else {}
    except UsageError:
        return {}  # patchkit does not write such a line: it is damaged or hostile


def with_digest(text: str) -> str:
    """Return the text with its digest, or unchanged if its first line has no digest."""
    match = _LINE.match(text)
    if not match:
        return text

    start, end = match.span("digest")
    blank = text[:start] + BLANK + text[end:]

    # Half a surrogate pair cannot be encoded as UTF-8; it must not raise here.
    sha256 = hashlib.sha256(blank.encode(errors="surrogatepass"))
    digest = sha256.hexdigest()[: len(BLANK)]
    return text[:start] + digest + text[end:]


def is_untouched(text: str) -> bool:
    """Return whether patchkit wrote this text and nobody has changed it since."""
    return _LINE.match(text) is not None and with_digest(text) == text


def fact_problems(facts: Values) -> dict[str, str]:
    """Return name → what is wrong, such as ``takes …``, for each fact that is wrong."""
    problems = {}

    for name, value in facts.items():
        if name not in _FORMS:
            problems[name] = "is not a fact that this patchkit knows"
        elif not _is_fact(name, value):
            takes = _FORMS[name]["takes"].format(most=NODES_MAX)
            problems[name] = f"takes {takes}"

    return problems


def _is_fact(name: str, value: str) -> bool:
    """Return whether a fact has its form, and its value is in range or names a known preset."""
    if not re.fullmatch(_FORMS[name]["form"], value, re.ASCII):
        return False

    match name:
        case "nodes":
            return int(value) <= NODES_MAX
        case "model":
            preset = find_preset(value)
            return preset is not None and preset.id == value
        case _:
            return True
