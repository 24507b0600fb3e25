"""Put a stand-in for torch into a build environment, which answers for the torch of another CPU.

A build asks torch, through Python, for versions, flags and folders. The torch of the target's CPU
cannot be imported, so its files are read instead: ``torch_stand_in/`` says what of them. What it
answers is asked as of any torch: ``patchkit.wheel.file.torch.installed_torch``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from email.parser import BytesHeaderParser
from pathlib import Path

from packaging.version import Version

from patchkit.durable.lock import locked
from patchkit.errors import BuildError, StorageError

_STAND_IN = Path(__file__).parent / "torch_stand_in"
_TARGET = "target"  # the file of the stand-in that names the target's torch
_PATIENCE = 10.0  # seconds, with another build that writes a few small files


def install_torch_stand_in(site: Path, target: Path) -> None:
    """Install the stand-in into ``site``, from where it reads the torch in ``target``.

    Both are site-packages folders: of the build environment, and of the unpacked wheels for the
    other CPU, which stays where it is as long as the build runs. Raises BuildError if ``target``
    has no torch, or ``site`` has a real one, and StorageError if it cannot be written.
    """
    package, wanted = site / "torch", _stand_in(target)
    if package.exists() and not (package / _TARGET).is_file():
        raise BuildError(
            f"{package} is a real torch",
            why="a build for another CPU has a stand-in there, and both have one name",
            hint="name an environment without torch, or let patchkit make one",
        )
    try:
        with locked(site, _PATIENCE):
            # Another build may be asking this one: only what is of another torch, or of another
            # patchkit, is written anew.
            if _has(site, wanted):
                return
            for old in (package, *site.glob("torch-*.dist-info")):
                shutil.rmtree(old, ignore_errors=True)
            for name, content in wanted.items():
                (site / name).parent.mkdir(parents=True, exist_ok=True)
                (site / name).write_bytes(content)
    except OSError as error:
        raise StorageError(
            f"cannot write {package}: {error.strerror or error}",
            hint="free some space, or look at who owns the folder",
        ) from error


def _stand_in(target: Path) -> Mapping[str, bytes]:
    """Return the files of the stand-in for a torch: path below site-packages → content."""
    release = _release(target)
    files = {
        f"torch/{path.relative_to(_STAND_IN)}": path.read_bytes()
        for path in sorted(_STAND_IN.rglob("*.py"))
    }
    files[f"torch/{_TARGET}"] = os.fsencode(target.absolute() / "torch")
    about = f"Metadata-Version: 2.1\nName: torch\nVersion: {release}\n"
    files[f"torch-{release}.dist-info/METADATA"] = about.encode()
    return files


def _has(site: Path, wanted: Mapping[str, bytes]) -> bool:
    """Return whether a folder has these files, and describes no other torch."""
    there = {name: site / name for name in wanted if (site / name).is_file()}
    described = [str(path.relative_to(site)) for path in site.glob("torch-*.dist-info/METADATA")]
    same = all(path.read_bytes() == wanted[name] for name, path in there.items())
    return same and len(there) == len(wanted) and set(described) <= wanted.keys()


def _release(target: Path) -> Version:
    """Return the version of torch by its metadata, which has no label as ``+cu130``."""
    found = sorted(target.glob("torch-*.dist-info/METADATA"))
    try:
        (path,) = found
        return Version(BytesHeaderParser().parsebytes(path.read_bytes())["Version"])
    except (ValueError, TypeError, OSError) as error:
        raise BuildError(
            f"{target} does not say which torch it has: "
            f"{error if len(found) == 1 else f'{len(found)} folders torch-….dist-info'}",
            why="its torch is not there, or it was unpacked in part",
            hint="remove the folder, so that it is unpacked again",
        ) from error
