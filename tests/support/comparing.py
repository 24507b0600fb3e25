"""Compare two builds: are they the same bytes, and if not, what differs first."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.constants import SH_FLAGS
from elftools.elf.elffile import ELFFile


def first_object(first: Mapping[str, str], second: Mapping[str, str]) -> str:
    """Return the first object that differs or that only one build has; "" if there is none."""
    return next(
        (
            name
            for name in sorted({*first, *second})
            if first.get(name) != second.get(name)
        ),
        "",
    )


def first_member(first: Path, second: Path) -> str:
    """Return what differs first between two wheels; "" if their bytes are the same."""
    if first.read_bytes() == second.read_bytes():
        return "the file name" if first.name != second.name else ""
    with zipfile.ZipFile(first) as one, zipfile.ZipFile(second) as two:
        names = one.namelist()
        if names != two.namelist():
            odd = sorted(set(names) ^ set(two.namelist()))
            return (
                f"{odd[0]} is in one of them only"
                if odd
                else "the order of the members"
            )
        for name in names:
            if one.read(name) != two.read(name):
                return name
    return "the zip's own fields, such as times and modes"


def object_digests(build: Path) -> dict[str, str]:
    """Map each object below a folder to the sha256 of what it puts into memory.

    Debug information and symbol names are left out: the linker drops them, and nvcc puts process
    numbers there.
    """
    found = {}
    for path in sorted(build.rglob("*.o")):
        digest = hashlib.sha256()
        try:
            with path.open("rb") as stream:
                for section in ELFFile(stream).iter_sections():
                    if section["sh_flags"] & SH_FLAGS.SHF_ALLOC:
                        digest.update(
                            f"{section.name}\0{section['sh_size']}\0".encode()
                        )
                        digest.update(section.data())
        except ELFError:  # every byte counts
            digest = hashlib.sha256(path.read_bytes())
        found[str(path.relative_to(build))] = digest.hexdigest()
    return found
