"""Pack patchkit with all that it needs for another machine, which then needs no network."""

from __future__ import annotations

import shutil
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

from patchkit.digests import sha256_of
from patchkit.durable.paths import is_file
from patchkit.errors import translated
from patchkit.source.fetch import Progress, cache_dir, fetch
from patchkit.wheel.build.toolchain import COMPILER, locked_toolkit_wheels
from patchkit.wheel.wheelhouse.fill import download_wheels
from patchkit.wheel.wheelhouse.resolve import NodePlatform, WheelSources, resolve_wheels

CACHE = "cache"
"""The folder of a kit that is patchkit's cache there."""


def copy_package(folder: Path) -> None:
    """Copy patchkit itself into a new folder. Raises StorageError."""
    with translated(at=folder):
        unread = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(__file__).parents[2], folder / "patchkit", ignore=unread)


def pack_kit(
    folder: Path, node: NodePlatform, progress: Progress, *, native: bool
) -> Path:
    """Add what patchkit needs on such a machine, by hash; return the archive of the folder.

    With ``native`` the compilers of PTX go along. Raises what a resolution and a fetch raise.
    """
    needed = [
        each for each in metadata.requires("patchkit-gb10") or () if "extra" not in each
    ]
    chosen, place = (
        resolve_wheels([], needed, node, WheelSources()),
        cache_dir() / "kit",
    )
    with translated(at=place):
        place.mkdir(parents=True, exist_ok=True)
        absent = [
            wheel
            for wheel in chosen
            if not is_file(file := place / wheel.filename)
            or sha256_of(file) != wheel.sha256
        ]
        download_wheels(absent, place, progress)
    kit, sdists = folder.with_suffix(".tar"), folder / CACHE / "sdists"
    with translated(at=folder):
        for wheel in chosen:
            with zipfile.ZipFile(place / wheel.filename) as archive:
                archive.extractall(folder)  # noqa: S202  # it has the sha256 of the index
        sdists.mkdir(parents=True)
        for it in locked_toolkit_wheels() if native else ():
            if it.project == COMPILER and it.machine == node.machine:
                file = fetch(
                    it.project, it.version, {it.version: it}, progress=progress
                )
                shutil.copy(file, sdists)
        with tarfile.open(kit, "w") as packed:
            packed.add(folder, ".")
    return kit
