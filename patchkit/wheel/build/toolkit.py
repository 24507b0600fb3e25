"""Unpack the CUDA toolkit of ``recipes/toolchain.toml``: NVIDIA's wheels, locked, in one folder."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

from patchkit.errors import StorageError
from patchkit.paths import RECIPES
from patchkit.records import read_toml
from patchkit.source.fetch import Progress, cache_dir, fetch
from patchkit.source.lock import LockEntry
from patchkit.wheel.file.wheelfile import WheelFile

CROSS = "targets/sbsa-linux"
"""Where, below a toolkit, nvcc looks when it compiles for an Arm server."""

_PREFIX = "nvidia/cu13/"  # where the wheels of CUDA 13 keep what a toolkit keeps below its root


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolkitWheel(LockEntry):
    """One locked wheel of NVIDIA's; the fields are described in ``recipes/toolchain.toml``."""

    project: str
    role: str
    machine: str


def locked_toolkit_wheels() -> tuple[ToolkitWheel, ...]:
    """Read the wheels of ``recipes/toolchain.toml``."""
    return read_toml(tuple[ToolkitWheel, ...], RECIPES / "toolchain.toml", key="wheel")


def locked_toolkit(here: str, machine: str, *, offline: bool, progress: Progress | None) -> Path:
    """Return the locked toolkit, unpacked once per set of wheels below the cache."""
    home, wheels = _toolkit_folder(here, machine)
    if home.is_dir():
        return home
    archives = [
        (fetch(w.project, w.version, {w.version: w}, offline=offline, progress=progress), w)
        for w in wheels
    ]
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home.parent) as folder:
            tree = Path(folder) / "cuda"
            for archive, wheel in archives:
                _extract_toolkit(archive, tree if wheel.machine == here else tree / CROSS, wheel)
            (tree / "lib64").symlink_to("lib")
            tree.rename(home)
    except FileExistsError:
        pass  # another build has just put it there
    except OSError as error:
        # A folder there, with files in it, is no failure (ENOTEMPTY): another build was quicker.
        if not home.is_dir():
            raise StorageError(
                f"cannot unpack the CUDA toolkit into {home}: {error.strerror or error}",
                hint="free some space (0.5 GB), or choose another cache with PATCHKIT_CACHE_DIR",
            ) from error
    return home


def _toolkit_folder(here: str, machine: str) -> tuple[Path, list[ToolkitWheel]]:
    """Return where the toolkit is unpacked, and its wheels."""
    wheels = [wheel for wheel in locked_toolkit_wheels() if wheel.machine == here]
    cross = [w for w in locked_toolkit_wheels() if w.machine == machine != here]
    # The other CPU's compiler wheel is wanted for a header alone (fatbinary_section.h).
    cross = [w for w in cross if w.role == "runtime" or w.project == "nvidia-cuda-nvcc"]
    # The folder is named by its contents: other wheels in the lock make another toolkit.
    names = "".join(wheel.sha256 for wheel in [*wheels, *cross])
    digest = hashlib.sha256(names.encode()).hexdigest()[:12]
    home = cache_dir() / "cuda" / f"{wheels[0].version}-{machine}-on-{here}-{digest}"
    return home, [*wheels, *cross]


def _extract_toolkit(archive: Path, dest: Path, wheel: ToolkitWheel) -> None:
    # Only the headers of the other CPU's compiler are for here.
    only_headers = wheel.role == "compiler" and dest.name == Path(CROSS).name
    parts = {"include"} if only_headers else {"bin", "include", "lib", "nvvm"}
    with WheelFile(archive) as opened:
        for path in opened.members:
            name = path.removeprefix(_PREFIX)
            if name == path or name.partition("/")[0] not in parts:
                continue
            file = dest / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb") as sink:
                sink.writelines(opened.unpacked(path))
            # Wheels are unpacked by hand here, so modes are too: bin/nvcc, nvvm/bin/cicc.
            file.chmod(0o755 if "/bin/" in f"/{name}" else 0o644)
