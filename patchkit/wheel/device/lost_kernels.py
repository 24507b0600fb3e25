"""Which kernels a device does not get, by their names in the machine code that does not load.

Names are read from cubins that are stored as they are, as CUDA 12 stores those of one arch; inside
compressed ones nobody looks.
"""

from __future__ import annotations

import io
import re
import struct
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from io import BufferedIOBase
from pathlib import Path

from patchkit.elf import parse_library
from patchkit.target import Load, Target
from patchkit.wheel.device.fatbin import Entry, entries
from patchkit.wheel.device.inspect import LIVE, best, fat_binaries
from patchkit.wheel.file.members import libraries

UNNAMED = "kernels that cannot be named, since they are compressed"
OTHERS = "others"
_KERNEL = ".text."
_HEADER = struct.Struct("<H")  # the size of a container's header, behind magic and version
_ENTRY_HEADER = struct.Struct("<I")  # the size of an entry's header, behind kind and version

Groups = Sequence[tuple[re.Pattern[str], str]]
"""What a mangled name contains, and what such kernels are for; the first that fits decides."""


def is_lost(group: Collection[Entry], target: Target) -> bool:
    """Whether a fat binary has code for devices of the target's major version, but none for it."""
    related = any(entry.arch.major == target.major for entry in group)
    return related and best(group, target) is Load.NONE


def lost_kernels(
    wheel: Path, names: Collection[str], target: Target, groups: Groups
) -> dict[str, Counter[str]]:
    """Library → what its lost kernels are for, and how many of each there are.

    ``names`` are the libraries to look at. Raises SourceError if they are damaged.
    """
    found: dict[str, Counter[str]] = {}
    wanted = set(names)
    for name, stream in libraries(wheel) if wanted else ():
        if name in wanted:
            where = f"{wheel}: {name}"
            found[name] = Counter(
                _purpose(kernel, groups) for kernel in _lost(stream, where, target)
            )
            wanted.discard(name)
        if not wanted:
            break
    return found


def _lost(stream: BufferedIOBase, where: str, target: Target) -> Iterator[str]:
    sections = [each for each in parse_library(stream, where).sections if each.name == LIVE]
    for group in fat_binaries(entries(stream, sections, where)):
        if is_lost(group, target):
            yield from _kernels(stream, where, group, target)


def _kernels(
    stream: BufferedIOBase, where: str, group: Sequence[Entry], target: Target
) -> Iterator[str]:
    """The mangled names of the kernels in the code for the target's major version."""
    position = group[0].container + _number(stream, group[0].container + 6, _HEADER)
    for entry in group:
        header = _number(stream, position + 4, _ENTRY_HEADER)
        if entry.arch.major == target.major and entry.kind == "sass":
            if entry.compression != "none":
                yield ""
            else:
                stream.seek(position + header)
                cubin = io.BytesIO(stream.read(entry.size - header))
                yield from _names(cubin, where)
        position += entry.size


def _names(cubin: io.BytesIO, where: str) -> Iterator[str]:
    for section in parse_library(cubin, f"{where}: device code").sections:
        if section.name.startswith(_KERNEL):
            yield section.name.removeprefix(_KERNEL)


def _number(stream: BufferedIOBase, position: int, layout: struct.Struct) -> int:
    stream.seek(position)
    return int(layout.unpack(stream.read(layout.size))[0])


def _purpose(kernel: str, groups: Groups) -> str:
    if not kernel:
        return UNNAMED
    return next((purpose for pattern, purpose in groups if pattern.search(kernel)), OTHERS)
