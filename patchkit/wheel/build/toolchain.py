"""Find the compilers of a build: nvcc of the locked toolkit, and the machine's C++ compiler.

``recipes/toolchain.toml`` locks the toolkit: wheels from NVIDIA, unpacked into one folder.
"""

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent

from patchkit.digests import digest
from patchkit.durable.lock import locked
from patchkit.errors import HostError, UsageError, translated
from patchkit.extras import BUILD, lacking, missing_libraries
from patchkit.finding import Finding, Level, finding
from patchkit.frozen import Values, frozen
from patchkit.process import attempt, run
from patchkit.records import RECIPES, read_toml
from patchkit.source.fetch import Progress, cache_dir, fetch
from patchkit.source.releases import LockEntry
from patchkit.target import toolkits
from patchkit.wheel.file.wheelfile import WheelFile

CROSS = "targets/sbsa-linux"
"""The folder in a toolkit that nvcc uses to compile for an Arm server."""

COMPILER = "nvidia-cuda-nvcc"
"""The wheel with nvcc, ptxas and fatbinary."""

_PREFIX = "nvidia/cu13/"  # the root of a toolkit, in wheels of CUDA 13
MACHINES = ("aarch64", "x86_64")
"""The CPUs for which the lock has wheels of the toolkit, named as in platform tags."""

_PATIENCE = 60.0  # seconds, with another build that unpacks the toolkit


@frozen
class Toolchain:
    """Compilers for ``machine``; ``cuda`` is nvcc's version, ``compiler`` the C++ one's."""

    machine: str
    nvcc: Path
    cuda: str
    cxx: Path
    compiler: str
    include: Path
    lib: Path

    @property
    def across(self) -> bool:
        """Return whether the compilers are for another CPU than that of this machine."""
        return self.machine != platform.machine()


def find_toolchain(
    machine: str,
    cuda: str,
    *,
    offline: bool = False,
    progress: Progress | None = None,
) -> Toolchain:
    """Find the C++ compiler for ``machine``, and fetch the locked toolkit of a CUDA.

    Raises HostError that names the first missing tool, UsageError if the toolkit has no wheels for
    this machine, and the errors of a fetch.
    """
    for missing in missing_tools(machine):
        raise missing.error()
    cxx = find_cxx(machine)
    assert cxx is not None  # else it is among the missing ones

    host = platform.machine()
    home = locked_toolkit(host, machine, cuda, offline=offline, progress=progress)
    if len(str(home).split()) > 1:
        raise HostError(
            f"{home}: a path with a space",
            why="NCCL's makefiles take it for two",
            hint="choose another cache with PATCHKIT_CACHE_DIR",
        )

    libraries = home / CROSS if machine != host else home
    banner = run(cxx, "--version", check=False).output
    (nvcc,) = (row.nvcc for row in toolkits() if row.cuda == cuda)
    return Toolchain(
        machine=machine,
        nvcc=home / "bin" / "nvcc",
        cuda=nvcc,
        cxx=cxx,
        compiler=banner.partition("\n")[0].strip(),
        include=libraries / "include",
        lib=libraries / "lib",
    )


def check_toolchain(
    toolchain: Toolchain,
    gencode: str,
    folder: Path,
    environment: Values,
) -> None:
    """Compile and link a few lines for the device in ``folder``, before a long build begins.

    ``environment`` are the variables of the build. Raises
    HostError with the compiler's output if the compilers do not work together.
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


def missing_tools(machine: str) -> Iterator[Finding]:
    """Yield a finding for each program that a build needs and this machine lacks.

    This includes the C++ compiler for the CPU ``machine``. Missing Python libraries of the extra
    ``build`` are only a note: a plan does not need them, and a build checks them first.
    """
    if libraries := lacking(BUILD):
        error = missing_libraries(libraries, "build")
        yield Finding(level=Level.NOTE, what=error.what, why=error.why, hint=error.hint)

    # NCCL's makefiles call these programs; python3 generates the sources of NCCL's kernels.
    for tool in ("make", "bash", "python3"):
        if shutil.which(tool) is None:
            yield _missing_tool(tool, tool)

    if find_cxx(machine) is None:
        package = "g++"
        if machine != platform.machine():
            package = f"g++-{machine.replace('_', '-')}-linux-gnu"
        yield _missing_tool(_cxx_name(machine), package)


def _missing_tool(tool: str, package: str) -> Finding:
    return finding(
        HostError,
        "",
        f"{tool} is not on this machine",
        f"apt install {package}",
        "the build compiles host code with it",
    )


def find_cxx(machine: str) -> Path | None:
    """Return the path of the C++ compiler for a CPU, None if there is none."""
    path = shutil.which(_cxx_name(machine))
    return Path(path).absolute() if path else None


def _cxx_name(machine: str) -> str:
    """Return the name of the compiler that CXX names, or else of the distribution's.

    If the CPU is not that of this machine, CXX is ignored unless it names a compiler for that CPU.
    """
    named = os.environ.get("CXX", "")
    if machine == platform.machine():
        return named or "g++"
    if named and attempt(named, "-dumpmachine").output.startswith(machine):
        return named
    return f"{machine}-linux-gnu-g++"


@frozen
class ToolkitWheel(LockEntry):
    """One locked wheel from NVIDIA; the fields are described in ``recipes/toolchain.toml``."""

    cuda: str
    project: str
    role: str
    machine: str


def locked_toolkit_wheels() -> tuple[ToolkitWheel, ...]:
    """Read the wheels of ``recipes/toolchain.toml``."""
    return read_toml(tuple[ToolkitWheel, ...], RECIPES / "toolchain.toml", key="wheel")


def locked_toolkit(
    host: str,
    machine: str,
    cuda: str,
    *,
    offline: bool,
    progress: Progress | None,
    only: str = "",
) -> Path:
    """Return the folder of the locked toolkit of a CUDA, which is unpacked into the cache once.

    The toolkit runs on the CPU ``host`` and compiles for ``machine``. With ``only``, the name of a
    project, just its wheel is unpacked. Raises UsageError if there are no wheels for ``host``, and
    the errors of a fetch.
    """
    if host not in MACHINES:
        cpus = " and ".join(MACHINES)
        raise UsageError(f"NVIDIA's compiler is for {cpus}, not for {host}")

    rows = [
        row
        for row in locked_toolkit_wheels()
        if row.cuda == cuda and only in ("", row.project)
    ]
    wheels = [row for row in rows if row.machine == host]
    if machine != host:
        # Of the other CPU's compiler wheel only a header is needed (fatbinary_section.h).
        wheels += [
            row
            for row in rows
            if row.machine == machine
            and (row.role == "runtime" or row.project == COMPILER)
        ]

    # The folder is named by its contents: other wheels in the lock make another toolkit.
    contents = digest("".join(wheel.sha256 for wheel in wheels))[:12]
    home = cache_dir() / "cuda" / f"{wheels[0].version}-{machine}-on-{host}-{contents}"
    if home.is_dir():
        return home

    archives = [
        fetch(
            wheel.project,
            wheel.version,
            {wheel.version: wheel},
            offline=offline,
            progress=progress,
        )
        for wheel in wheels
    ]
    trouble = "the CUDA toolkit (0.5 GB) is not unpacked"
    cure = "free some space, or set PATCHKIT_CACHE_DIR to another folder"
    with translated(trouble, home, cure):
        home.parent.mkdir(parents=True, exist_ok=True)
        with (
            locked(home.parent, _PATIENCE),
            tempfile.TemporaryDirectory(dir=home.parent) as folder,
        ):
            tree = Path(folder) / "cuda"
            for archive, wheel in zip(archives, wheels, strict=True):
                _unpack_wheel(archive, wheel, tree, host)
            (tree / "lib64").symlink_to("lib")

            if not home.is_dir():  # another build may have put it there
                tree.rename(home)
    return home


def _unpack_wheel(
    archive: Path,
    wheel: ToolkitWheel,
    tree: Path,
    host: str,
) -> None:
    """Unpack the files of a toolkit from a wheel into ``tree``.

    Files of a wheel for another CPU than ``host`` go below ``CROSS``.
    """
    dest = tree
    parts = {"bin", "include", "lib", "nvvm"}
    if wheel.machine != host:
        dest = tree / CROSS
        if wheel.role == "compiler":
            parts = {"include"}

    with WheelFile(archive) as opened:
        for path in opened.members:
            name = path.removeprefix(_PREFIX)
            if name == path or name.partition("/")[0] not in parts:
                continue
            file = opened.copy_member(path, dest / name)
            # The modes of the archive are not kept: bin/nvcc and nvvm/bin/cicc are programs.
            file.chmod(0o755 if "/bin/" in f"/{name}" else 0o644)
