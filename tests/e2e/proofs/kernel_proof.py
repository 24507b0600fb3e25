"""The kernel proof: real kernels of real releases, compiled for the device and for its family.

    nox -s kernel-proof        (or: python -m e2e.proofs.kernel_proof [RELEASE…])

Releases, files, headers and tools are in recipes/vllm/kernels.toml; all of them come from the
package index, by locked hash. With no release named, docs/kernel-proof.md gets the new table. Exits
with 5 if a native kernel is a stub that works in the family build, or if a control (an untouched
release with a known stub) is not caught.
"""

from __future__ import annotations

import fnmatch
import platform
import re
import sys
import tempfile
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from e2e.proofs.machine_code import Kernels, idle, likeness, read_sass, stubs, total
from patchkit.apply import apply
from patchkit.errors import ProofError, UsageError
from patchkit.patching.fix import Request
from patchkit.patching.recipe import load_recipe
from patchkit.recipes.vllm.archs import evaluate
from patchkit.source.archive import unpack
from patchkit.source.detect import detect
from patchkit.source.fetch import fetch
from patchkit.source.releases import LockEntry, read_lock
from patchkit.target import parse_arch, targets
from support.proving import run
from tools import run_program
from tools.markdown import replaced, table

HOME = load_recipe("vllm").home
TABLE = tomllib.loads((HOME / "kernels.toml").read_text(encoding="utf-8"))
DOCS = Path(__file__).parents[3] / "docs" / "kernel-proof.md"
TARGET = targets()["gb10"]
CUDA = "cuda/nvidia/cu13"  # below the folder of headers and tools
Row = tuple[bool, tuple[str, ...]]  # whether it is as it should be, and its cells


@dataclass(frozen=True)
class Job:
    """One file of one tree, compiled for one arch list with what is in ``home``."""

    home: Path
    tree: Path
    release: dict
    file: dict
    arch_list: str

    def kernels(self) -> Kernels:
        """Compile the file and read its kernels; none if the release's generator left it out."""
        path = Path(self.file["path"])
        if (
            path.parent == Path(self.release["generate"]).parent
            and not (self.tree / path).exists()
        ):
            return {}
        print(f"{self.release['version']} {self.arch_list:6} {path.name}")
        gencode = TARGET.gencode_flags(self.arch_list).split()
        extra = [*self.release["flags"], *self.file.get("flags", ())]
        # As the release's CMake has them, but for a cubin alone.
        flags = [
            "-O2",
            "-DNDEBUG",
            "-DENABLE_FP8",
            "--expt-relaxed-constexpr",
            "-w",
            *extra,
        ]
        flags += ["-cubin", *gencode, *switches(self.tree, self.arch_list)]
        folders = [
            self.tree / "csrc",
            *(self.home / each for each in self.release["include"]),
        ]
        flags += [
            f"-I{folder}" for folder in [*folders, self.home / CUDA / "include/cccl"]
        ]
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            source = str(self.tree / path)
            run(str(self.home / CUDA / "bin/nvcc"), *flags, "-o", cubin.name, source)
            nvdisasm = str(self.home / CUDA / "bin/nvdisasm")
            return read_sass(run(nvdisasm, "-c", cubin.name))


def main() -> int:
    """Compile, compare and report; return the exit code."""
    known = {release["version"]: release for release in TABLE["release"]}
    if unknown := sorted({*sys.argv[1:]} - known.keys()):
        raise UsageError(
            f"{unknown[0]} is not in kernels.toml", hint=f"use {', '.join(known)}"
        )
    chosen = [known[version] for version in sys.argv[1:] or known]
    with tempfile.TemporaryDirectory(prefix="patchkit-") as folder:
        home = Path(folder)
        for wheel in wheels():
            unpack_wheel(wheel, home / wheel["folder"])
        rows = [row for release in chosen for row in release_rows(release, home)]
        compiler = run(str(home / CUDA / "bin/nvcc"), "--version")
    names = [
        f"sm_{parse_arch(arch_list(arch)).gencode}" for arch in ("native", "family")
    ]
    tools = ", ".join(f"{wheel['project']} {wheel['version']}" for wheel in wheels())
    said = table(
        ("release", "file", "kernels", *names, "verdict"), [cells for _, cells in rows]
    )
    said += f"\nCompiler: {compiler.strip().splitlines()[-1]}. From the index: {tools}."
    print(said)
    if len(chosen) == len(known):
        text = DOCS.read_text(encoding="utf-8")
        DOCS.write_text(
            replaced(text, "kernels", "nox -s kernel-proof", said), encoding="utf-8"
        )
    return 0 if all(good for good, _cells in rows) else ProofError.exit_code


def wheels() -> list[dict]:
    """Return the wheels for this machine: headers are the same everywhere, programs are not."""
    machine = platform.machine()
    if machine not in {wheel.get("machine") for wheel in TABLE["wheel"]}:
        raise UsageError(
            f"there is no nvcc for {machine}",
            why=f"{HOME / 'kernels.toml'} locks those for Linux on x86_64 and aarch64",
        )
    return [
        wheel for wheel in TABLE["wheel"] if wheel.get("machine", machine) == machine
    ]


def unpack_wheel(wheel: dict, folder: Path) -> None:
    print(f"headers and tools: {wheel['filename']}")
    entry = LockEntry(
        **{key: wheel[key] for key in ("version", "filename", "sha256", "size")}
    )
    with zipfile.ZipFile(
        fetch(wheel["project"], entry.version, {entry.version: entry})
    ) as archive:
        names = fnmatch.filter(archive.namelist(), wheel["keep"])
        archive.extractall(folder, names)
    for name in names if "machine" in wheel else ():
        (folder / name).chmod(0o755)  # a zip has no x bit that Python would restore


def release_rows(release: dict, home: Path) -> Iterator[Row]:
    """Yield the rows of one release: every file, then its controls."""
    version, trees = release["version"], {}
    for arch in ("native", "family", "stock"):
        archive = fetch("vllm", version, read_lock(HOME / "lock.toml"))
        trees[arch] = unpack(archive, home / f"{version}-{arch}")
        if arch != "stock":
            apply(trees[arch], load_recipe("vllm"), Request(target=TARGET, arch=arch))
        generator = str(trees[arch] / release["generate"])
        run(sys.executable, generator, arch_list(arch))
    for file in release["file"]:
        native, family, stock = (
            Job(home, trees[arch], release, file, arch_list(arch)) for arch in trees
        )
        expected, found = family.kernels(), native.kernels()
        if not expected:
            raise ProofError(f"{file['path']}: the family build of {version} lacks it")
        # A kernel that neither build has at work would agree with itself.
        faults = (
            idle(expected, file["work"])
            | idle(found, file["work"])
            | stubs(found, expected)
        )
        verdict = (
            f"no stub: {likeness(found, expected)}"
            if not faults
            else f"**{_sum(faults)}**"
        )
        yield not faults, _cells(native, "", found, expected, verdict)
        if file.get("control"):
            found = stock.kernels()
            faults = stubs(found, expected)
            verdict = f"caught: {_sum(faults)}" if faults else "**not caught**"
            note = ", unpatched (control)"
            yield bool(faults), _cells(stock, note, found, expected, verdict)


def arch_list(arch: str) -> str:
    """Return TORCH_CUDA_ARCH_LIST; the untouched tree is built as the native one would be."""
    return TARGET.arch_list("native" if arch == "stock" else arch)


@cache
def switches(tree: Path, archs: str) -> tuple[str, ...]:
    """Return the -DENABLE_… of the groups that the tree's own CMake builds for the archs."""
    groups = evaluate(detect(tree, "vllm"), TARGET, archs, TARGET.cuda)
    return tuple(
        sorted({define for group in groups if group.archs for define in group.defines})
    )


def _sum(faults: dict[str, str]) -> str:
    """Count kernels by the reason; sizes vary, so they are left out."""
    counts = Counter(
        re.sub(r"; \d+ instructions.*", "", reason) for reason in faults.values()
    )
    parts = (f"{count} {reason}" for reason, count in counts.most_common())
    return f"{len(faults)} stubs ({'; '.join(parts)})"


def _cells(
    job: Job, note: str, found: Kernels, family: Kernels, verdict: str
) -> tuple[str, ...]:
    cutlass = "CUTLASS {used} (pinned: {pinned})".format(**job.release["cutlass"])
    name = f"{job.file['title']}{note}<br>`{Path(job.file['path']).name}`"
    sums = []
    for kernels in (
        found,
        family,
    ):  # ``1024 QMMA… (64 each)``: the sum, the fewest and the most
        lines = []
        for opcode, count in total(kernels).items():
            each = [kernel.tensor.get(opcode, 0) for kernel in kernels.values()]
            spread = (
                f"{min(each)} to {max(each)}"
                if min(each) < max(each)
                else f"{min(each)}"
            )
            lines.append(f"{count} `{opcode}` ({spread} each)")
        sums.append("<br>".join(lines) or "none")
    release = f"{job.release['version']}<br>{cutlass}"
    return release, name, f"{len(found)} / {len(family)}", *sums, verdict


if __name__ == "__main__":
    run_program(main)
