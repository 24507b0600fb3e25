"""Recognise text that no working model writes: what a wrong kernel makes of an answer. Pure.

It looks at form alone. What is wrong and well-formed is for questions with known answers.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import cache, lru_cache

from patchkit.paths import RECIPES
from patchkit.records import read_toml

_WORD = re.compile(r"[^\W_]+")
_LONG = 6000  # characters of an end that is looked at for repetition
_MANY, _WINDOW = 60, 300  # words and characters from which a share says something; words at most
_MARK = re.compile(
    r"<\|?(?:reserved_special_token|unk|pad|unused|extra_id|dummy)[\w<>|]*>", re.IGNORECASE
)
# The bytes 80 to BF as Windows-1252 shows them, after one that begins a character of UTF-8.
_SECOND = "".join(bytes([each]).decode("cp1252", "ignore") for each in range(0x80, 0xC0))
_MOJIBAKE = re.compile(f"[\u00c3\u00c2\u00e2\u00e3-\u00e9\u00f0][{re.escape(_SECOND)}]+")
_ONE_SYSTEM = {"HIRAGANA": "CJK", "KATAKANA": "CJK", "FULLWIDTH": "CJK", "IDEOGRAPHIC": "CJK"}
_NOT_COUNTED = {"GREEK", "MATHEMATICAL", "MICRO", "FEMININE", "MASCULINE", "MODIFIER", "SCRIPT"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GarbageLimits:
    """The figures of [garbage] in recipes/doctor/questions.toml, which says what they are."""

    alone: int
    run: int
    drawing: str
    words: int
    repeats: int
    repeated: int
    distinct: float
    replaced: float
    mojibake: int
    scripts: int
    touching: int
    letters: float
    marks: int


@cache
def limits() -> GarbageLimits:
    return read_toml(GarbageLimits, RECIPES / "doctor" / "questions.toml", key="garbage")


def garbage(text: str) -> str:
    """Return which kind of garbage a text is; "" for none, and for a text that says too little."""
    text = text.strip()
    if not text:
        return ""
    checks = (
        *(_damaged, _marks, _same_character, _same_word),
        *(_repeated, _few_words, _scripts, _no_letters),
    )
    return next(filter(None, (check(text) for check in checks)), "")


def _damaged(text: str) -> str:
    controls = sum(
        each == "\ufffd" or (each < " " and each not in "\t\n\r\f\x1b") or "\x7f" <= each < "\xa0"
        for each in text
    )
    if controls >= 3 and controls / len(text) > limits().replaced:
        return "bytes that are no text"
    if len(_MOJIBAKE.findall(text)) >= limits().mojibake:
        return "UTF-8 that was read as another encoding"
    return ""


def _marks(text: str) -> str:
    return "tokens that no text has" if len(_MARK.findall(text)) >= limits().marks else ""


def _same_character(text: str) -> str:
    alone = len(text) >= limits().alone and len(set(text)) == 1 and not text.isdigit()
    drawing = re.escape(limits().drawing)
    return (
        "one character, again and again"
        if alone or re.search(rf"([^{drawing}])\1{{{limits().run - 1}}}", text)
        else ""
    )


def _same_word(text: str) -> str:
    row, last = 0, ""
    for word in _words(text):
        row = row + 1 if word == last and not word.isdigit() else 1
        last = word
        if row >= limits().words:
            return "one word, again and again"
    return ""


def _few_words(text: str) -> str:
    window = _words(text)[-_WINDOW:]
    few = len(window) >= _MANY and len(set(window)) / len(window) < limits().distinct
    return "a few words, again and again" if few else ""


def _words(text: str) -> list[str]:
    return [each.group().casefold() for each in _WORD.finditer(text)]


def _repeated(text: str) -> str:
    """Look for a piece that the end of a text repeats: the way in which a loop shows."""
    end = text[-_LONG:][::-1]
    border = [0] * len(end)  # of each beginning of the turned end: Knuth, Morris and Pratt
    longest = 0
    for place in range(1, len(end)):
        length = border[place - 1]
        while length and end[place] != end[length]:
            length = border[length - 1]
        border[place] = length + (end[place] == end[length])
        size, period = place + 1, place + 1 - border[place]
        if size // period >= limits().repeats and set(end[:period]) - set(limits().drawing):
            longest = size
    enough = longest >= max(limits().repeated, len(text[-_LONG:]) / 2)
    return "the same piece of text, again and again" if enough else ""


def _scripts(text: str) -> str:
    """Look for writing systems that touch each other: lists of languages keep them apart."""
    found: dict[str, int] = {}
    touching, before = 0, ""
    for each in text:
        system = _system(each)
        if system:
            found[system] = found.get(system, 0) + 1
            touching += bool(before) and before != system
        before = system
    used = sum(count >= 2 for count in found.values())
    many, often = limits().scripts, limits().touching
    if (used >= many and touching >= often) or (used == many - 1 and touching >= 2 * often):
        return "writing systems mixed within words"
    return ""


def _no_letters(text: str) -> str:
    shown = [each for each in text if not each.isspace()]
    plain = sum(each.isalnum() or each in limits().drawing for each in shown)
    few = len(shown) >= _MANY and plain / len(shown) < limits().letters
    return "signs without letters" if few else ""


@lru_cache(maxsize=4096)
def _system(character: str) -> str:
    """Return the writing system of a letter; "" for what is none, or is used among others."""
    if not character.isalpha():
        return ""
    name = unicodedata.name(character, "").partition(" ")[0]
    return "" if name in _NOT_COUNTED else _ONE_SYSTEM.get(name, name)
