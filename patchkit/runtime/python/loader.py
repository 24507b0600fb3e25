"""Play the dynamic loader of glibc: which file a name leads to, and why.

The rules are those of ld.so(8) and dlopen(3): a name that is mapped already is taken as it is;
otherwise DT_RPATH, LD_LIBRARY_PATH, DT_RUNPATH, the cache and the system's folders, in this order.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from patchkit import elf
from patchkit.errors import SourceError
from patchkit.process import attempt

_CACHED = re.compile(r"\s*(?P<name>\S+) \(.*\) => (?P<path>/.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loadable(elf.Dynamic):
    """The facts of a file for the loader; ``$ORIGIN`` is filled in."""

    path: str

    @property
    def name(self) -> str:
        return Path(self.path).name


def read_loadable(path: str) -> Loadable | None:
    """Return None for a file that is not a whole ELF file: the loader would refuse it as well."""
    try:
        facts = elf.read_dynamic(Path(path))
    except (SourceError, OSError):
        return None
    origin = str(Path(path).parent)
    rpath, runpath = (
        tuple(folder.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for folder in folders)
        for folders in (facts.rpath, facts.runpath)
    )
    return Loadable(
        path=path,
        machine=facts.machine,
        soname=facts.soname,
        needed=facts.needed,
        rpath=rpath,
        runpath=runpath,
    )


def exports(path: str, symbol: str) -> bool:
    """Return whether a library defines a symbol for others; a damaged one does not."""
    try:
        return elf.exports(Path(path), symbol)
    except (SourceError, OSError):
        return False


def _absolute_path(path: str) -> str:
    """Return the absolute path; without ``..`` where no link makes that another file."""
    absolute = Path.cwd() / path
    plain = Path(os.path.normpath(absolute))
    return str(plain if plain.exists() and plain.samefile(absolute) else absolute)


@dataclass(slots=True)
class Mapped:
    """A library in the process, the names under which it is known, and why it is there."""

    library: Loadable
    names: set[str]
    why: str

    @property
    def path(self) -> str:
        return self.library.path


@dataclass(kw_only=True)
class Process:
    """A process as far as the loader is concerned; ``mapped`` in the order of loading."""

    executable: Loadable
    environment: Mapping[str, str]
    multiarch: str = ""
    mapped: list[Mapped] = field(default_factory=list)

    def open(self, path: str, why: str) -> Mapped | None:
        """Map a path as ``dlopen`` does. The same file is not mapped twice, a copy of it is."""
        library = read_loadable(_absolute_path(path))
        if library is None or not self.fits(library):
            return None
        for known in self.mapped:
            # As glibc: by device and inode, not by name.
            if Path(known.path).samefile(path):
                return known
        fresh = Mapped(library, {library.soname} - {""}, why)
        self.mapped.append(fresh)
        return fresh

    def fits(self, library: Loadable | None) -> bool:
        """Return whether the file is for this CPU; the loader passes over others."""
        return library is not None and library.machine == self.executable.machine

    def need(self, name: str, owner: Loadable) -> Mapped | None:
        """Map what a name without a slash leads to, as DT_NEEDED of or ``dlopen`` in ``owner``."""
        for known in self.mapped:
            if name in known.names:
                return known
        for path, why in self.search(name, owner):
            if found := self.open(path, why):
                found.names.add(name)
                return found
        return None

    def search(self, name: str, owner: Loadable) -> Iterator[tuple[str, str]]:
        """Yield where the loader looks for a name that is not mapped yet, and why there."""
        for library in (owner, self.executable) if not owner.runpath else ():
            # A library that has both kinds has only the second, for the loader.
            for folder in library.rpath if not library.runpath else ():
                yield f"{folder}/{name}", f"DT_RPATH of {library.name}, before LD_LIBRARY_PATH"
        for folder in self.library_path:
            yield f"{folder}/{name}", "LD_LIBRARY_PATH"
        for folder in owner.runpath:
            yield f"{folder}/{name}", f"DT_RUNPATH of {owner.name}, after LD_LIBRARY_PATH"
        for path in self.cache.get(name, ()):
            yield path, "the system's ld.so.cache"
        for folder in ("/lib", "/usr/lib"):
            # Debian's folder, that of 64-bit Fedora and SUSE, and the plain one.
            for part in (f"/{self.multiarch}", "64", ""):
                yield f"{folder}{part}/{name}", "a folder of the system"

    @property
    def library_path(self) -> list[str]:
        """Return the folders of LD_LIBRARY_PATH; an empty entry is the current one."""
        value = self.environment.get("LD_LIBRARY_PATH", "")
        return [folder or "." for folder in re.split("[:;]", value)] if value else []

    @cached_property
    def cache(self) -> dict[str, list[str]]:
        """Return ld.so.cache as ldconfig prints it: name → paths."""
        # A user's PATH often lacks sbin.
        command = shutil.which("ldconfig", path=os.defpath + ":/sbin:/usr/sbin")
        if command is None:
            return {}
        found: dict[str, list[str]] = {}
        for match in map(_CACHED.fullmatch, attempt(command, "-p").output.splitlines()):
            if match:
                found.setdefault(match["name"], []).append(match["path"])
        return found
