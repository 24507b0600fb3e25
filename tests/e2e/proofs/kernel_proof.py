"""The kernel proof: real kernels of real releases, compiled for the device and for its family.

    nox -s kernel-proof        (or: python -m e2e.proofs.kernel_proof [RELEASE…])

Releases, files, headers and tools are in recipes/vllm/kernels.toml; all of them come from the
package index, by locked hash. Objects are kept below the download cache by digest. With no release
named, docs/kernel-proof.md gets the new table. Exits with 5 if a native kernel is a stub that works
in the family build, or if a control (an untouched release with a known stub) is not caught.
"""

from __future__ import annotations

import fnmatch
import hashlib
import itertools
import json
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from e2e.proofs.machine_code import Kernels, idle, likeness, read_sass, stubs, total
from patchkit.apply import apply
from patchkit.errors import PatchkitError, ProofError, UsageError
from patchkit.patching.fix import Request
from patchkit.patching.recipe import load_recipe
from patchkit.recipes.vllm.archs import evaluate
from patchkit.source.archive import unpack
from patchkit.source.detect import detect
from patchkit.source.fetch import cache_dir, fetch
from patchkit.source.lock import LockEntry, read_lock
from patchkit.target import parse_arch, targets

HOME = load_recipe().home
TABLE = tomllib.loads((HOME / "kernels.toml").read_text(encoding="utf-8"))
DOCS = Path(__file__).parents[3] / "docs" / "kernel-proof.md"
BEGIN, END = "<!-- recorded -->\n", "<!-- end -->\n"
TARGET = targets()["gb10"]
COLUMNS = ("release", "file", "kernels", "{native}", "{family}", "verdict")


@dataclass(frozen=True)
class Job:
    """One file of one tree, compiled for one arch list."""

    tree: Path
    release: dict
    file: dict
    arch_list: str


def main() -> int:
    """Compile, compare and report; return the exit code."""
    try:
        releases = selected(sys.argv[1:])
        with tempfile.TemporaryDirectory(prefix="patchkit-") as folder:
            proof = Proof(Path(folder))
            rows = list(itertools.chain.from_iterable(map(proof.release, releases)))
            text = report(rows, proof.compiler())
    except PatchkitError as error:
        print(f"kernel-proof: {error}")
        return error.exit_code
    print(text)
    if releases == TABLE["release"]:
        record(text)
    return 0 if all(good for good, _cells in rows) else ProofError.exit_code


def selected(versions: list[str]) -> list[dict]:
    """Return the releases that are named, or all."""
    known = {release["version"]: release for release in TABLE["release"]}
    for version in versions:
        if version not in known:
            raise UsageError(f"{version} is not in kernels.toml", hint=f"use {', '.join(known)}")
    return [known[version] for version in versions or known]


class Proof:
    """The unpacked headers and tools, and what is compiled with them."""

    def __init__(self, home: Path) -> None:
        self.home = home
        for wheel in wheels():
            self._unpack(wheel)

    def _unpack(self, wheel: dict) -> None:
        print(f"headers and tools: {wheel['filename']}")
        with zipfile.ZipFile(fetched(wheel)) as archive:
            names = fnmatch.filter(archive.namelist(), wheel["keep"])
            archive.extractall(self.home / wheel["folder"], names)
        if "machine" in wheel:
            for name in names:  # a zip has no x bit that Python would restore
                (self.home / wheel["folder"] / name).chmod(0o755)

    def release(self, release: dict) -> list[tuple[bool, tuple[str, ...]]]:
        """Return the rows of one release: every file, then the controls."""
        trees = {arch: self._tree(release, arch) for arch in ("native", "family", "stock")}
        return [row for file in release["file"] for row in self._rows(trees, release, file)]

    def _tree(self, release: dict, arch: str) -> Path:
        """Return the release, patched for an arch mode, with its Marlin kernels generated."""
        version = release["version"]
        archive = fetch("vllm", version, read_lock(HOME / "lock.toml"))
        path = unpack(archive, self.home / f"{version}-{arch}")
        if arch != "stock":
            apply(path, load_recipe(), Request(target=TARGET, arch=arch))
        run([sys.executable, str(path / release["generate"]), arch_list(arch)], "Marlin generator")
        return path

    def _rows(self, trees: dict[str, Path], release: dict, file: dict):
        native, family = (
            self._kernels(Job(trees[arch], release, file, arch_list(arch)))
            for arch in ("native", "family")
        )
        if not family:
            raise ProofError(f"{file['path']}: the family build of {release['version']} lacks it")
        # A kernel that neither build has at work would agree with itself.
        faults = idle(family, file["work"]) | idle(native, file["work"]) | stubs(native, family)
        verdict = f"**{summary(faults)}**" if faults else f"no stub: {likeness(native, family)}"
        yield not faults, row(release, file, "", native, family, verdict)
        if file.get("control"):
            stock = self._kernels(Job(trees["stock"], release, file, arch_list("stock")))
            faults = stubs(stock, family)
            verdict = f"caught: {summary(faults)}" if faults else "**not caught**"
            yield bool(faults), row(release, file, ", unpatched (control)", stock, family, verdict)

    def _kernels(self, job: Job) -> Kernels:
        """Return the kernels of a file; none if the release's generator left it out."""
        path = Path(job.file["path"])
        if path.parent == Path(job.release["generate"]).parent and not (job.tree / path).exists():
            return {}
        nvdisasm = str(self.home / "cuda/nvidia/cu13/bin/nvdisasm")
        return read_sass(run([nvdisasm, "-c", str(self._object(job))], "nvdisasm"))

    def _object(self, job: Job) -> Path:
        """Return the cubin of a file: from the cache, or compiled."""
        arguments = [*flags(job), "-o"]
        # All that decides the object, so that one of another compiler or source is not taken.
        inputs = [arguments, job.file["path"], csrc_digest(job.tree), headers_digest()]
        name = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()
        path = cache_dir() / "kernels" / f"{name}.cubin"
        print(f"{job.release['version']} {job.arch_list:6} {Path(job.file['path']).name}")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            part, source = path.with_suffix(".part"), str(job.tree / job.file["path"])
            run([*self._nvcc(), *self._include(job), *arguments, str(part), source], source)
            part.replace(path)
        return path

    def _nvcc(self) -> list[str]:
        return [str(self.home / "cuda/nvidia/cu13/bin/nvcc")]

    def _include(self, job: Job) -> list[str]:
        folders = [job.tree / "csrc", *(self.home / each for each in job.release["include"])]
        return [f"-I{folder}" for folder in [*folders, self.home / "cuda/nvidia/cu13/include/cccl"]]

    def compiler(self) -> str:
        return run([*self._nvcc(), "--version"], "nvcc").strip().splitlines()[-1]


def wheels() -> list[dict]:
    """Return the wheels for this machine: headers are the same everywhere, programs are not."""
    machine = platform.machine()
    if machine not in {wheel.get("machine") for wheel in TABLE["wheel"]}:
        raise UsageError(
            f"there is no nvcc for {machine}",
            why=f"{HOME / 'kernels.toml'} locks those for Linux on x86_64 and aarch64",
        )
    return [wheel for wheel in TABLE["wheel"] if wheel.get("machine", machine) == machine]


def fetched(wheel: dict) -> Path:
    entry = LockEntry(*(wheel[key] for key in ("version", "filename", "sha256", "size")))
    return fetch(wheel["project"], entry.version, {entry.version: entry})


def arch_list(arch: str) -> str:
    """Return TORCH_CUDA_ARCH_LIST; the untouched tree is built as the native one would be."""
    return TARGET.arch_list("native" if arch == "stock" else arch)


def flags(job: Job) -> list[str]:
    """Return nvcc's arguments as the release's CMake has them, but for a cubin alone."""
    gencode = TARGET.gencode_flags(job.arch_list).split()
    extra = [*job.release["flags"], *job.file.get("flags", ())]
    common = ["-O2", "-DNDEBUG", "-DENABLE_FP8", "--expt-relaxed-constexpr", "-w"]
    return ["-cubin", *gencode, *common, *extra, *switches(job.tree, job.arch_list)]


@cache
def switches(tree: Path, archs: str) -> tuple[str, ...]:
    """Return the -DENABLE_… of the groups that the tree's own CMake builds for the archs."""
    groups = evaluate(detect(tree), TARGET, archs, TARGET.cuda)
    return tuple(sorted({define for group in groups if group.archs for define in group.defines}))


@cache
def csrc_digest(tree: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted((tree / "csrc").rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(tree)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def headers_digest() -> str:
    return hashlib.sha256("".join(wheel["sha256"] for wheel in wheels()).encode()).hexdigest()


def run(command: list[str], what: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        lines = (result.stderr or result.stdout).strip().splitlines()[-12:]
        raise ProofError(f"{what} failed:\n    " + "\n    ".join(lines))
    return result.stdout


def summary(faults: dict[str, str]) -> str:
    """Count kernels by the reason; sizes vary, so they are left out."""
    counts = Counter(re.sub(r"; \d+ instructions.*", "", reason) for reason in faults.values())
    parts = (f"{count} {reason}" for reason, count in counts.most_common())
    return f"{len(faults)} stubs ({'; '.join(parts)})"


def row(release, file, note, native, family, verdict) -> tuple[str, ...]:
    cutlass = "CUTLASS {used} (pinned: {pinned})".format(**release["cutlass"])
    name = f"{file['title']}{note}<br>`{Path(file['path']).name}`"
    counts = [f"{len(native)} / {len(family)}", *map(histogram, (native, family))]
    return f"{release['version']}<br>{cutlass}", name, *counts, verdict


def histogram(kernels: Kernels) -> str:
    """Return ``1024 QMMA… (64 each)``: the sum, the fewest and the most in a kernel."""
    lines = []
    for name, count in total(kernels).items():
        each = [kernel.tensor.get(name, 0) for kernel in kernels.values()]
        spread = f"{min(each)} to {max(each)}" if min(each) < max(each) else f"{min(each)}"
        lines.append(f"{count} `{name}` ({spread} each)")
    return "<br>".join(lines) or "none"


def report(rows: list[tuple[bool, tuple[str, ...]]], compiler: str) -> str:
    names = {arch: f"sm_{parse_arch(arch_list(arch)).gencode}" for arch in ("native", "family")}
    header = [column.format(**names) for column in COLUMNS]
    lines = [header, ["---"] * len(header), *(cells for _good, cells in rows)]
    tools = ", ".join(f"{wheel['project']} {wheel['version']}" for wheel in wheels())
    table = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([*table, "", f"Compiler: {compiler}. From the index: {tools}.", ""])


def record(text: str) -> None:
    before, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCS.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
