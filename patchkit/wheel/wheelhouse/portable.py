"""Put what patchkit requires into its own folder, for a machine without a network."""

import shutil
import zipfile
from importlib import metadata
from pathlib import Path

from patchkit.errors import translated
from patchkit.source.fetch import Progress, cache_dir, fetch
from patchkit.wheel.build.machine import COMPILER, locked_toolkit_wheels
from patchkit.wheel.wheelhouse.fill import download_wheels, find_wheel_file
from patchkit.wheel.wheelhouse.resolve import NodePlatform, resolve_wheels


def add_requirements(folder: Path, node: NodePlatform, progress: Progress) -> None:
    """Download the wheels that patchkit requires on a node, and unpack them into ``folder``.

    Raises as ``resolve_wheels`` and ``download_wheels`` do, and StorageError.
    """
    requirements = [
        line for line in metadata.requires("patchkit-gb10") or () if "extra" not in line
    ]
    wheels = resolve_wheels([], requirements, node)

    store = cache_dir() / "kit"
    with translated(at=store):
        store.mkdir(parents=True, exist_ok=True)
        absent = [wheel for wheel in wheels if not find_wheel_file(wheel, store)]
        download_wheels(absent, store, progress)

    with translated(at=folder):
        for wheel in wheels:
            with zipfile.ZipFile(store / wheel.name) as archive:
                archive.extractall(folder)  # safe: its sha256 is the one of the index


def add_compiler(cache: Path, machine: str, progress: Progress) -> None:
    """Download the wheel of ptxas, the compiler of PTX, into ``cache`` for a CPU.

    ``cache`` is to become patchkit's cache on a machine with the CPU ``machine``: ``aarch64``.
    Raises as ``fetch`` does, and StorageError.
    """
    sdists = cache / "sdists"
    with translated(at=sdists):
        sdists.mkdir(parents=True)
        for wheel in locked_toolkit_wheels():
            if wheel.project == COMPILER and wheel.machine == machine:
                locked = {wheel.version: wheel}
                file = fetch(wheel.project, wheel.version, locked, progress=progress)
                shutil.copy(file, sdists)
