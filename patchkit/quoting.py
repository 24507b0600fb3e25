"""Make texts of others safe to show in a terminal, and to paste into a shell.

The name of a file in a wheel can clear the screen, and a folder can be called ``$(reboot)``.
"""

import os
import shlex
from pathlib import Path

_KEPT = "\n\t"


def visible(text: str) -> str:
    r"""Return a text in which each character that a terminal would obey or hide is escaped.

    These are the characters that ``repr`` escapes, except newline and tab: control characters
    (``\x1b``), marks that turn the direction of writing (``\u202e``), separators of lines, and the
    bytes of a file name that is not UTF-8.
    """
    return text if text.isprintable() else "".join(map(_visible_character, text))


def _visible_character(character: str) -> str:
    if character.isprintable() or character in _KEPT:
        return character
    # Python keeps a byte that is not UTF-8 as one of \udc80 to \udcff (PEP 383).
    return ascii(character)[1:-1].replace(r"\udc", r"\x")


def quoted(*words: str | Path) -> str:
    """Return words as one command line, each word quoted for bash and zsh if necessary.

    A ``Path`` that begins with a dash is written as ./-path, so that no program takes it for an
    option.
    """
    return " ".join(map(_quoted_word, words))


def _quoted_word(word: str | Path) -> str:
    text = str(word)
    if isinstance(word, Path) and text.startswith("-"):
        text = f"./{text}"
    if text.isprintable():
        return shlex.quote(text)

    # Only in the form $'…' do shells read escapes, for characters that cannot be shown.
    escaped = ""
    for character in text.replace("\\", r"\\").replace("'", r"\'"):
        if character.isprintable():
            escaped += character
        else:
            codes = os.fsencode(character)
            escaped += "".join(f"\\x{code:02x}" for code in codes)
    return f"$'{escaped}'"
