"""Make texts of others safe to show in a terminal, and to paste into a shell.

The name of a file in a wheel may clear the screen, and a folder may be called ``$(reboot)``.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

_KEPT = "\n\t"


def visible(text: str) -> str:
    r"""Return text with every character escaped that a terminal would obey or hide.

    ``repr`` escapes the same characters: control characters, marks that turn the direction of
    writing, separators of lines, and the bytes of a name that is not UTF-8 (``\x1b``, ``\u202e``).
    Newline and tab stay.
    """
    return text if text.isprintable() else "".join(map(_visible_character, text))


def _visible_character(character: str) -> str:
    if character.isprintable() or character in _KEPT:
        return character
    # Python keeps a byte that is not UTF-8 as one of \udc80 to \udcff (PEP 383).
    return ascii(character)[1:-1].replace(r"\udc", r"\x")


def quoted(*words: str | Path) -> str:
    """Return words as a command line, each quoted for bash and zsh if it needs that.

    A path that begins with a dash is written as ./-path, so that no program takes it for an option.
    """
    return " ".join(map(_quoted_word, words))


def _quoted_word(word: str | Path) -> str:
    text = str(word)
    if isinstance(word, Path) and text.startswith("-"):
        text = f"./{text}"
    if text.isprintable():
        return shlex.quote(text)

    # $'…' is the one form in which a shell takes a character that is not shown as itself.
    escaped = ""
    for character in text.replace("\\", r"\\").replace("'", r"\'"):
        if character.isprintable():
            escaped += character
        else:
            codes = os.fsencode(character)
            escaped += "".join(f"\\x{code:02x}" for code in codes)
    return f"$'{escaped}'"
