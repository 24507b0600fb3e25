"""Put a stand-in for torch into a build environment, which answers for the torch of another CPU.

A build asks torch, through Python, for versions, flags and folders. The torch of the target's CPU
cannot be imported, so its files are read instead: ``torch_stand_in/`` says what of them. What it
answers is asked as of any torch: ``patchkit.wheel.file.torch.installed_torch``.
"""

from __future__ import annotations

import os
import shutil
from fnmatch import fnmatchcase
from importlib.metadata import distributions
from pathlib import Path

from packaging.version import Version

from patchkit.digests import digest, sha256_of
from patchkit.durable.lock import locked as hold_lock
from patchkit.elf import read_dynamic
from patchkit.errors import BuildError, translated
from patchkit.process import ask
from patchkit.quoting import quoted
from patchkit.recipes.vllm.build import across
from patchkit.source.archive import Progress
from patchkit.wheel.build.requirements import for_python, install_locked, made_once

_STAND_IN = Path(__file__).parent / "torch_stand_in"
_TARGET = "target"  # the file of the stand-in that names the target's torch
_PATIENCE = 10.0  # seconds, with another build that writes a few small files


def install_torch_stand_in(site: Path, target: Path) -> None:
    """Install the stand-in into ``site``, from where it reads the torch in ``target``.

    Both are site-packages folders: of the build environment, and of the unpacked wheels for the
    other CPU, which stays where it is as long as the build runs. Raises BuildError if ``target``
    has no torch, or ``site`` has a real one, and StorageError if it cannot be written.
    """
    package = site / "torch"
    try:  # its metadata has no label as ``+cu130``
        (found,) = distributions(name="torch", path=[str(target)])
        release = Version(found.metadata["Version"])
    except (ValueError, TypeError, KeyError) as error:
        raise BuildError(
            f"{target} does not say which torch it has: {error}",
            why="its torch is not there, or it was unpacked in part",
            hint="remove the folder, so that it is unpacked again",
        ) from error
    if package.exists() and not (package / _TARGET).is_file():
        raise BuildError(
            f"{package} is a real torch",
            why="a build for another CPU has a stand-in there, and both have one name",
            hint="name an environment without torch, or let patchkit make one",
        )
    about = f"Metadata-Version: 2.1\nName: torch\nVersion: {release}\n"
    with translated("the stand-in for torch is not complete", package):
        # Path below site-packages → content.
        wanted = {
            f"torch/{path.relative_to(_STAND_IN)}": path.read_bytes()
            for path in sorted(_STAND_IN.rglob("*.py"))
        } | {
            "torch/version.py": (target / "torch/version.py").read_bytes(),
            f"torch/{_TARGET}": os.fsencode(target.absolute() / "torch"),
            f"torch-{release}.dist-info/METADATA": about.encode(),
        }
        with hold_lock(site, _PATIENCE):
            # Another build may be asking this one: only what is of another torch, or of another
            # patchkit, is written anew.
            described = {str(p.relative_to(site)) for p in site.glob("torch-*.dist-info/METADATA")}
            same = all(
                (site / name).is_file() and (site / name).read_bytes() == content
                for name, content in wanted.items()
            )
            if same and described <= wanted.keys():
                return
            for old in (package, *site.glob("torch-*.dist-info")):
                shutil.rmtree(old, ignore_errors=True)
            for name, content in wanted.items():
                (site / name).parent.mkdir(parents=True, exist_ok=True)
                (site / name).write_bytes(content)


# pip takes each platform by its exact name; DGX OS has glibc 2.39, and no wheel for Arm is older
# than 2.17.
_PLATFORMS = (*(f"manylinux_2_{minor}" for minor in range(39, 16, -1)), "manylinux2014")


def target_site(
    requirements: Path,
    folder: Path,
    machine: str,
    *,
    python: Path,
    offline: bool = False,
    progress: Progress = lambda _done, _total: None,
) -> Path:
    """Return a folder below ``folder`` with what a build for ``machine`` links with.

    It is laid out as site-packages, and made of the locked wheels for that CPU if it is not there
    yet. ``python`` runs pip. Raises BuildError, SourceError, StorageError; what a failure leaves is
    not taken for one.
    """
    locked = for_python(requirements, python, machine)
    patterns = across().target
    wanted = [pin for pin in locked if any(fnmatchcase(pin.name, each) for each in patterns)]
    # pip chooses wheels by the version of Python.
    version = ask(python, "import sys; answer = '%d.%d' % sys.version_info[:2]")
    name = digest(" ".join([sha256_of(requirements), version, *(pin.name for pin in wanted)]))
    home = folder / f"site-{machine}-{name[:12]}"
    site = home / "packages"

    with made_once(home, site / "torch") as is_empty:
        if is_empty:
            install_locked(
                *(python, requirements, wanted),
                *(f"--target={site}", "--no-compile", "--implementation=cp"),
                *(f"--platform={name}_{machine}" for name in _PLATFORMS),
                offline=offline,
                progress=progress,
            )
    # Only the linker would find out about a library of another CPU.
    for library in (*site.glob("torch/lib/*.so*"), *site.glob("nvidia/cu13/lib/*.so*")):
        found = read_dynamic(library).machine
        if found != machine:
            raise BuildError(
                f"{library} is for {found or 'no known CPU'}, not for {machine}",
                why="something else was put into the folder, or the disk was full",
                hint=f"{quoted('rm', '-r', home)}; then run the same command again",
            )
    return site
