"""Write an env file; write and read its first line: facts, and a digest that shows edits.

::

    # patchkit env: role=head topology=roce vllm=0.25.1 format=env digest=0123456789abcdef

The digest is the start of the sha256 of the whole text, with zeros where it stands.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from patchkit.errors import UsageError
from patchkit.runtime.envfile.syntax import EnvEntry, Format, assignment, comment

MARK = "patchkit env:"
BLANK = "0" * 16  # stands for the digest while it is computed
_FACT = re.compile(r"[A-Za-z_]+=[!#-\[\]-~]*")
_LINE = re.compile(rf"\A# {MARK}(?P<facts>[^\n]*) digest=(?P<digest>[0-9a-f]{{16}})(?=\n)")


def render_env_file(kind: Format, header: Sequence[str], entries: Sequence[EnvEntry]) -> str:
    """Return a whole file. ``header`` is facts (``role=head vllm=0.25.1 …``), then lines to read.

    Raises UsageError for what the format cannot hold.
    """
    first, *about = header or [""]
    # This also checks them: a fact that could not be read back is refused here.
    known = facts(first) | {"format": str(kind)}
    names = [entry.name for entry in entries]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"{', '.join(twice)}: set twice in one file")
    first = " ".join(f"{name}={value}" for name, value in known.items())
    head = [f"# {MARK} {first} digest={BLANK}", *(row for line in about for row in comment(line))]
    blocks = [[*comment(entry.comment), assignment(kind, entry)] for entry in entries]
    return sealed("\n\n".join("\n".join(block) for block in [head, *blocks]) + "\n")


def facts(line: str) -> dict[str, str]:
    """Return ``role=head nodes=2`` as a dict. Raises UsageError."""
    found = line.removeprefix("# ").removeprefix(MARK).split()
    for each in found:
        if not _FACT.fullmatch(each):
            raise UsageError(f"{each!r} cannot stand in the first line of an env file")
    return dict(each.split("=", 1) for each in found)


def head_facts(text: str) -> dict[str, str]:
    """Return the facts of the first line; none if patchkit did not write the file."""
    match = _LINE.match(text)
    try:
        return facts(match["facts"]) if match else {}
    except UsageError:  # a damaged or hostile header is not one of patchkit's
        return {}


def bears_mark(text: str) -> bool:
    """Return whether a file says that patchkit wrote it, whether or not it is so."""
    return text.startswith(f"# {MARK}")


def sealed(text: str) -> str:
    """Return the text with its digest instead of the zeros."""
    start, end = _digest_span(text)
    return text[:start] + _text_digest(text) + text[end:]


def untouched(text: str) -> bool:
    """Return whether patchkit wrote this file, and nobody changed it since."""
    start, end = _digest_span(text)
    return start < end and _text_digest(text[:start] + BLANK + text[end:]) == text[start:end]


def _digest_span(text: str) -> tuple[int, int]:
    """Return where the digest is; (0, 0) if there is none."""
    match = _LINE.match(text)
    return match.span("digest") if match else (0, 0)


def _text_digest(text: str) -> str:
    # Half a surrogate pair is no UTF-8, and must not raise here.
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
