"""Prepare this machine for a build: missing tools, number of jobs, no network, work folders.

A work folder has the same path on every machine, since nvcc names static variables after paths.
The compilers are nvcc of the toolkit that ``recipes/toolchain.toml`` locks, wheels from NVIDIA
unpacked into one folder, and the machine's C++ compiler.
"""

import contextlib
import os
import platform
import re
import shutil
import stat
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from textwrap import indent

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from patchkit.digests import digest
from patchkit.durable.lock import locked
from patchkit.errors import HostError, StorageError, UsageError, translated
from patchkit.extras import BUILD, lacking, missing_libraries, require_libraries
from patchkit.finding import Finding, Level, finding
from patchkit.frozen import Texts, Values, frozen, positional
from patchkit.process import attempt, run
from patchkit.quoting import quoted
from patchkit.recipes.vllm.build import Needs, locked_requirements
from patchkit.records import RECIPES, read_toml
from patchkit.source.fetch import Progress, cache_dir, fetch
from patchkit.source.releases import LockEntry
from patchkit.target import toolkits
from patchkit.units import BYTES_PER_GIB
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


_MEMINFO = Path("/proc/meminfo")
# Releases with a package g++-13-aarch64-linux-gnu. In Debian 12 and Ubuntu 22.04 the newest GCC for
# another CPU is 12.
_HAVE_GCC_13 = "Debian 13, Ubuntu 24.04"
_NUMBERS = re.compile(r"\d+(\.\d+)*")


@frozen
class BuildPlan:
    """A planned build of ``title``, and what this machine lacks for it."""

    title: str
    missing: tuple[Finding, ...]

    def require(self) -> None:
        """Raise one error that lists everything that is missing; return if nothing is."""
        require_libraries(BUILD, "build")
        if not self.missing:
            return

        lines = [f"    {lack.what}: {lack.hint}" for lack in self.missing]
        raise HostError(
            "\n".join([f"this machine cannot build {self.title}:", *lines]),
            why="the release's own build would stop there, some of them after an hour",
            hint="install all of these, then run the same command again",
        )


def plan_vllm(
    needs: Needs,
    version: Version,
    machine: str,
    requirements: Path | None,
) -> BuildPlan:
    """Return the plan of a vLLM build for the CPU ``machine``.

    Raises SourceError if no build environment is locked for the torch that the build needs.
    """
    locked_requirements(needs.torch, requirements)
    across = machine if machine != platform.machine() else ""
    lacks = missing_needs(needs, find_cxx(machine), across)
    return BuildPlan(title=f"vLLM {version}", missing=(*lacks, *missing_tools(machine)))


def missing_needs(
    needs: Needs,
    cxx: Path | None,
    across: str = "",
) -> Iterator[Finding]:
    """Yield a finding for each thing that this machine lacks for a build.

    ``cxx`` is the C++ compiler, None if there is none, which ``missing_tools`` tells. ``across``
    names the CPU to build for if it is not the CPU of this machine.
    """
    yield from _python_lacks(needs)
    yield from _compiler_lacks(needs, cxx, across)
    if needs.patch and shutil.which("patch") is None:
        yield _lack("no program `patch`", "apt install patch")


def _lack(what: str, hint: str) -> Finding:
    return finding(HostError, "", what, hint)


def _python_lacks(needs: Needs) -> Iterator[Finding]:
    version = platform.python_version()
    if not SpecifierSet(needs.python).contains(version, prereleases=True):
        yield _lack(
            f"Python {version} is outside {needs.python}",
            "install patchkit into another one",
        )

    supply = f"apt install python{version.rpartition('.')[0]}"
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        yield _lack(f"{sys.executable} has no headers (Python.h)", f"{supply}-dev")
    if not find_spec("ensurepip"):
        yield _lack(f"{sys.executable} has no module venv", f"{supply}-venv")


def _compiler_lacks(needs: Needs, cxx: Path | None, across: str) -> Iterator[Finding]:
    # If the release names no GCC, the oldest GCC with -std=c++20.
    default = "10" if needs.standard >= 20 else ""
    oldest = needs.gcc or default
    if not cxx or not oldest:
        return

    # The release checks the version of GCC only; no other compiler knows this option.
    version = attempt(cxx, "-dumpfullversion").output.strip()
    if not _NUMBERS.fullmatch(version) or Version(version) >= Version(oldest):
        return

    compiler = f"g++-{oldest.partition('.')[0]}"
    supply = f"apt install {compiler}"
    if across:
        supply += f"-{across.replace('_', '-')}-linux-gnu ({_HAVE_GCC_13})"
        compiler = f"{across}-linux-gnu-{compiler}"
    yield _lack(
        f"{cxx} is GCC {version}; "
        f"the release takes C++{needs.standard}, GCC {oldest} or later",
        f"{supply}; then CXX={compiler}",
    )


@positional
class Jobs:
    """A number of jobs, and the reason in one phrase."""

    number: int
    reason: str


def jobs_for(memory: int, number: int | None = None) -> Jobs:
    """Return the number of jobs: ``number`` if given, else one per core.

    There are fewer jobs if the available memory is not enough for ``memory`` bytes per job.
    """
    if number:
        return Jobs(number, "as asked for")

    # Cores that this process may use; os.cpu_count() ignores affinity and cpusets.
    cores = len(os.sched_getaffinity(0))
    free = available_memory()
    number = max(1, min(cores, free // memory))

    limit = "memory decides" if number < cores else "one a core"
    supply = (
        f"{memory / BYTES_PER_GIB:.0f} GiB a job, {free / BYTES_PER_GIB:.0f} available"
    )
    return Jobs(number, f"{limit}: {cores} cores, {supply}")


def available_memory() -> int:
    """Return how many bytes of memory programs may still take."""
    meminfo = _MEMINFO.read_text("ascii")
    (kib,) = re.findall(r"\nMemAvailable: +(\d+) kB", meminfo)
    return int(kib) << 10


def network() -> str:
    """Return a sentence that says whether a build on this machine is cut off from the network.

    No wheel records this sentence: the compiled code is the same either way, since every source and
    tool is fetched before the build and known by its digest.
    """
    if namespace_words():
        return "cut off from the network, in a namespace of its own"
    return (
        "not cut off from the network: this machine lets nobody make network namespaces (Ubuntu: "
        "kernel.apparmor_restrict_unprivileged_userns)"
    )


@cache
def namespace_words() -> Texts:
    """Return the words to put before a command to cut it off from the network.

    Return () if this machine does not let the user make a network namespace.
    """
    prefix = ["unshare", "--net", "--"]
    # unshare(1): a user other than root can make a network namespace only in a user namespace.
    if os.geteuid() != 0:
        prefix.insert(2, "--map-current-user")

    # Only a trial tells: AppArmor, sysctls and containers can each forbid namespaces.
    return () if attempt(*prefix, "true").trouble else tuple(prefix)


WORK = Path("/var/tmp/patchkit")  # noqa: S108  (owner and mode are checked)
"""The folder below which all is built. Unlike /tmp, it is on a disk and survives a reboot."""

_FACTS = "facts.json"
_STAGED = ".staged-"
_STALE = 86400  # seconds; nothing is staged, and no PTX assembled, for that long


@contextlib.contextmanager
def staging() -> Iterator[Path]:
    """Make a temporary folder for this run, on the file system of the work folders.

    Files are prepared in it and then renamed into a work folder. An OSError within the block, for
    example of a full disk, becomes a StorageError.
    """
    _require_private(WORK)
    for folder in WORK.glob(f"{_STAGED}*"):
        remove_stale(folder)

    with translated("the build is not finished", WORK):
        folder = Path(tempfile.mkdtemp(prefix=_STAGED, dir=WORK))
        try:
            yield folder
        finally:
            # By a process that outlives this one and gets no signal of the terminal: the folder
            # may hold ten thousand files, and somebody waits behind Ctrl-C.
            words = ("rm", "-rf", "--", str(folder))
            os.posix_spawnp("rm", words, os.environ, setsid=True)


def remove_stale(folder: Path) -> None:
    """Remove a folder if it has not changed for a day.

    The age has to tell whether the folder is in use, since nobody locks it.
    """
    # Another process may just have removed it.
    with contextlib.suppress(FileNotFoundError):
        if time.time() - folder.lstat().st_mtime > _STALE:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def work_folder(
    root: Path,
    sources: Iterable[Path],
    facts: str,
    *,
    fresh: bool,
    free: int,
) -> Iterator[Path]:
    """Lock the work folder ``root`` for this build, and yield it.

    If the folder is of a build with the same ``facts``, its files stay, so that an interrupted
    build continues. Otherwise, or if ``fresh``, the folder is emptied and ``sources`` are moved
    into it. Raises BusyError if another build has the folder, StorageError if the disk has less
    than ``free`` bytes left.
    """
    _require_private(root)
    with locked(root) as handle:
        # The build holds the lock on if patchkit alone is killed (see compiled.run_build).
        os.set_inheritable(handle, True)

        stamp = root / _FACTS
        is_same = stamp.is_file() and stamp.read_text("utf-8") == facts
        if fresh or not is_same:
            stamp.unlink(missing_ok=True)  # first: without it no build continues
            emptied(root)
            for source in sources:
                source.rename(root / source.name)
            stamp.write_text(facts, "utf-8")

        if shutil.disk_usage(root).free < free:
            raise StorageError(
                f"{root}: less than {free >> 30} GiB free",
                hint="free some space",
            )
        yield root


def emptied(folder: Path) -> Path:
    """Empty a folder, or make it, and return it. It is not replaced, since it may be locked."""
    folder.mkdir(parents=True, exist_ok=True)
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    return folder


def _require_private(folder: Path) -> None:
    """Make the folder if it is missing. Raises StorageError if another user can write into it."""
    with translated("nothing was built", folder):
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        # lstat: in /var/tmp anybody may have put a link here, to a folder of ours.
        status = folder.lstat()

    is_shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if is_shared or not is_ours:
        raise StorageError(
            f"{folder} belongs to somebody else, or others may write into it",
            why="builds happen at this path on every machine, so that their bytes are the same",
            hint=f"let its owner remove it, or run as its owner: {quoted('ls', '-ld', folder)}",
        )
