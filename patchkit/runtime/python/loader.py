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


@dataclass(slots=True, kw_only=True)
class Library:
    """A file as the loader sees it, with ``$ORIGIN`` filled in.

    ``names`` are those under which it is known in a process, ``why`` is why it is there.
    """

    path: str
    machine: str
    needed: tuple[str, ...]
    rpath: tuple[str, ...]
    runpath: tuple[str, ...]
    names: set[str]
    why: str = ""


def read_library(path: str) -> Library | None:
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
    return Library(
        path=path,
        machine=facts.machine,
        needed=facts.needed,
        # A library that has both kinds has only the second, for the loader.
        rpath=() if runpath else rpath,
        runpath=runpath,
        names={facts.soname} - {""},
    )


def exports(path: str, symbol: str) -> bool:
    """Return whether a library defines a symbol for others; a damaged one does not."""
    try:
        return elf.exports(Path(path), symbol)
    except (SourceError, OSError):
        return False


@dataclass(kw_only=True)
class Process:
    """A process as far as the loader is concerned; ``mapped`` in the order of loading."""

    executable: Library
    environment: Mapping[str, str]
    multiarch: str = ""
    mapped: list[Library] = field(default_factory=list)

    def open(self, path: str, why: str) -> Library | None:
        """Map a path as ``dlopen`` does. The same file is not mapped twice, a copy of it is."""
        absolute = Path.cwd() / path
        plain = Path(os.path.normpath(absolute))
        # Without `..` where no link makes that another file.
        library = read_library(
            str(plain if plain.exists() and plain.samefile(absolute) else absolute)
        )
        if library is None or not self.fits(library):
            return None
        for known in self.mapped:
            # As glibc: by device and inode, not by name.
            if Path(known.path).samefile(path):
                return known
        library.why = why
        self.mapped.append(library)
        return library

    def fits(self, library: Library | None) -> bool:
        """Return whether the file is for this CPU; the loader passes over others."""
        return library is not None and library.machine == self.executable.machine

    def need(self, name: str, owner: Library) -> Library | None:
        """Map what a name without a slash leads to, as DT_NEEDED of or ``dlopen`` in ``owner``."""
        for known in self.mapped:
            if name in known.names:
                return known
        for path, why in self._search(name, owner):
            if found := self.open(path, why):
                found.names.add(name)
                return found
        return None

    def _search(self, name: str, owner: Library) -> Iterator[tuple[str, str]]:
        """Yield where the loader looks for a name that is not mapped yet, and why there."""
        for library in (owner, self.executable) if not owner.runpath else ():
            for folder in library.rpath:
                why = f"DT_RPATH of {Path(library.path).name}, before LD_LIBRARY_PATH"
                yield f"{folder}/{name}", why
        for folder in self.library_path:
            yield f"{folder}/{name}", "LD_LIBRARY_PATH"
        for folder in owner.runpath:
            why = f"DT_RUNPATH of {Path(owner.path).name}, after LD_LIBRARY_PATH"
            yield f"{folder}/{name}", why
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
        found: dict[str, list[str]] = {}
        lines = attempt(command, "-p").output.splitlines() if command else ()
        for match in filter(None, map(_CACHED.fullmatch, lines)):
            found.setdefault(match["name"], []).append(match["path"])
        return found
