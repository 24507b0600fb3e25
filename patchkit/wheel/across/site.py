"""Bring torch and the CUDA libraries of the target's CPU, as files that are never executed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from patchkit.digests import digest, sha256_of
from patchkit.elf import read_dynamic
from patchkit.errors import BuildError
from patchkit.process import ask
from patchkit.quoting import quoted
from patchkit.recipes.vllm.build import across
from patchkit.wheel.build.plan import PlannedFetch
from patchkit.wheel.build.requirements import Pinned, for_python, install, made_once

Progress = Callable[[int, int], None]
"""Takes the packages installed, and the packages in all."""

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
    home, wanted = _place(requirements, folder, machine, python)
    site = home / "packages"

    def fill(scratch: Path) -> None:
        install(
            *(python, requirements, wanted),
            *(f"--target={scratch / site.name}", "--no-compile", "--implementation=cp"),
            *(f"--platform={name}_{machine}" for name in _PLATFORMS),
            offline=offline,
            progress=progress,
        )

    made_once(home, site / "torch", fill)
    _require_machine(site, machine)
    return site


def planned_site(requirements: Path, folder: Path, machine: str) -> PlannedFetch:
    """Return what `target_site` fetches, for this Python."""
    home, wanted = _place(requirements, folder, machine, Path(sys.executable))
    name = f"{len(wanted)} packages with torch and CUDA for {machine}, {across().download}"
    return PlannedFetch(name=name, there=(home / "packages" / "torch").exists())


def _place(
    requirements: Path, folder: Path, machine: str, python: Path
) -> tuple[Path, list[Pinned]]:
    """Return the folder of the packages, and which they are."""
    locked = for_python(requirements, python, machine)
    wanted = [each for each in locked if each.fits(across().target)]
    return folder / f"site-{machine}-{_identity(requirements, wanted, python)[:12]}", wanted


def _identity(requirements: Path, wanted: list[Pinned], python: Path) -> str:
    """Digest the packages, and the version of Python, whose wheels pip chooses."""
    version = ask(python, "import sys; answer = '%d.%d' % sys.version_info[:2]")
    return digest(" ".join([sha256_of(requirements), version, *(each.name for each in wanted)]))


def _require_machine(site: Path, machine: str) -> None:
    """Raise BuildError for a library of another CPU, which only the linker would find out."""
    for folder in ("torch/lib", "nvidia/cu13/lib"):
        for library in sorted((site / folder).glob("*.so*")):
            found = read_dynamic(library).machine
            if found != machine:
                raise BuildError(
                    f"{library} is for {found or 'no known CPU'}, not for {machine}",
                    why="something else was put into the folder, or the disk was full",
                    hint=f"{quoted('rm', '-r', site.parent)}; then run the same command again",
                )
