"""Give the translation unit in PTX a neutral name, and its machine code the real one back.

nvcc puts the file name of a translation unit, and numbers, into each name that is internal to it:
``_ZN73_INTERNAL_13607651_36_flash_fwd_split_hdim256_fp16_sm80_cu_3b62bd63_292514cuda…``, and
``82_GLOBAL__N__…`` for a namespace without a name. Projects compile the same kernels under two file
names. With a neutral name their PTX is the same text, which ptxas has to compile once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from io import BytesIO

from patchkit.elf import parse_library

_FORMS = (b"_INTERNAL_", b"_GLOBAL__N__")
# The form, 8 hex digits, the length of the file's name, that name, 8 hex digits, a number.
_UNIT = re.compile(
    rb"(?:_INTERNAL_|_GLOBAL__N__)[0-9a-f]{8}_(\d{1,4})_(\w+)_[0-9a-f]{8}_\d+"
)
_LENGTH = re.compile(rb"\d+\Z")
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
        places = (match.start() for match in re.finditer(form, text))
        units = {_whole_name(text, place) for place in places}
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


def _whole_name(text: bytes, start: int) -> bytes | None:
    """Return the whole name whose form begins at ``start``, with the length that stands before it.

    Digits of the next name may follow the number at its end, and digits of the previous name may
    stand before its length. Return None unless only one reading of both fits, or if the name is not
    part of one identifier: replacing it would then remove a piece of the program.
    """
    length = _LENGTH.search(text[max(0, start - _MOST_DIGITS) : start])
    digits = length[0] if length else b""

    readings = set()
    for place in range(len(digits)):
        size = int(digits[place:])
        name = text[start : start + size]
        unit = _UNIT.fullmatch(name)
        is_whole = len(name) == size <= _LONGEST
        if is_whole and unit and len(unit[2]) == int(unit[1]):
            readings.add(b"%d%s" % (size, name))

    return readings.pop() if len(readings) == 1 else None


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
