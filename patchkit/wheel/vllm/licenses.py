"""Licences of code that is compiled into a wheel, as its own files tell them."""

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
    """File name → text: the licence files of a source, sorted.

    A source without one, as a wheel carries it, tells its licence at the top of its ``files``.
    """
    found = {
        path.name: _text(path)
        for path in sorted(source.iterdir())
        if path.is_file() and _NAMES.fullmatch(path.name)
    }
    return found or next(
        ({"LICENSE": head} for head in map(_head, _texts(source, files)) if head), {}
    )


def spdx(texts: Mapping[str, str]) -> str:
    """The SPDX expression that notices name; "" if they name none, or several."""
    named = {match[1] for text in texts.values() for match in _SPDX.finditer(text)}
    return named.pop() if len(named) == 1 else ""


def _texts(source: Path, files: Iterable[str]) -> Iterable[str]:
    places = (source / name for name in files)
    return (_text(place) for place in places if place.is_file())


def _text(place: Path) -> str:
    return read_bytes(place, limit=LARGEST_IN_TREE).decode(errors="replace")


def _head(text: str) -> str:
    """The comment that a C++ file begins with, if it is a copyright notice."""
    match = _COMMENT.match(text.lstrip())
    if match is None or "Copyright" not in match["text"]:
        return ""
    lines = _EDGE.sub("", match["text"]).strip().splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"
