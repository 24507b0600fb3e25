"""An image of a filled wheelhouse: built twice by buildah, compared, started, and looked into.

    nox -s image -- WHEELHOUSE [--once] [--json]

The base is this machine's distribution, unpacked by mmdebstrap for the wheelhouse's CPU; one of
another CPU than this machine's runs under qemu-user, if the kernel knows it. No daemon, nothing is
published, and no GPU is asked. A wheelhouse of W GB takes about 6 W of disk. Exit code 0: all held.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from e2e.proofs import fresh
from patchkit.cli.out import tell
from patchkit.errors import PatchkitError, ProofError
from patchkit.measure.containerfile import PLATFORMS, containerfile
from patchkit.process import run
from patchkit.wheel.wheelhouse.contents import load_manifest

PATIENCE = 7200  # seconds of a build; qemu takes ten times as long as the CPU itself
BINFMT = "/proc/sys/fs/binfmt_misc/qemu-{cpu}"
DEBIAN_NAMES = {"aarch64": "arm64", "x86_64": "amd64"}
BASE, HOUSE = "localhost/base", "wheelhouse"


@dataclass(frozen=True, slots=True, kw_only=True)
class Buildah:
    """buildah, without a daemon, with a storage of its own in ``place``."""

    place: Path

    def __call__(self, *words: str | Path) -> str:
        """Return what it prints. Raises ProofError."""
        store = ("--root", self.place / "root", "--runroot", self.place / "run")
        env = {**os.environ, "BUILDAH_ISOLATION": "chroot"}
        return run(
            *("buildah", *store, "--storage-driver", "vfs", *words),
            kind=ProofError,
            env=env,
            timeout=PATIENCE,
        ).output.strip()


def obstacle(cpu: str) -> str:
    """Return why no image can be built here; empty if nothing is in the way."""
    if found := fresh.obstacle():
        return found
    if not shutil.which("buildah"):
        return "buildah is not installed: sudo apt install buildah"
    if cpu != platform.machine() and not Path(BINFMT.format(cpu=cpu)).exists():
        return f"the kernel starts no program for {cpu}: sudo apt install qemu-user-static"
    return ""


def main(words: list[str]) -> int:
    """Build, compare, start; print what came of it."""
    parser = argparse.ArgumentParser(prog="nox -s image --")
    parser.add_argument("wheelhouse", type=Path)
    parser.add_argument("--once", action="store_true", help="do not build it again")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(words)
    try:
        made = containerfile(load_manifest(given.wheelhouse), BASE, HOUSE)
        cpu = next(k for k, name in PLATFORMS.items() if name == made.platform)
        if why := obstacle(cpu):
            tell(f"skipped: {why}")
            return 0
        with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
            said = proof(Path(place), given.wheelhouse.resolve(), made.text, cpu, given.once)
    except PatchkitError as error:
        tell(f"failed: {error}")
        return 1
    tell("held")
    if given.json:
        sys.stdout.write(json.dumps(said, indent=1) + "\n")
    return 0


def proof(place: Path, house: Path, text: str, cpu: str, once: bool) -> dict[str, object]:
    """Return digest, seconds and bytes. Raises ProofError for what does not hold."""
    buildah = Buildah(place=place / "storage")
    context = place / "context"
    context.mkdir()
    shutil.copytree(house, context / HOUSE, copy_function=_linked)
    (context / "Containerfile").write_text(text)
    _step("the base")
    fresh.unpack(
        place / "base.tar", ["ca-certificates"], "--variant=minbase", cpu=DEBIAN_NAMES[cpu]
    )
    base = buildah("from", "--arch", DEBIAN_NAMES[cpu], "scratch")
    buildah("add", "--quiet", base, place / "base.tar", "/")
    buildah("commit", "--quiet", "--rm", base, BASE)
    digests, seconds = [], []
    for number in (1,) if once else (1, 2):
        _step(f"build {number}")
        began = time.monotonic()
        image = place / f"image{number}"
        shutil.rmtree(place / f"image{number - 1}", ignore_errors=True)
        file = ("--file", context / "Containerfile", "--tag", f"oci:{image}:proof", context)
        how = ("--pull-never", "--layers=false", "--timestamp", "0", "--arch", DEBIAN_NAMES[cpu])
        buildah("build", *how, *file)
        seconds.append(round(time.monotonic() - began))
        digests.append(json.loads((image / "index.json").read_text())["manifests"][0]["digest"])
    if len({*digests}) > 1:
        raise ProofError(f"the same wheelhouse made two images: {' and '.join(digests)}")
    _step("started")
    one = buildah("from", f"oci:{image}:proof")
    said = {name: buildah("run", one, "--", *words) for name, words in _asked(house).items()}
    return {
        "cpu": cpu,
        "digest": digests[0],
        "seconds": seconds,
        "bytes": sum(each.stat().st_size for each in image.rglob("*") if each.is_file()),
        **said,
    }


def _asked(house: Path) -> dict[str, tuple[str, ...]]:
    """Return what is run in it, by what it tells. A doctor that finds something ends with 9."""
    asked = {"user": ("id", "-u"), "uname": ("uname", "-m")}
    doctor = "patchkit doctor | tail -1; patchkit inspect --loaded 2>&1 | tail -2"
    if any(house.glob("patchkit_gb10-*.whl")):
        return {**asked, "doctor": ("sh", "-c", doctor)}
    return asked


def _linked(source: str, target: str) -> str:
    """Copy a file, or only its name where the disk is the same."""
    try:
        os.link(source, target)
    except OSError:
        return str(shutil.copy2(source, target))
    return target


def _step(name: str) -> None:
    tell(f"{time.strftime('%H:%M:%S')} {name}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
