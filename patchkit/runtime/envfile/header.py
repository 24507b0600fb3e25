"""Write and read the first line of an env file: its facts, and a digest that shows edits.

::

    # patchkit env: role=head topology=roce vllm=0.25.1 format=env digest=0123456789abcdef

The digest is the start of the sha256 of the whole text, with zeros where it stands. In JSON the
same facts are the object ``header``.
"""

from __future__ import annotations

import hashlib
import json
import re

from patchkit.errors import UsageError

MARK = "patchkit env:"
BLANK = "0" * 16  # stands for the digest while it is computed
_FACT = re.compile(r"[A-Za-z_]+=[!#-\[\]-~]*")  # ASCII that JSON need not escape
_LINE = re.compile(rf"\A# {MARK}(?P<facts>[^\n]*) digest=(?P<digest>[0-9a-f]{{16}})(?=\n)")
_OBJECT = re.compile(r'\A\{\s*"header": \{\s*"digest": "(?P<digest>[0-9a-f]{16})"')


def facts(line: str) -> dict[str, str]:
    """Return ``role=head nodes=2`` as a dict. Raises UsageError."""
    found = line.removeprefix("# ").removeprefix(MARK).split()
    for each in found:
        if not _FACT.fullmatch(each):
            raise UsageError(f"{each!r} cannot stand in the first line of an env file")
    return dict(each.split("=", 1) for each in found)


def head_facts(text: str) -> dict[str, str]:
    """Return the facts of the first line; none if patchkit did not write the file."""
    try:
        if match := _LINE.match(text):
            return facts(match["facts"])
        if _OBJECT.match(text):
            header: dict[str, object] = dict(json.loads(text)["header"])
            return facts(" ".join(f"{name}={header[name]}" for name in header if name != "digest"))
    # Whatever a damaged or hostile header provokes: it is not one of patchkit's.
    except (ValueError, TypeError, RecursionError, UsageError):
        return {}
    return {}


def bears_mark(text: str) -> bool:
    """Return whether a file says that patchkit wrote it, whether or not it is so."""
    return text.startswith(f"# {MARK}") or _OBJECT.match(text) is not None


def sealed(text: str) -> str:
    """Return the text with its digest instead of the zeros."""
    start, end = _place(text)
    return text[:start] + _digest(text) + text[end:]


def untouched(text: str) -> bool:
    """Return whether patchkit wrote this file, and nobody changed it since."""
    start, end = _place(text)
    return start < end and _digest(text[:start] + BLANK + text[end:]) == text[start:end]


def _place(text: str) -> tuple[int, int]:
    """Return where the digest is; (0, 0) if there is none."""
    match = _LINE.match(text) or _OBJECT.match(text)
    return match.span("digest") if match else (0, 0)


def _digest(text: str) -> str:
    # JSON can name half a surrogate pair, which is no UTF-8 and must not raise here.
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
