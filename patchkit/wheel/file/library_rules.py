"""Read the rules about libraries in wheels, from ``recipes/wheel_rules.toml``."""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import PurePosixPath

from packaging.tags import parse_tag

from patchkit.elf import by_version
from patchkit.frozen import Texts, Values, frozen
from patchkit.records import RECIPES, read_toml

# auditwheel puts a hash into the names of libraries that it copies: libfoo-1a2b3c4d.so.1.
_FILE = re.compile(
    r"(?P<name>lib[\w+-]+?)(?:[-.][0-9a-f]{8,})?\.so(?:\.(?P<number>\d+)[\d.]*)?"
)
_PEP600 = r"manylinux_(\d+)_(\d+)_\w+"


@frozen
class SharedLibraries:
    """Libraries of which a process may load one copy only, and the projects whose wheels hold them.

    ``owners`` are patterns of project names, ``names`` are file names without version: ``libnccl``.
    """

    owners: Texts
    names: frozenset[str]


@frozen
class LibraryNames:
    """Names of libraries (``libcudart``), or patterns of project names (``nvidia-*``)."""

    names: frozenset[str]

    def cover(self, project: str) -> bool:
        return any(fnmatchcase(project, pattern) for pattern in self.names)


@frozen
class LibraryRules:
    """The tables of ``recipes/wheel_rules.toml``, where comments describe each field."""

    shared: tuple[SharedLibraries, ...]
    closed: LibraryNames
    cuda: LibraryNames
    numbered: LibraryNames
    libstdcxx: Mapping[str, Values]
    legacy: Values
    pins: LibraryNames
    compiled_against: LibraryNames
    exact: LibraryNames
    of_family: LibraryNames
    module_paths: Values
    started: LibraryNames
    version_files: Values
    provided: Mapping[str, Texts]

    def foreign(self, project: str, member: str) -> SharedLibraries | None:
        """Return the owners of a library that a wheel of ``project`` must not hold.

        Return None if the wheel may hold it. ``member`` is the path of the library in the wheel.
        """
        for shared in self._shared_of(member):
            if not any(fnmatchcase(project, owner) for owner in shared.owners):
                return shared

        return None

    def is_closed(self, project: str, member: str) -> bool:
        """Return whether a library is NVIDIA's own, judged by its wheel's project or its name."""
        if self.closed.cover(project):
            return True

        shared = self._shared_of(member)
        return any(self.closed.names.intersection(row.owners) for row in shared)

    def _shared_of(self, member: str) -> list[SharedLibraries]:
        match = _FILE.fullmatch(PurePosixPath(member).name)
        if match is None:
            return []

        return [shared for shared in self.shared if match["name"] in shared.names]

    def cuda_majors(self, needed: Iterable[str]) -> tuple[int, ...]:
        """Return the major versions of CUDA that a library needs: 13 for libcudart.so.13.

        ``needed`` are the names of the libraries that it asks the loader for (DT_NEEDED).
        """
        majors = set()
        for name in needed:
            match = _FILE.fullmatch(name)
            if match and match["number"] and match["name"] in self.cuda.names:
                majors.add(int(match["number"]))

        return tuple(sorted(majors))

    def promised_glibc(self, tag: str) -> str:
        """Return the oldest glibc with which a tag promises to work: 2.28 for ``manylinux_2_28``.

        Return "" for a tag without a promise, such as ``linux_aarch64``.
        """
        versions = []
        for part in parse_tag(tag):
            if match := re.fullmatch(_PEP600, part.platform):
                versions.append(f"{match[1]}.{match[2]}")
            else:
                legacy = part.platform.partition("_")[0]
                versions.append(self.legacy.get(legacy, ""))

        return min(versions, key=by_version) if all(versions) else ""


@cache
def library_rules() -> LibraryRules:
    """Return the rules that ship with patchkit, which are read once."""
    return read_toml(LibraryRules, RECIPES / "wheel_rules.toml")
