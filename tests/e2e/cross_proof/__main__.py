"""A wheelhouse for aarch64, installed and used on this machine, whatever its CPU.

    nox -s cross-proof -- [WHEELHOUSE] [--keep FOLDER]

A Debian or Ubuntu for aarch64 is unpacked into a folder; the wheelhouse is installed there by hash,
with what it needs. Then its own Python, under qemu-user, answers: are all requirements met, does
every extension load and register the operators of upstream's wheel, do vLLM and its patched modules
import, does `patchkit verify` agree. No GPU is asked, and no kernel runs. Exit code 0: all held.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from e2e.cross_proof import arm64, steps, wheels
from patchkit.errors import PatchkitError, ProofError
from patchkit.wheel.build.full_toolkit import driver_stand_in
from support.proving import run

CHECKOUT = Path(__file__).parents[3]
CXX = "aarch64-linux-gnu-g++"
GIGABYTES = 10  # of an installation, its wheels included
BESIDE = Path("/var/tmp")  # not /tmp, which may be memory


class Progress:
    """Show what each step said as it ends, and count those that failed."""

    def __init__(self) -> None:
        self.failed = 0

    def take(self, step: str, work: Callable[[], str]) -> None:
        """Do what the next steps need. Raises PatchkitError."""
        began = time.monotonic()
        said = work()
        print(f"{step}: passed, {time.monotonic() - began:.0f} s: {said}", flush=True)

    def prove(self, step: str, work: Callable[[], str]) -> None:
        """Do what the next steps can do without."""
        try:
            self.take(step, work)
        except PatchkitError as error:
            self.failed += 1
            print(f"{step}: failed: {error}", flush=True)


def main() -> int:
    """Prove an installation of a wheelhouse; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheelhouse", nargs="?", type=Path, default=Path("wheelhouse"))
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="work there, and leave it all")
    parser.add_argument("--obstacle", action="store_true", help="print what is in the way")
    args = parser.parse_args()
    if args.obstacle:
        sys.stdout.write(obstacle())
        return 0
    progress = Progress()
    with tempfile.TemporaryDirectory(prefix="patchkit-cross-", dir=BESIDE) as folder:
        try:
            prove(args.wheelhouse, args.keep or Path(folder), progress)
        except PatchkitError as error:
            print(f"cross-proof: {error}")
            return error.exit_code
    return ProofError.exit_code if progress.failed else 0


def obstacle() -> str:
    """Return why nothing can be proved here; empty if nothing is in the way."""
    if found := arm64.obstacle():
        return found
    if not shutil.which(CXX):
        return f"{CXX} is not installed: sudo apt install g++-aarch64-linux-gnu"
    free = shutil.disk_usage(BESIDE).free / 1e9
    return f"{BESIDE} has {free:.1f} GB of {GIGABYTES} free" if free < GIGABYTES else ""


def prove(house: Path, folder: Path, progress: Progress) -> None:
    """Prove an installation in a folder; what is there of an earlier run is used."""
    house, folder = house.absolute(), folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    built = wheels.require_cpu(house)
    verify = (sys.executable, "-m", "patchkit", "verify", str(house))
    progress.take("wheelhouse", lambda: steps.verdict(run(*verify)))
    binds = {CHECKOUT: steps.CHECKOUT, house: steps.HOUSE}
    root = arm64.RootFs(path=folder / "root", binds=binds)
    progress.take("file system", lambda: unpacked(root))
    lock, how = wheels.lock(house, root.python, folder)
    progress.take("install", lambda: installed(lock, how, folder / "wheels", root))
    place = steps.Installation(
        root=root,
        lock=lock,
        wheels={entry.name.project: house / entry.filename for entry in built},
    )
    progress.prove("pip check", lambda: steps.check(place))
    if "vllm" in place.wheels:
        progress.prove("extensions", lambda: steps.load(place))
        progress.prove("import vllm", lambda: steps.imports(place))
        progress.prove("vllm --version", lambda: steps.version(place))
    else:
        print("vllm: no wheel of it was built")
    progress.prove("patchkit verify", lambda: steps.verify(place))


def unpacked(root: arm64.RootFs) -> str:
    """Make the root file system, unless it is there."""
    if not root.path.exists():
        arm64.unpack(root.path)
    said = root.run(
        "/usr/bin/python3", "-c", "import platform as p; print(p.machine(), *p.libc_ver())"
    )
    release = (root.path / "etc/os-release").read_text().partition('PRETTY_NAME="')[2]
    return f"{release.partition(chr(34))[0]}, Python {root.python}: {said.strip()}"


def installed(lock: wheels.Lock, how: str, folder: Path, root: arm64.RootFs) -> str:
    """Install everything, unless the very same is there."""
    stamp, text = root.path / "srv" / "installed.txt", "\n".join(lock.lines)
    if not stamp.exists() or stamp.read_text() != text:
        stamp.unlink(missing_ok=True)
        wheels.install(lock, wheels.collect(lock, folder, root.python), root)
        wheels.install_needs(root, CHECKOUT / "requirements" / "wheel.txt")
        header = root.packages / "nvidia/cu13/include/cuda.h"
        driver = root.path / steps.DRIVER.lstrip("/") / "libcuda.so.1"
        driver_stand_in(header, Path(CXX), driver)
        stamp.write_text(text)
    out = f"; left out: {', '.join(lock.left_out)}" if lock.left_out else ""
    return f"{len(lock.lines)} projects by hash, {how}{out}"


if __name__ == "__main__":
    sys.exit(main())
