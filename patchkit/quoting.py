"""Make words from outside safe: to read in a terminal, and to paste into a shell.

A file in a wheel may be named with the sequence that clears the screen, a folder ``$(reboot)``.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

_KEPT = "\n\t"


def visible(text: str) -> str:
    r"""Return text with every character escaped that a terminal would obey or hide.

    These are the ones that ``repr`` escapes: control characters, marks that turn the direction of
    writing, separators of lines, and the bytes of a name that is not UTF-8 (``\x1b``, ``\u202e``).
    Newline and tab stay.
    """
    if text.isprintable():
        return text
    # Python keeps a byte that is not UTF-8 as one of \udc80 to \udcff (PEP 383).
    return "".join(
        each
        if each.isprintable() or each in _KEPT
        else ascii(each)[1:-1].replace(r"\udc", r"\x")
        for each in text
    )


def quoted(*words: str | Path) -> str:
    """Return words as a command line, each quoted for bash and zsh if it needs that.

    A path that begins with a dash is written as ./-path, so that no program takes it for an option.
    """
    shown = []
    for word in words:
        text = (
            f"./{word}"
            if isinstance(word, Path) and str(word).startswith("-")
            else str(word)
        )
        if text.isprintable():
            shown.append(shlex.quote(text))
            continue
        # $'…' is the one form in which a shell takes a character that is not shown as itself.
        escaped = "".join(
            each
            if each.isprintable()
            else "".join(f"\\x{byte:02x}" for byte in os.fsencode(each))
            for each in text.replace("\\", r"\\").replace("'", r"\'")
        )
        shown.append(f"$'{escaped}'")
    return " ".join(shown)
