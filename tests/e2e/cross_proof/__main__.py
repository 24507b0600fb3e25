"""A wheelhouse for aarch64, installed and used on this machine, whatever its CPU.

    nox -s cross-proof -- [WHEELHOUSE]

A Debian or Ubuntu for aarch64 is unpacked into a folder; the wheelhouse is installed there by hash,
with what it needs. Then its own Python, under qemu-user, answers: are all requirements met, does
every extension load and register the operators of upstream's wheel, do vLLM and its patched modules
import, does `patchkit verify` agree. No GPU is asked, and no kernel runs. Exit code 0: all held.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.cross_proof import arm64, wheels
from e2e.cross_proof.arm64 import CPU, RootFs
from e2e.cross_proof.operators import Loaded, differences
from e2e.proofs.repack_proof import modules, patched_files
from patchkit.errors import PatchkitError, ProofError
from patchkit.source.fetch import fetch
from patchkit.wheel.build.torch_toolkit import driver_stand_in
from patchkit.wheel.file.wheelfile import WheelFile
from patchkit.wheel.repack.repack import upstream_wheels
from support.proving import LIBRARY, libnccl_of, require, run
from tools import run_program

ROOT = Path(__file__).parents[3]
CXX = "aarch64-linux-gnu-g++"
GIGABYTES = 10  # of an installation, its wheels included
DEFAULT_HOUSE = Path("wheelhouse")
BESIDE = Path("/var/tmp")  # not /tmp, which may be memory
# Folders inside: the checkout, the wheelhouse, upstream's libraries, a stand-in for the driver.
CHECKOUT, HOUSE, UPSTREAM, DRIVER = (
    f"/srv/{name}" for name in ("patchkit", "wheelhouse", "upstream", "driver")
)
PYTHON = "/usr/bin/python3"
INSIDE = f"{CHECKOUT}/tests/e2e/cross_proof/inside.py"
# It ends with 1 for whatever it has to say.
PIP_CHECK = """
import subprocess, sys
subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "check"])
"""


def main() -> int:
    """Prove an installation of a wheelhouse; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheelhouse", nargs="?", type=Path)
    parser.add_argument(
        "--obstacle", action="store_true", help="print what is in the way"
    )
    args = parser.parse_args()
    if args.obstacle:
        sys.stdout.write(obstacle(args.wheelhouse))
        return 0
    house = args.wheelhouse or DEFAULT_HOUSE
    with tempfile.TemporaryDirectory(prefix="patchkit-cross-", dir=BESIDE) as folder:
        failed = prove(house.absolute(), Path(folder))
    return ProofError.exit_code if failed else 0


def obstacle(house: Path | None) -> str:
    """Return why nothing can be proved here; empty if nothing is in the way.

    A wheelhouse that somebody names has to be one; without a name there may be none yet.
    """
    if found := arm64.obstacle(CXX):
        return found
    if house is None:
        try:
            wheels.require_cpu(DEFAULT_HOUSE)
        except PatchkitError as error:
            return f"{error.what}: {error.hint}"
    free = shutil.disk_usage(BESIDE).free / 1e9
    return f"{BESIDE} has {free:.1f} GB of {GIGABYTES} free" if free < GIGABYTES else ""


def prove(house: Path, folder: Path) -> int:
    """Prove an installation in a folder; return how many steps failed.

    Raises PatchkitError for a step that the others need.
    """
    built = wheels.require_cpu(house)
    take_step(
        "wheelhouse",
        lambda: verdict(run(sys.executable, "-m", "patchkit", "verify", str(house))),
    )
    root = RootFs(path=folder / "root", binds={ROOT: CHECKOUT, house: HOUSE})
    take_step("file system", lambda: unpack(root))
    lock = wheels.lock(house, root.python, folder)
    take_step("install", lambda: install(lock, folder, root))
    made = {entry.name.project: house / entry.name for entry in built}
    place = Installation(root=root, lock=lock, wheels=made)
    steps = {"pip check": place.check, "patchkit verify": place.verify}
    if "vllm" in place.wheels:
        more = {"import vllm": place.import_vllm, "vllm --version": place.version}
        steps |= {"extensions": place.load, **more}
    failed = 0
    for step, work in steps.items():
        try:
            take_step(step, work)
        except PatchkitError as error:
            failed += 1
            print(f"{step}: failed: {error}", flush=True)
    return failed


def take_step(step: str, work: Callable[[], str]) -> None:
    """Do a step, and show what it says as it ends."""
    began = time.monotonic()
    said = work()
    print(f"{step}: passed, {time.monotonic() - began:.0f} s: {said}", flush=True)


def unpack(root: RootFs) -> str:
    """Make the root file system; say which it is."""
    arm64.unpack(root.path)
    machine = "import platform as p; print(p.machine(), *p.libc_ver())"
    said = root.run(PYTHON, "-c", machine).strip()
    release = (root.path / "etc/os-release").read_text().partition('PRETTY_NAME="')[2]
    return f"{release.partition(chr(34))[0]}, Python {root.python}: {said}"


def install(lock: wheels.Lock, folder: Path, root: RootFs) -> str:
    """Install everything, and a stand-in for the driver's library; say what was left out."""
    wheels.install(lock, folder / "wheels", root, ROOT / "requirements" / "wheel.txt")
    header = root.packages / "nvidia/cu13/include/cuda.h"
    driver_stand_in(header, Path(CXX), root.path / DRIVER.lstrip("/") / "libcuda.so.1")
    out = f"; left out: {', '.join(lock.left_out)}" if lock.left_out else ""
    return (
        f"{len(lock.lines)} projects by hash, resolved for CPython {root.python}{out}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """A wheelhouse in a root file system; ``wheels`` are those that patchkit made, by project.

    Each step says what held, or raises ProofError.
    """

    root: RootFs
    lock: wheels.Lock
    wheels: Mapping[str, Path]

    def check(self) -> str:
        """Ask pip which requirements are not met, and which wheels are for another machine."""
        excused, wrong = wheels.read_pip_check(self._python("-c", PIP_CHECK), self.lock)
        require(not wrong, "; ".join(wrong[:3]))
        return "; ".join(["nothing else is missing or wrong", *excused])

    def load(self) -> str:
        """Load every extension of the vLLM wheel, and compare its operators with upstream's."""
        with WheelFile(self.wheels["vllm"]) as opened:
            facts, paths = opened.facts, extensions(opened, self.root.python)
            digests = {path: _digest(opened, path) for path in paths}
        torch, ours = self._load(paths, self.root.packages)
        self._require_libnccl(torch["nccl"])
        count = sum(len(each.operators) for each in ours)
        told = f"torch {torch['torch']}; {len(ours)} loaded, {count} operators"
        same, theirs = self._load_upstream(facts, digests)
        found = list(
            differences([each for each in ours if each.path not in same], theirs, facts)
        )
        if unexplained := [what for what, why in found if not why]:
            raise ProofError(
                f"{told}; not as upstream's:\n    " + "\n    ".join(unexplained)
            )
        told += (
            f"; {len(same)} are upstream's bytes; {len(found)} differences, explained"
        )
        return told + "".join(f"\n    {what}: {why}" for what, why in found)

    def import_vllm(self) -> str:
        """Import vLLM, and every module that fixes changed."""
        names = modules(
            p for p in patched_files(self.wheels["vllm"]) if p.startswith("vllm/")
        )
        first, *rest = self._ask("modules", "vllm", *names)
        require(
            first.get("version") == self._built_version(),
            f"vllm.__version__ is {first}",
        )
        failed = [
            f"{each['module']}: {each['error']}" for each in rest if "error" in each
        ]
        require(not failed, "; ".join(failed))
        return f"{first['version']}; {len(rest)} patched modules"

    def version(self) -> str:
        """Run `vllm --version`."""
        script = self.root.seen_inside(self.root.packages / "bin" / "vllm")
        # Its first line names the Python of the machine that installed it.
        said = self._python(INSIDE, "run", script, "--version").strip().splitlines()[-1]
        require(said == self._built_version(), f"vllm --version says {said}")
        return said

    def verify(self) -> str:
        """Run `patchkit verify` on the wheelhouse."""
        words = (PYTHON, "-m", "patchkit", "verify", HOUSE)
        return verdict(self.root.run(*words, PYTHONPATH=f"{CHECKOUT}:{wheels.NEEDS}"))

    def _python(self, *words: str) -> str:
        """Return what the other Python says, beside a stand-in for the driver's library."""
        return self.root.run(PYTHON, "-W", "ignore", *words, LD_LIBRARY_PATH=DRIVER)

    def _ask(self, *words: str) -> list[dict[str, Any]]:
        """Return the lines of JSON that a question of ``inside.py`` is answered with."""
        said = self._python(INSIDE, *words)
        return [json.loads(line) for line in said.splitlines() if line.startswith("{")]

    def _built_version(self) -> str:
        with WheelFile(self.wheels["vllm"]) as opened:
            return str(opened.facts["wheel"])

    def _load(
        self, paths: Sequence[str], folder: Path
    ) -> tuple[dict[str, Any], list[Loaded]]:
        """Load extensions of a folder in one process; return what is said of torch, and of them."""
        prefix = self.root.seen_inside(folder)
        torch, *rest = self._ask("libraries", *(f"{prefix}/{path}" for path in paths))
        failed = "; ".join(
            f"{each['path']}: {each['error']}" for each in rest if "error" in each
        )
        require(not failed, failed)
        return torch, [
            Loaded(
                path=each["path"].removeprefix(f"{prefix}/"),
                operators=each["operators"],
                names=tuple(each["names"]),
            )
            for each in rest
        ]

    def _load_upstream(
        self, facts: Mapping[str, Any], digests: Mapping[str, str]
    ) -> tuple[set[str], list[Loaded]]:
        """Return the paths at which upstream's wheel has the same bytes, and its other libraries.

        Of those, the ones that we have are loaded, too.
        """
        folder = self.root.path / UPSTREAM.lstrip("/")
        with WheelFile(
            fetch("vllm", facts["version"], upstream_wheels("vllm", CPU))
        ) as wheel:
            paths = extensions(wheel, self.root.python)
            same = {path for path in paths if digests.get(path) == _digest(wheel, path)}
            absent = [Loaded(path=path) for path in paths if path not in digests]
            others = [path for path in paths if path in digests and path not in same]
            for path in others:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                with (folder / path).open("wb") as file:
                    file.writelines(wheel.unpacked(path))
        return same, [*absent, *(self._load(others, folder)[1] if others else [])]

    def _require_libnccl(self, mapped: Sequence[str]) -> None:
        """Raise ProofError unless torch maps one libnccl, the wheelhouse's if it has one."""
        require(len(mapped) == 1, f"torch maps {list(mapped) or 'no libnccl'}")
        if ours := self.wheels.get("nvidia-nccl-cu13"):
            here = self.root.path / mapped[0].lstrip("/")
            require(mapped[0].endswith(LIBRARY), f"torch maps {mapped[0]}")
            require(
                here.read_bytes() == libnccl_of(ours),
                f"{mapped[0]} is not that of {ours.name}",
            )


def extensions(wheel: WheelFile, python: str) -> list[str]:
    """Return the extensions of a wheel that a Python can load."""
    tagged = f".cpython-{python.replace('.', '')}-{CPU}-linux-gnu.so"
    return [path for path in wheel.members if path.endswith((".abi3.so", tagged))]


def _digest(wheel: WheelFile, path: str) -> str:
    digest = hashlib.sha256()
    for chunk in wheel.unpacked(path):
        digest.update(chunk)
    return digest.hexdigest()


def verdict(said: str) -> str:
    """Return the line of `patchkit verify` that says what held."""
    return next(
        (line for line in said.splitlines() if line.startswith("✓")), said
    ).lstrip("✓ ")


if __name__ == "__main__":
    run_program(main)
