"""Name the kernels that a device does not get, from the machine code that does not load.

Names are read from cubins that are stored as they are, as CUDA 12 stores those of one arch;
compressed ones are not opened.
"""

from __future__ import annotations

import io
import re
import struct
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from io import BufferedIOBase

from patchkit.elf import parse_sections
from patchkit.target import Load, Target
from patchkit.wheel.device.fatbin import CodeEntry, read_entries
from patchkit.wheel.device.inspect import LIVE, best, fat_binaries
from patchkit.wheel.file.wheelfile import WheelFile

UNNAMED = "kernels that cannot be named, since they are compressed"
OTHERS = "others"
# A cubin is an ELF file with a section .text.NAME for each kernel.
_KERNEL = ".text."
_HEADER = struct.Struct("<H")  # the size of a container's header, behind magic and version
_ENTRY_HEADER = struct.Struct("<I")  # the size of an entry's header, behind kind and version

Groups = Sequence[tuple[re.Pattern[str], str]]
"""Patterns in mangled names, and what such kernels are for; the first that matches decides."""


def is_lost(group: Collection[CodeEntry], target: Target) -> bool:
    """Check whether a fat binary has code for the target's major version, but none for it."""
    related = any(entry.arch.major == target.major for entry in group)
    return related and best(group, target) is Load.NONE


def lost_kernels(
    wheel: WheelFile, names: Collection[str], target: Target, groups: Groups
) -> dict[str, Counter[str]]:
    """Count, for each of the libraries ``names``, its lost kernels by what they are for.

    Raises SourceError if a library is damaged.
    """
    found: dict[str, Counter[str]] = {}
    for name, stream in wheel.libraries(only=names) if names else ():
        counts = found[name] = Counter()
        for kernel in _kernels(stream, f"{wheel.path}: {name}", target):
            fitting = (purpose for pattern, purpose in groups if pattern.search(kernel))
            counts[next(fitting, OTHERS) if kernel else UNNAMED] += 1
    return found


def _kernels(stream: BufferedIOBase, where: str, target: Target) -> Iterator[str]:
    """Yield the mangled names of lost kernels, "" for code whose names are compressed."""

    def number(position: int, layout: struct.Struct) -> int:
        stream.seek(position)
        return int(layout.unpack(stream.read(layout.size))[0])

    sections = [section for section in parse_sections(stream, where) if section.name == LIVE]
    for group in fat_binaries(read_entries(stream, sections, where)):
        if not is_lost(group, target):
            continue
        position = group[0].container + number(group[0].container + 6, _HEADER)
        for entry in group:
            if entry.arch.major == target.major and entry.kind == "sass":
                if entry.compression != "none":
                    yield ""
                else:
                    header = number(position + 4, _ENTRY_HEADER)
                    stream.seek(position + header)
                    cubin = io.BytesIO(stream.read(entry.size - header))
                    for section in parse_sections(cubin, f"{where}: device code"):
                        if section.name.startswith(_KERNEL):
                            yield section.name.removeprefix(_KERNEL)
            position += entry.size
