"""Find the licences of code that is compiled into a wheel, as its own files state them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from patchkit.reading import LARGEST_IN_TREE, read_bytes

_NAMES = re.compile(r"(LICEN[CS]E|COPYING|NOTICE)([.-].*)?", re.IGNORECASE)
_SPDX = re.compile(r"SPDX-License-Identifier:[ \t]*([\w.+-]+(?: (?:AND|OR|WITH) [\w.+-]+)*)")
_COMMENT = re.compile(r"/\*(?P<text>.*?)\*/", re.DOTALL)
_EDGE = re.compile(r"^[ \t]*\*+[ \t]?|\*+[ \t]*$", re.MULTILINE)


def notices(source: Path, files: Iterable[str]) -> dict[str, str]:
    """Return file name → text of the licence files of a source, sorted.

    A source without one, as a wheel carries it, states its licence at the top of its ``files``.
    """
    found = {
        path.name: _read_license(path)
        for path in sorted(source.iterdir())
        if path.is_file() and _NAMES.fullmatch(path.name)
    }
    texts = (_read_license(source / name) for name in files if (source / name).is_file())
    return found or next(({"LICENSE": head} for head in map(_read_notice, texts) if head), {})


def spdx(texts: Mapping[str, str]) -> str:
    """Return the SPDX expression that notices name; "" if they name none, or several."""
    named = {match[1] for text in texts.values() for match in _SPDX.finditer(text)}
    # The files do not say how several combine (AND, OR).
    return named.pop() if len(named) == 1 else ""


def _read_license(path: Path) -> str:
    return read_bytes(path, limit=LARGEST_IN_TREE).decode(errors="replace")


def _read_notice(text: str) -> str:
    """Return the comment that a C++ file begins with, if it is a copyright notice, else ""."""
    match = _COMMENT.match(text.lstrip())
    if match is None or "Copyright" not in match["text"]:
        return ""
    lines = _EDGE.sub("", match["text"]).strip().splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"
