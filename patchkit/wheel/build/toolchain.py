"""Find the compilers of a build: nvcc of the locked toolkit, and the machine's C++ compiler.

The toolkit is that of ``recipes/toolchain.toml``: NVIDIA's wheels, unpacked into one folder.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

from patchkit.digests import digest
from patchkit.durable.lock import locked
from patchkit.errors import HostError, UsageError, translated
from patchkit.extras import BUILD, lacking, missing_libraries
from patchkit.finding import Finding, Level
from patchkit.process import attempt, run
from patchkit.quoting import quoted
from patchkit.records import RECIPES, read_toml
from patchkit.source.fetch import Progress, cache_dir, fetch
from patchkit.source.releases import LockEntry
from patchkit.target import Toolkit
from patchkit.wheel.file.wheelfile import WheelFile

CROSS = "targets/sbsa-linux"
"""Where, below a toolkit, nvcc looks when it compiles for an Arm server."""

COMPILER = "nvidia-cuda-nvcc"
"""The wheel with nvcc, ptxas and fatbinary."""

_PREFIX = "nvidia/cu13/"  # where the wheels of CUDA 13 keep what a toolkit keeps below its root
MACHINES = ("aarch64", "x86_64")
"""The CPUs that the locked toolkit has wheels for, as platform tags name them."""

_PATIENCE = 60.0  # seconds, with another build that unpacks the toolkit


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """Compilers for ``machine``; ``cuda`` is nvcc's version, ``compiler`` the C++ one's."""

    machine: str
    nvcc: Path
    cuda: str
    cxx: Path
    compiler: str
    include: Path
    lib: Path


def find_toolchain(
    machine: str,
    row: Toolkit,
    *,
    offline: bool = False,
    progress: Progress | None = None,
) -> Toolchain:
    """Find the C++ compiler for ``machine``, and the locked toolkit of a CUDA beside it.

    Raises HostError, naming the packages, for what is missing; and what a fetch raises.
    """
    here = platform.machine()
    for missing in missing_tools(machine):
        raise missing.error()
    cxx = find_cxx(machine)
    assert cxx is not None  # else it is among the missing ones
    home = locked_toolkit(here, machine, row.cuda, offline=offline, progress=progress)
    if len(str(home).split()) > 1:
        raise HostError(
            f"{home}: a path with a space",
            why="NCCL's makefiles take it for two",
            hint="choose another cache with PATCHKIT_CACHE_DIR",
        )
    half = home / CROSS if machine != here else home
    return Toolchain(
        machine=machine,
        nvcc=home / "bin" / "nvcc",
        cuda=row.nvcc,
        cxx=cxx,
        compiler=run(cxx, "--version", check=False).output.partition("\n")[0].strip(),
        include=half / "include",
        lib=half / "lib",
    )


def check_toolchain(
    toolchain: Toolchain,
    gencode: str,
    folder: Path,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Compile and link a few lines for the device, so that a long build does not end in surprise.

    ``environment`` is what the build will see, by default this process's. Raises HostError with the
    compiler's own words.
    """
    source = folder / "check.cu"
    source.write_text("__global__ void check() {}\nint main() { check<<<1, 1>>>(); }\n")
    command = [
        str(toolchain.nvcc), "-ccbin", str(toolchain.cxx), *gencode.split(), "-std=c++17",
        # CUDA 13 keeps CCCL's headers (cub, thrust) in a folder of their own.
        f"-I{toolchain.include}", f"-I{toolchain.include}/cccl", f"-L{toolchain.lib}",
        str(source), "-o", str(folder / "check"),
    ]  # fmt: skip
    done = attempt(*command, env=environment, timeout=None)
    if done.trouble:
        raise HostError(
            f"nvcc {toolchain.cuda} with {toolchain.compiler} cannot compile for {gencode}\n"
            + indent(done.trouble, "    "),
            why="this nvcc does not know the device, or does not take this C++ compiler",
            hint="CXX names another g++ (CUDA 13 takes 11 to 15)",
        )


def missing_tools(machine: str = "") -> Iterator[Finding]:
    """Yield what a build runs that is not here, the C++ compiler of a named CPU included.

    The libraries of the extra are a note: a plan takes none, and a build asks for them first.
    """
    if libraries := lacking(BUILD):
        error = missing_libraries(libraries, "build")
        yield Finding(level=Level.NOTE, what=error.what, why=error.why, hint=error.hint)
    # NCCL's makefiles call them; python3 generates the sources of its kernels.
    absent = {
        tool: tool for tool in ("make", "bash", "python3") if shutil.which(tool) is None
    }
    if machine and find_cxx(machine) is None:
        native = machine == platform.machine()
        name = os.environ.get("CXX", "g++") if native else f"{machine}-linux-gnu-g++"
        name = f"CXX names {name!r}, which" if native and "CXX" in os.environ else name
        absent[name] = "g++" if native else f"g++-{machine.replace('_', '-')}-linux-gnu"
    for tool, package in absent.items():
        yield Finding(
            what=f"{tool} is not on this machine",
            why="the build compiles host code with it",
            hint=quoted("apt", "install", package),
            kind=HostError,
        )


def find_cxx(machine: str) -> Path | None:
    """Return the C++ compiler for a CPU: what CXX names, or the distribution's; None without one.

    For another CPU than this machine's, CXX counts only if it names a compiler for that one.
    """
    named = os.environ.get("CXX", "")
    if machine == platform.machine():
        name = named or "g++"
    elif named and attempt(named, "-dumpmachine").output.startswith(machine):
        name = named
    else:
        name = f"{machine}-linux-gnu-g++"
    found = shutil.which(name)
    return Path(found).absolute() if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolkitWheel(LockEntry):
    """One locked wheel of NVIDIA's; the fields are described in ``recipes/toolchain.toml``."""

    cuda: str
    project: str
    role: str
    machine: str


def locked_toolkit_wheels() -> tuple[ToolkitWheel, ...]:
    """Read the wheels of ``recipes/toolchain.toml``."""
    return read_toml(tuple[ToolkitWheel, ...], RECIPES / "toolchain.toml", key="wheel")


def locked_toolkit(
    here: str,
    machine: str,
    cuda: str,
    *,
    offline: bool,
    progress: Progress | None,
    only: str = "",
) -> Path:
    """Return the locked toolkit of a CUDA, or one wheel of it, unpacked once in the cache.

    Raises UsageError for a CPU that it has no wheels for, and what a fetch raises.
    """
    if here not in MACHINES:
        raise UsageError(
            f"NVIDIA's compiler is for {' and '.join(MACHINES)}, not for {here}"
        )
    known = [
        w for w in locked_toolkit_wheels() if w.cuda == cuda and only in ("", w.project)
    ]
    wheels = [wheel for wheel in known if wheel.machine == here]
    cross = [w for w in known if w.machine == machine != here]
    # The other CPU's compiler wheel is for a header alone (fatbinary_section.h).
    wheels += [w for w in cross if w.role == "runtime" or w.project == COMPILER]
    # The folder is named by its contents: other wheels in the lock make another toolkit.
    contents = digest("".join(wheel.sha256 for wheel in wheels))[:12]
    home = cache_dir() / "cuda" / f"{wheels[0].version}-{machine}-on-{here}-{contents}"
    if home.is_dir():
        return home
    archives = [
        (
            fetch(
                w.project, w.version, {w.version: w}, offline=offline, progress=progress
            ),
            w,
        )
        for w in wheels
    ]
    trouble = "the CUDA toolkit (0.5 GB) is not unpacked"
    with translated(
        trouble, home, "free some space, or set PATCHKIT_CACHE_DIR to another folder"
    ):
        home.parent.mkdir(parents=True, exist_ok=True)
        with (
            locked(home.parent, _PATIENCE),
            tempfile.TemporaryDirectory(dir=home.parent) as folder,
        ):
            tree = Path(folder) / "cuda"
            for archive, wheel in archives:
                dest = tree if wheel.machine == here else tree / CROSS
                # Only the headers of the other CPU's compiler are for here.
                only_headers = wheel.role == "compiler" and dest != tree
                parts = (
                    {"include"} if only_headers else {"bin", "include", "lib", "nvvm"}
                )
                with WheelFile(archive) as opened:
                    for path in opened.members:
                        name = path.removeprefix(_PREFIX)
                        if name == path or name.partition("/")[0] not in parts:
                            continue
                        file = dest / name
                        file.parent.mkdir(parents=True, exist_ok=True)
                        with file.open("wb") as sink:
                            sink.writelines(opened.unpacked(path))
                        # Unpacked by hand, modes are set, too: bin/nvcc, nvvm/bin/cicc.
                        file.chmod(0o755 if "/bin/" in f"/{name}" else 0o644)
            (tree / "lib64").symlink_to("lib")
            if not home.is_dir():  # another build may have put it there
                tree.rename(home)
    return home
