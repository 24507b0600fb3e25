"""List the PTX that a device would compile at first use, in a library, wheel or environment."""

import csv
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from packaging.utils import canonicalize_name

from patchkit.durable.paths import is_plain
from patchkit.errors import SourceError, UsageError
from patchkit.fatbin import Entries
from patchkit.frozen import frozen
from patchkit.source.tree import SourceTree
from patchkit.target import Target
from patchkit.wheel.device.inspect import (
    Binaries,
    inspect_file,
    inspect_wheel,
    jit_entries,
)
from patchkit.wheel.file.library_rules import library_rules
from patchkit.wheel.file.wheelfile import WheelFile


@frozen
class DeviceLibrary:
    """A library with device code; ``name`` is its path in a wheel or an environment.

    ``project`` is the project that has the library, "" for a bare file. ``entries`` is the PTX that
    the device would compile. A ``closed`` library is NVIDIA's own, and is never rewritten.
    """

    project: str
    name: str
    fat_binaries: int
    entries: Entries
    closed: bool

    @property
    def writable(self) -> bool:
        return bool(self.entries) and not self.closed


def list_libraries(path: Path, target: Target) -> tuple[DeviceLibrary, ...]:
    """List the libraries with device code at ``path``: a wheel, a library, or an environment.

    Raises UsageError for any other path, SourceError for a damaged file.
    """
    if path.is_dir():
        return tuple(list_installed(find_site(path), target))

    if path.suffix == ".whl":
        with WheelFile(path) as wheel:
            name = wheel.name
            binaries = inspect_wheel(wheel)
        return tuple(_list_binaries(binaries, target, name.project))

    return tuple(_list_binaries([inspect_file(path)], target, ""))


def first_use_entries(binaries: Binaries, target: Target) -> Entries:
    """Return the PTX in libraries that the device would compile at first use."""
    return tuple(entry for binary in binaries for entry in jit_entries(binary, target))


def find_site(path: Path) -> Path:
    """Return the site-packages folder of ``path``: an environment, this folder, or a package in it.

    Raises UsageError if there is none, or more than one.
    """
    for folder in (path, *path.parents[:1]):
        if any(folder.glob("*.dist-info")):
            return folder

    sites = sorted(path.glob("lib/python3*/site-packages"))
    if len(sites) != 1:
        raise UsageError(
            f"{path}: {len(sites)} folders lib/python3*/site-packages, expected 1",
            why="it is no environment, or one for several Pythons",
            hint="name the site-packages folder",
        )
    return sites[0]


def list_installed(
    site: Path,
    target: Target,
    only: str = "",
) -> Iterator[DeviceLibrary]:
    """Yield the libraries with device code of all installed packages, or of the project ``only``.

    Damaged files are passed over, and packages whose RECORD cannot be read.
    """
    for home in sorted(site.glob("*.dist-info")):
        project = canonicalize_name(home.name.partition("-")[0])
        if only not in ("", project):
            continue

        package = metadata.Distribution.at(home)
        try:
            # Not ``package.files``: from Python 3.12 on it fails at a name that is too long.
            record = package.read_text("RECORD") or ""
            rows = [row for row in csv.reader(record.splitlines()) if row]
        except (ValueError, csv.Error):
            continue  # neither does pip read it

        for path, *_digest in rows:
            if not _is_library(site, path):
                continue

            try:
                binary = replace(inspect_file(site / path), name=path)
            except SourceError:
                continue  # a linker's script, or damaged: the loader does not take it either
            yield from _list_binaries([binary], target, project)


def _is_library(site: Path, path: str) -> bool:
    # Not paths that lead out of the environment, nor originals in .patchkit, which nothing loads.
    is_aside = not is_plain(path) or ".patchkit/" in path
    return ".so" in Path(path).suffixes and not is_aside and (site / path).is_file()


def package_libraries(tree: SourceTree, target: Target) -> list[str]:
    """Return the names of the libraries of an installed package that have PTX to assemble.

    Raises UsageError for a source tree.
    """
    if tree.kind != "installed":
        raise UsageError(
            f"{tree.root}: a source tree holds no libraries yet",
            hint="build it, or name an installed vLLM: SITE-PACKAGES/vllm",
        )

    libraries = list_installed(tree.root, target, tree.project)
    return [library.name for library in libraries if library.writable]


def _list_binaries(
    binaries: Binaries,
    target: Target,
    project: str,
) -> Iterator[DeviceLibrary]:
    for binary in binaries:
        if binary.live:
            yield DeviceLibrary(
                project=project,
                name=binary.name,
                fat_binaries=len(binary.fat_binaries),
                entries=jit_entries(binary, target),
                closed=library_rules().is_closed(project, binary.name),
            )
