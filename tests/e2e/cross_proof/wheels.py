"""Install the wheels of a wheelhouse, with what they need, into a root file system from outside.

pip runs on this machine and is told of the other one: it would take half an hour under qemu, which
`pip check` inside does not. Nothing that it installs is run meanwhile.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from e2e.cross_proof.arm64 import CPU, RootFs
from patchkit.errors import UsageError
from patchkit.quoting import quoted
from patchkit.wheel.file.name import ANY
from patchkit.wheel.wheelhouse.contents import load_manifest
from patchkit.wheel.wheelhouse.manifest import (
    MANIFEST,
    REQUIREMENTS,
    SUMS,
    Kind,
    Manifest,
    ManifestEntry,
)
from patchkit.wheel.wheelhouse.storage import wheelhouse_command
from support.proving import run

NEEDS = "/opt/needs"  # inside: what patchkit needs
# No import needs them: kernels, compilers of kernels, videos. 3 of 9 GB installed for 0.25.1.
LEFT_OUT = {
    *("flashinfer-cubin", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-cu13"),
    *("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-tileiras", "tilelang", "tokenspeed-triton"),
    *("z3-solver", "pynvvideocodec"),
}
_PROJECT = re.compile(r"[A-Za-z0-9._-]+(?===)")
_BROKEN = re.compile(
    r"\S+ \S+ (?:requires (?P<missing>\S+), which is not installed\."
    r"|has requirement (?P<wanted>[\w.-]+).*, but you have .*)"
    r"|(?P<foreign>\S+) \S+ is not supported on this platform"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """Everything to be installed, as pip takes it: lines of ``project==version --hash=sha256:…``.

    ``listed`` is the manifest that it belongs to, ``left_out`` are projects that are not in it.
    """

    house: Path
    listed: Manifest
    lines: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def built(self) -> tuple[ManifestEntry, ...]:
        return built(self.listed)


def built(listed: Manifest) -> tuple[ManifestEntry, ...]:
    """Return the wheels of patchkit's own making."""
    return tuple(entry for entry in listed.wheels if entry.kind is Kind.BUILT)


def require_cpu(house: Path) -> tuple[ManifestEntry, ...]:
    """Return what was built. Raises UsageError if that is nothing, or is for another CPU."""
    found = built(load_manifest(house))
    for entry in found:
        if not entry.name.cpus & {CPU, ANY}:
            raise UsageError(
                f"{house / entry.filename}: is for {' and '.join(sorted(entry.name.cpus))}",
                why=f"what is proved is an installation on {CPU}",
                hint=f"name a folder with wheels for {CPU}; or, without it: "
                f"{wheelhouse_command('prune', house, '--drop', entry.filename)}",
            )
    if not found:
        raise UsageError(
            f"{house}: no wheel in it was built by patchkit",
            hint=f"{quoted('patchkit', 'repack', 'vllm==0.25.1', '--dir', house)}",
        )
    return found


def lock(house: Path, python: str, scratch: Path) -> tuple[Lock, str]:
    """Return what is to be installed on a Python, and in words which lock that is.

    The wheelhouse's own if it was filled for that Python; else one that `fill` makes beside it.
    """
    listed = load_manifest(house)
    others = [entry for entry in listed.wheels if entry.kind is not Kind.BUILT]
    pythons = {".".join(str(entry.facts.get("python")).split(".")[:2]) for entry in others}
    how = "the wheelhouse's own"
    if pythons != {python}:
        filled = f"it is filled for CPython {pythons.pop()}" if pythons else "it is not filled"
        how = f"resolved for CPython {python}: {filled}"
        house = _copied(house, scratch / "house")
        fill = ("wheelhouse", "fill", "--lock-only", "--python-version", python)
        run(sys.executable, "-m", "patchkit", *fill, "--dir", str(house))
        listed = load_manifest(house)
    lines = [
        line for line in (house / REQUIREMENTS).read_text().splitlines() if _PROJECT.match(line)
    ]
    out = tuple(sorted(set(map(_project, lines)) & LEFT_OUT))
    kept = tuple(line for line in lines if _project(line) not in out)
    return Lock(house=house, listed=listed, lines=kept, left_out=out), how


def _project(line: str) -> str:
    match = _PROJECT.match(line)
    return match.group() if match else ""


def _copied(house: Path, copy: Path) -> Path:
    """Copy a wheelhouse without what fill brought; wheels are linked where they can be."""
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    for name in (MANIFEST, REQUIREMENTS, SUMS):
        shutil.copy2(house / name, copy)
    for entry in built(load_manifest(house)):
        try:
            os.link(house / entry.filename, copy / entry.filename)
        except OSError:  # another file system
            shutil.copy2(house / entry.filename, copy)
    return copy


def collect(lock: Lock, folder: Path, python: str) -> tuple[Path, ...]:
    """Bring by hash what the wheelhouse lacks; return the folders that hold everything."""
    others = [entry for entry in lock.listed.wheels if entry.kind is not Kind.BUILT]
    if all(entry.held for entry in others):
        return (lock.house,)
    folder.mkdir(parents=True, exist_ok=True)
    _pip("download", python, _written(lock, folder), f"--dest={folder}", _link(lock.house))
    return lock.house, folder


def install(lock: Lock, folders: Iterable[Path], root: RootFs) -> None:
    """Install everything, from folders alone, with `pip install --no-index --require-hashes`."""
    links = map(_link, folders)
    _install(root, _written(lock, root.path / "srv"), root.packages, "--no-index", *links)


def _link(folder: Path) -> str:
    return f"--find-links={folder}"


def _written(lock: Lock, folder: Path) -> Path:
    file = folder / "requirements.txt"
    file.write_text("\n".join(lock.lines) + "\n")
    return file


def install_needs(root: RootFs, requirements: Path) -> None:
    """Install what patchkit itself needs, from the index, beside everything else."""
    _install(root, requirements, root.path / NEEDS.lstrip("/"))


def _install(root: RootFs, requirements: Path, into: Path, *options: str) -> None:
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    # pip unpacks into a temporary folder first, and renames within a file system alone.
    variables = {"TMPDIR": str(root.path / "tmp")}
    target = (f"--target={into}", "--no-compile")
    _pip("install", root.python, requirements, *target, *options, **variables)


def platforms(cpu: str) -> list[str]:
    """Return options of pip: the platforms of a CPU's wheels; only those that are named count."""
    named = [f"manylinux_2_{minor}_{cpu}" for minor in (*range(17, 40), 5)]
    return [f"--platform={name}" for name in (*named, f"manylinux2014_{cpu}", f"linux_{cpu}")]


def _pip(verb: str, python: str, wanted: Path, *options: str, **variables: str) -> None:
    other = (f"--python-version={python}", *platforms(CPU), "--only-binary=:all:")
    run(
        *(sys.executable, "-m", "pip", verb, "--quiet", "--no-cache-dir", "--no-deps"),
        *("--require-hashes", *other, *options, f"--requirement={wanted}"),
        env={**os.environ, **variables},
    )


def read_pip_check(said: str, lock: Lock) -> tuple[list[str], list[str]]:
    """Return the lines of `pip check` on what a lock installs that are excused, and the others.

    Excused is what was left out or overridden, and what of others names another platform in its
    WHEEL file than in its name: NVIDIA's cusparselt 0.8.0 for aarch64 says manylinux2014_sbsa.
    """
    overrides = {override.takes.project for override in lock.listed.overrides}
    ours = {entry.name.project for entry in lock.built}
    excused, wrong = [], []
    for line in filter(None, map(str.strip, said.splitlines())):
        match = _BROKEN.fullmatch(line)
        if match and (
            match["missing"] in lock.left_out
            or match["wanted"] in overrides
            or (match["foreign"] and match["foreign"] not in ours)
        ):
            excused.append(line)
        elif line != "No broken requirements found.":
            wrong.append(line)
    return excused, wrong
