"""Install the wheels of a wheelhouse, with what they need, into a root file system from outside.

pip runs on this machine and is told of the other one: it would take half an hour under qemu, which
`pip check` inside does not. Nothing that it installs is run meanwhile.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from e2e.cross_proof.arm64 import CPU, RootFs
from patchkit.errors import UsageError
from patchkit.quoting import quoted
from patchkit.wheel.file.wheelfile import ANY
from patchkit.wheel.wheelhouse.storage import (
    MANIFEST,
    REQUIREMENTS,
    SUMS,
    Kind,
    Manifest,
    ManifestEntry,
    load_manifest,
    wheelhouse_command,
)
from support.proving import run

NEEDS = "/opt/needs"  # inside: what patchkit needs
# No import needs them: kernels, compilers of kernels, videos. 3 of 9 GB installed for 0.25.1.
LEFT_OUT = {
    *(
        "flashinfer-cubin",
        "nvidia-cutlass-dsl-libs-base",
        "nvidia-cutlass-dsl-libs-cu13",
    ),
    *(
        "nvidia-cuda-nvcc",
        "nvidia-nvvm",
        "nvidia-cuda-tileiras",
        "tilelang",
        "tokenspeed-triton",
    ),
    *("z3-solver", "pynvvideocodec"),
}
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


def built(listed: Manifest) -> tuple[ManifestEntry, ...]:
    """Return the wheels of patchkit's own making."""
    return tuple(entry for entry in listed.wheels if entry.kind is Kind.BUILT)


def require_cpu(house: Path) -> tuple[ManifestEntry, ...]:
    """Return what was built. Raises UsageError if that is nothing, or is for another CPU."""
    found = built(load_manifest(house))
    for entry in found:
        if not entry.name.cpus & {CPU, ANY}:
            raise UsageError(
                f"{house / entry.name}: is for {' and '.join(sorted(entry.name.cpus))}",
                why=f"what is proved is an installation on {CPU}",
                hint=f"name a folder with wheels for {CPU}; or, without it: "
                f"{wheelhouse_command('prune', house, '--drop', entry.name)}",
            )
    if not found:
        raise UsageError(
            f"{house}: no wheel in it was built by patchkit",
            hint=f"{quoted('patchkit', 'repack', 'vllm==0.33.0', '--dir', house)}",
        )
    return found


def lock(house: Path, python: str, scratch: Path) -> Lock:
    """Return what is to be installed on a Python: what `fill` resolves for it, beside the house."""
    copy = scratch / "house"
    copy.mkdir(parents=True)
    for name in (
        MANIFEST,
        REQUIREMENTS,
        SUMS,
        *(e.name for e in built(load_manifest(house))),
    ):
        shutil.copy2(house / name, copy)
    fill = ("wheelhouse", "fill", "--lock-only", "--python-version", python)
    run(sys.executable, "-m", "patchkit", *fill, "--dir", str(copy))
    lines = {
        line.partition("==")[0]: line
        for line in (copy / REQUIREMENTS).read_text().splitlines()
        if re.match(r"[A-Za-z0-9._-]+==", line)
    }
    kept = tuple(line for project, line in lines.items() if project not in LEFT_OUT)
    out = tuple(sorted(lines.keys() & LEFT_OUT))
    return Lock(house=house, listed=load_manifest(copy), lines=kept, left_out=out)


def install(lock: Lock, folder: Path, root: RootFs, needs: Path) -> None:
    """Install everything by hash from the house and a folder; what patchkit needs beside it.

    What the house lacks comes into the folder first.
    """
    folder.mkdir(parents=True)
    file, links = folder / "requirements.txt", [f"--find-links={lock.house}"]
    file.write_text("\n".join(lock.lines) + "\n")
    _pip("download", root, file, f"--dest={folder}", *links)
    links += [f"--find-links={folder}", "--no-index"]
    _pip("install", root, file, f"--target={root.packages}", *links)
    _pip("install", root, needs, f"--target={root.path / NEEDS.lstrip('/')}")


def _pip(verb: str, root: RootFs, requirements: Path, *options: str) -> None:
    # Only the platforms that are named count.
    named = [f"manylinux_2_{minor}_{CPU}" for minor in (*range(17, 40), 5)]
    platforms = (*named, f"manylinux2014_{CPU}", f"linux_{CPU}")
    other = (
        f"--python-version={root.python}",
        *(f"--platform={name}" for name in platforms),
    )
    compiled = ("--no-compile",) if verb == "install" else ()
    run(
        *(
            sys.executable,
            "-m",
            "pip",
            verb,
            "--quiet",
            "--no-cache-dir",
            "--no-deps",
            *compiled,
        ),
        *("--require-hashes", *other, "--only-binary=:all:", *options),
        f"--requirement={requirements}",
        # pip unpacks into a temporary folder first, and renames within a file system alone.
        env={**os.environ, "TMPDIR": str(root.path / "tmp")},
    )


def read_pip_check(said: str, lock: Lock) -> tuple[list[str], list[str]]:
    """Return the lines of `pip check` on what a lock installs that are excused, and the others.

    Excused is what was left out or overridden, and what of others names another platform in its
    WHEEL file than in its name: NVIDIA's cusparselt 0.8.0 for aarch64 says manylinux2014_sbsa.
    """
    overrides = {override.takes.project for override in lock.listed.overrides}
    ours = {entry.name.project for entry in built(lock.listed)}
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
