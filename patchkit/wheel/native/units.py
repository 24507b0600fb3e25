"""Give the translation unit in PTX a neutral name, and its machine code the real one back.

nvcc puts the file name of a translation unit, and numbers, into each name that is internal to it:
``_ZN73_INTERNAL_13607651_36_flash_fwd_split_hdim256_fp16_sm80_cu_3b62bd63_292514cuda…``, and
``82_GLOBAL__N__…`` for a namespace without a name. Projects compile the same kernels under two file
names. With a neutral name their PTX is the same text, which ptxas has to compile once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from io import BytesIO

from patchkit.elf import parse_library

# Behind the form: 8 hex digits, the length of the file's name, that name, 8 hex digits, a number.
_FORMS = (b"_INTERNAL_", b"_GLOBAL__N__")
_FILE = re.compile(rb"[0-9a-f]{8}_(\d{1,4})_")
_NUMBER = re.compile(rb"_[0-9a-f]{8}_(\d+)")
_LENGTH = re.compile(rb"\d+\Z")
_IDENTIFIER = re.compile(rb"[A-Za-z0-9_]+")
_TABLES = (".strtab", ".shstrtab")  # of names, in ELF
_LONGEST = 240  # characters; longer names stay as they are
_MOST_DIGITS = 4


def neutral(text: bytes) -> tuple[bytes, Mapping[bytes, bytes]]:
    """Return PTX with a neutral name for its translation unit, and a map neutral → real name.

    The text is returned unchanged, with an empty map, if the real name is not certain (for example
    with names of several units), or if the text has line numbers (``.file``), since the machine
    code then has the names in more places.
    """
    if b".file" in text:
        return text, {}

    names: dict[bytes, bytes] = {}
    for form in _FORMS:
        units = {_whole_name(text, start, form) for start in _places(text, form)}
        if not units:
            continue

        unit = units.pop()
        stand_in = b"%d%s" % (_LONGEST, form.ljust(_LONGEST, b"0"))
        if unit is None or units or stand_in in text:
            return text, {}
        names[stand_in] = unit

    for stand_in, unit in names.items():
        text = text.replace(unit, stand_in)
    return text, names


def _places(text: bytes, form: bytes) -> Iterator[int]:
    """Yield each offset at which a form begins. For texts of 30 MB, find() beats a regex."""
    place = text.find(form)
    while place >= 0:
        yield place
        place = text.find(form, place + len(form))


def _whole_name(text: bytes, start: int, form: bytes) -> bytes | None:
    """Return the whole name whose form begins at ``start``, with the length that stands before it.

    Digits of the next name may follow the number at its end, and digits of the previous name may
    stand before its length. Return None unless only one reading of both fits, or if the name is not
    part of one identifier: replacing it would then remove a piece of the program.
    """
    file = _FILE.match(text, start + len(form))
    if file is None:
        return None
    number = _NUMBER.match(text, file.end() + int(file[1]))
    length = _LENGTH.search(text[max(0, start - _MOST_DIGITS) : start])
    if number is None or length is None:
        return None

    shortest = number.start(1) + 1 - start
    longest = min(number.end(1) - start, _LONGEST)
    digits = length[0]
    readings = {int(digits[place:]) for place in range(len(digits))}
    sizes = [size for size in readings if shortest <= size <= longest]
    if len(sizes) != 1:
        return None

    (size,) = sizes
    name = text[start : start + size]
    if not _IDENTIFIER.fullmatch(name):
        return None
    return b"%d%s" % (size, name)


def named(code: bytes, names: Mapping[bytes, bytes]) -> bytes:
    """Return machine code of neutral PTX with the real names (``names``: neutral → real).

    Only ELF's string tables change, since a neutral name elsewhere is data. A shorter name is
    padded with NULs, so that every other byte keeps its offset. Raises SourceError if the code is
    no ELF file.
    """
    if not names:
        return code

    renamed = bytearray(code)
    for section in parse_library(BytesIO(code), "the machine code").sections:
        if section.name in _TABLES:
            place = slice(section.offset, section.offset + section.size)
            entries = code[place].split(b"\0")
            renamed[place] = b"\0".join(_renamed(entry, names) for entry in entries)

    return bytes(renamed)


def _renamed(name: bytes, names: Mapping[bytes, bytes]) -> bytes:
    size = len(name)
    for stand_in, real in names.items():
        name = name.replace(stand_in, real)
    return name.ljust(size, b"\0")
