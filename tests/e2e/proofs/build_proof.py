"""vLLM configured and in part compiled, as whole as an ordinary machine can do it in minutes.

    nox -s build-proof [-- RELEASE …] [--write]

For each release `patchkit build vllm` builds a wheel of its smallest extensions: real sources,
torch and CMake, no network. What CMake means to compile is compared with tests/data/objects.csv;
two CUDA sources are compiled; the wheel is installed, its extensions are loaded; the stand-in for
torch, which a build for another CPU has, answers as torch itself does.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import subprocess
import sys
import tempfile
import venv
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from patchkit.errors import ProofError, UsageError
from patchkit.fatbin import DeviceCode
from patchkit.source.fetch import cache_dir
from patchkit.target import Load, targets
from patchkit.wheel.build.compiled import clean_environment
from patchkit.wheel.build.machine import WORK
from patchkit.wheel.build.torch_toolkit import install_torch_stand_in
from patchkit.wheel.device.inspect import inspect_file
from patchkit.wheel.device.libraries import compiled_sources
from support.small_torch import site
from support.torch_questions import answers, questions
from support.wheels import inspected_wheel
from tools import run_program

GB10 = targets()["gb10"]
GOLDEN = Path(__file__).parents[3] / "tests" / "data" / "objects.csv"
FLASHINFER = "flashinfer-python==0.6.8.post1"
CMAKE = """\
set(CUTLASS_DIR "${CMAKE_CURRENT_SOURCE_DIR}" CACHE PATH "")
set(CUTLASS_INCLUDE_DIR "${CUTLASS_DIR}/include" CACHE PATH "")
set(CUTLASS_TOOLS_UTIL_INCLUDE_DIR "${CUTLASS_DIR}/tools/util/include" CACHE PATH "")
"""
# Both take torch 2.11.0 and CUTLASS 4.4.2, so one environment serves; the extensions are small,
# and the sources take a minute together. What is left out needs sources that no index has.
_WITHOUT = ("flash-attn", "flashmla", "qutlass", "triton-kernels", "deepgemm")
RELEASES = {
    "0.20.2": {"extensions": ["cumem_allocator"], "without": _WITHOUT},
    "0.25.1": {
        "extensions": ["cumem_allocator", "fs_io_C", "spinloop"],
        "without": (*_WITHOUT, "fmha-sm100"),
    },
}
# The extension alone: importing vllm takes packages that a build does not have.
LOAD = """
import importlib.util, sys
import torch
spec = importlib.util.spec_from_file_location(*sys.argv[1:])
spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""
SOURCES = ("/quantization/activation_kernels.cu.o", "/nvfp4_quant_kernels.cu.o")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("releases", nargs="*", default=list(RELEASES))
    parser.add_argument(
        "--write", action="store_true", help="write the golden table anew"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="patchkit-build-") as folder:
        rows = [
            row for name in args.releases for row in prove(name, Path(folder) / name)
        ]
    compare(rows, args.releases, write=args.write)
    print("every check held")
    return 0


def prove(release: str, folder: Path) -> list[tuple[str, ...]]:
    """Prove one release; return its rows of the golden table."""
    folder.mkdir()
    command = [
        sys.executable,
        "-m",
        "patchkit",
        "build",
        "vllm",
        "--version",
        release,
        "--json",
    ]
    command += [
        "--cpu",
        platform.machine(),
        "--dir",
        str(folder),
        *reduced_options(release),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise ProofError(f"building vllm {release} ended with {done.returncode}")
    told = json.loads(done.stdout)
    root = WORK / f"vllm-{release}-gb10-{platform.machine()}-reduced"
    sources = compiled_sources(root / "source" / "build", root / "source")
    print(f"{release}: {len(sources)} CUDA sources would be compiled")
    print(f"{release}: {told['proofs'][0]}")
    check_objects(root, folder)
    check_wheel(told)
    check_stand_in(release, root)
    names = (
        (
            source.library,
            " ".join(sorted(DeviceCode(*code).name for code in source.codes)) or "none",
        )
        for source in sources
    )
    return [
        (release, *key, str(count)) for key, count in sorted(Counter(names).items())
    ]


def reduced_options(release: str) -> list[str]:
    """Return options of `patchkit build vllm`: the smallest extensions, sources of an index.

    Raises UsageError if it is not known which those are.
    """
    if release not in RELEASES:
        raise UsageError(
            f"nobody said what of vllm {release} is small",
            hint=f"one of {', '.join(RELEASES)}, or all of it: --whole",
        )
    how = RELEASES[release]
    options = [
        "--source",
        f"cutlass={index_cutlass()}",
        "--extensions",
        ",".join(how["extensions"]),
    ]
    return options + [word for name in how["without"] for word in ("--without", name)]


def index_cutlass() -> Path:
    """Return CUTLASS 4.4.2, which is in a wheel of the index."""
    home = cache_dir() / FLASHINFER
    folder = home / "flashinfer/data/cutlass"
    if not (folder / "CMakeLists.txt").exists():
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--no-deps",
            "--target",
            home,
            FLASHINFER,
        ]
        subprocess.run(pip, check=True, stdout=2)
        (folder / "CMakeLists.txt").write_text(CMAKE)
    return folder


def compiled_object(root: Path, ending: str) -> Path:
    """Compile one source of a build below ``root`` as the build would; return the object."""
    (build_folder,) = {
        path.parent for path in root.glob("source/build/temp*/build.ninja")
    }
    listed = subprocess.run(
        ["ninja", "-t", "targets", "all"],
        cwd=build_folder,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    names = [line.partition(":")[0] for line in listed]
    (target,) = [name for name in names if name.endswith(ending)]
    # Compiled in fact: a hit of the cache would prove nothing about this build.
    env = clean_environment(root) | {"CCACHE_DISABLE": "1"}
    subprocess.run(["ninja", target], cwd=build_folder, env=env, check=True, stdout=2)
    return build_folder / target


def check_objects(root: Path, folder: Path) -> None:
    """Compile two CUDA sources as the build would, and inspect them."""
    for ending in SOURCES:
        target = compiled_object(root, ending)
        library = folder / "object.so"
        subprocess.run(["g++", "-shared", "-o", str(library), str(target)], check=True)
        binary = inspect_file(library)
        if binary.load(GB10) is not Load.EXACT:
            raise ProofError(f"{target} holds {[code.name for code in binary.codes]}")
        print(f"{target.name}: {[code.name for code in binary.codes]}")


def check_wheel(told: Mapping[str, Any]) -> None:
    """Check what a user would see of a wheel; ``told`` is what its build answered."""
    wheel = Path(told["wheel"])
    for binary in inspected_wheel(wheel):
        if binary.library.rpath or binary.library.runpath:
            raise ProofError(f"{binary.name} has the RPATH {binary.library.rpath}")
    with tempfile.TemporaryDirectory(prefix="patchkit-install-") as folder:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--no-deps",
            "--no-index",
            "--quiet",
        ]
        subprocess.run([*pip, "--target", folder, str(wheel)], check=True)
        libraries = [
            (name, library)
            for name in ("spinloop", "fs_io_C")
            for library in Path(folder, "vllm").glob(f"{name}*.so")
        ]
        for name, library in libraries:
            command = [
                str(environment()),
                "-W",
                "ignore",
                "-c",
                LOAD,
                name,
                str(library),
            ]
            if subprocess.run(command).returncode:
                raise ProofError(
                    f"{library.name} cannot be imported beside its build's torch"
                )
            print(f"{library.name} is loaded")
        version = Path(folder, "vllm", "_version.py").read_text()
        if wheel.name.split("-")[1] not in version:
            raise ProofError(
                "vllm/_version.py tells another version than the wheel's name"
            )


def environment() -> Path:
    """Return the interpreter beside a real torch, which a stand-in is not."""
    (torch,) = WORK.glob(
        "environment-*/lib/python*/site-packages/torch/lib/libtorch_cuda.so"
    )
    return torch.parents[5] / "bin" / "python"


def check_stand_in(release: str, root: Path) -> None:
    """Ask the torch of the environment, and a stand-in that reads its files, what sources ask."""
    python, asking = environment(), sorted(questions(root / "source"))
    variables = clean_environment(root) | {"CUDA_HOME": str(root / "cuda")}
    with tempfile.TemporaryDirectory(prefix="patchkit-torch-") as folder:
        venv.create(folder, with_pip=False)
        stand_in = Path(folder, "bin", "python")
        install_torch_stand_in(site(stand_in), site(python))
        real, read = (answers(each, asking, variables) for each in (python, stand_in))
    wrong = [
        f"    {each}: {real[each]}, {read[each]}"
        for each in asking
        if real[each] != read[each]
    ]
    if wrong or not asking:
        raise ProofError(
            f"{release}: torch and its stand-in differ\n" + "\n".join(wrong)
        )
    print(f"{release}: the stand-in answers {len(asking)} questions as torch does")


def compare(rows: list[tuple[str, ...]], releases: list[str], *, write: bool) -> None:
    """Compare the rows with the golden table's, or write that anew."""
    if write:
        with GOLDEN.open("w", newline="") as sink:
            head = ("release", "library", "codes", "sources")
            csv.writer(sink, lineterminator="\n").writerows([head, *rows])
        return
    with GOLDEN.open(newline="") as stream:
        known = [tuple(row) for row in csv.reader(stream) if row[0] in releases]
    if rows != known:
        raise ProofError(
            f"CMake would compile other objects than {GOLDEN.name} says\n"
            + "\n".join(f"    {row}" for row in sorted(set(rows) ^ set(known))),
            hint="--write writes the table anew",
        )


if __name__ == "__main__":
    run_program(main)
