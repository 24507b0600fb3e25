"""Read the rules about libraries in wheels, from ``recipes/wheel_rules.toml``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import PurePosixPath

from packaging.tags import parse_tag

from patchkit.elf import by_version
from patchkit.records import RECIPES, read_toml

# auditwheel puts a hash into the names of libraries that it copies: libfoo-1a2b3c4d.so.1.
_FILE = re.compile(
    r"(?P<name>lib[\w+-]+?)(?:[-.][0-9a-f]{8,})?\.so(?:\.(?P<number>\d+)[\d.]*)?"
)
_PEP600 = re.compile(r"manylinux_(\d+)_(\d+)_\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLibraries:
    """Libraries of which a process must have one copy, and the projects whose wheels carry it."""

    owners: tuple[str, ...]
    names: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryNames:
    """Names of libraries, or patterns of projects."""

    names: frozenset[str]

    def cover(self, project: str) -> bool:
        return any(fnmatchcase(project, pattern) for pattern in self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryRules:
    """The fields are described in the file."""

    shared: tuple[SharedLibraries, ...]
    closed: LibraryNames
    cuda: LibraryNames
    numbered: LibraryNames
    libstdcxx: Mapping[str, Mapping[str, str]]
    legacy: Mapping[str, str]
    pins: LibraryNames
    compiled_against: LibraryNames

    def foreign(self, project: str, member: str) -> SharedLibraries | None:
        """Return whose a library is that a wheel of this project must not carry, None if it may."""
        match = _FILE.fullmatch(PurePosixPath(member).name)
        for shared in self.shared:
            owned = any(fnmatchcase(project, owner) for owner in shared.owners)
            if match and match["name"] in shared.names and not owned:
                return shared
        return None

    def is_closed(self, project: str, member: str) -> bool:
        """Check whether a library is NVIDIA's own, by its project or by its name."""
        match = _FILE.fullmatch(PurePosixPath(member).name)
        known = [each for each in self.shared if match and match["name"] in each.names]
        owners = {owner for each in known for owner in each.owners}
        return self.closed.cover(project) or bool(owners & self.closed.names)

    def cuda_majors(self, needed: Iterable[str]) -> tuple[int, ...]:
        """Return the major versions of CUDA that a library needs: 13 for libcudart.so.13."""
        matches = filter(None, map(_FILE.fullmatch, needed))
        numbers = (
            match["number"] for match in matches if match["name"] in self.cuda.names
        )
        return tuple(sorted({int(number) for number in numbers if number}))

    def promised_glibc(self, tag: str) -> str:
        """Return the oldest glibc that a tag names as enough; "" for ``linux_aarch64``."""
        said = set()
        for platform in (part.platform for part in parse_tag(tag)):
            match = _PEP600.fullmatch(platform)
            older = self.legacy.get(platform.partition("_")[0], "")
            said.add(f"{match[1]}.{match[2]}" if match else older)
        return "" if not all(said) else min(said, key=by_version)


@cache
def library_rules() -> LibraryRules:
    """Load the rules that ship with patchkit, once."""
    return read_toml(LibraryRules, RECIPES / "wheel_rules.toml")
