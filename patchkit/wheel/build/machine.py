"""Prepare this machine for a build: missing tools, number of jobs, no network, work folders.

A work folder has the same path on every machine, since nvcc names static variables after paths.
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

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from patchkit.durable.lock import locked
from patchkit.errors import HostError, StorageError, translated
from patchkit.extras import BUILD, require_libraries
from patchkit.finding import Finding, finding
from patchkit.frozen import Texts, frozen, positional
from patchkit.process import attempt
from patchkit.quoting import quoted
from patchkit.recipes.vllm.build import Needs, locked_requirements
from patchkit.units import BYTES_PER_GIB
from patchkit.wheel.build.toolchain import find_cxx, missing_tools

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
