"""Prepare this machine for a build: missing tools, number of jobs, no network, work folders.

Work folders are at one path everywhere, since nvcc names static variables after paths.
"""

from __future__ import annotations

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
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from patchkit.durable.lock import locked
from patchkit.errors import HostError, StorageError, translated
from patchkit.finding import Finding, finding
from patchkit.frozen import frozen
from patchkit.process import attempt
from patchkit.quoting import quoted
from patchkit.recipes.vllm.build import Needs, locked_requirements
from patchkit.units import BYTES_PER_GIB
from patchkit.wheel.build.toolchain import find_cxx, missing_tools

_MEMINFO = Path("/proc/meminfo")
# With g++-13-aarch64-linux-gnu; Debian 12 and Ubuntu 22.04 end with GCC 12 for another CPU.
_HAVE_GCC_13 = "Debian 13, Ubuntu 24.04"
_MACRO = re.compile(r"^#define (\w+) (.*)$", re.MULTILINE)


@frozen
class BuildPlan:
    """What a build of ``title`` lacks on this machine."""

    title: str
    missing: tuple[Finding, ...] = ()

    def require(self) -> None:
        """Raise one error that lists all that is missing."""
        if not self.missing:
            return

        worst = max(self.missing, key=attrgetter("kind.exit_code"))
        lines = [f"    {lack.what}: {lack.hint}" for lack in self.missing]
        raise worst.kind(
            "\n".join([f"this machine cannot build {self.title}:", *lines]),
            why="the release's own build would stop there, some of them after an hour",
            hint="install all of these, then run the same command again",
        )


def plan_vllm(
    needs: Needs,
    version: Version,
    machine: str,
    requirements: Path | None = None,
) -> BuildPlan:
    """Plan a build for the CPU ``machine``. Raises SourceError where nothing is locked."""
    locked_requirements(needs.torch, requirements)
    across = machine if machine != platform.machine() else ""
    lacks = missing_needs(needs, find_cxx(machine), across)
    return BuildPlan(title=f"vLLM {version}", missing=(*lacks, *missing_tools()))


def missing_needs(
    needs: Needs,
    cxx: Path | None,
    across: str = "",
) -> Iterator[Finding]:
    """Yield each thing that this machine lacks for a build.

    ``cxx`` is its C++ compiler; ``across`` names the CPU to build for, if it is another one.
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
    # The first GCC with -std=c++20, where the release itself names none.
    default = "10" if needs.standard >= 20 else ""
    oldest = needs.gcc or default
    major = oldest.partition(".")[0]

    supply = "apt install g++"
    if major:
        supply += f"-{major}"
    if across:
        supply += f"-{across.replace('_', '-')}-linux-gnu"

    if cxx is None:
        cpu = f" for {across}" if across else ""
        yield _lack(f"no C++ compiler{cpu}", supply)
        return

    version = _gcc_version(cxx)
    # The release only asks GCC for its version.
    if not version or not oldest or version >= Version(oldest):
        return

    compiler = f"g++-{major}"
    if across:
        compiler = f"{across}-linux-gnu-{compiler}"
        supply += f" ({_HAVE_GCC_13})"
    yield _lack(
        f"{cxx} is GCC {version}; "
        f"the release takes C++{needs.standard}, GCC {oldest} or later",
        f"{supply}; then CXX={compiler}",
    )


def _gcc_version(cxx: Path) -> Version | None:
    """Return the version of a compiler by its macros, None unless it is GCC.

    Any program may be called g++, and clang defines __GNUC__ as well.
    """
    listing = attempt(cxx, "-dM", "-E", "-x", "c++", "/dev/null")
    macros = dict(_MACRO.findall(listing.output))
    if "__GNUC__" not in macros or "__clang__" in macros:
        return None
    minor = macros.get("__GNUC_MINOR__", "0")
    patch = macros.get("__GNUC_PATCHLEVEL__", "0")
    return Version(f"{macros['__GNUC__']}.{minor}.{patch}")


@dataclass(frozen=True, slots=True)
class Jobs:
    """A number of jobs, and the reason in one phrase."""

    number: int
    reason: str


def jobs_for(memory: int, number: int | None = None) -> Jobs:
    """Return one job per core, or fewer if each needs ``memory`` bytes of what is available."""
    if number:
        return Jobs(number, "as asked for")

    # Cores that this process may use; os.cpu_count() ignores affinity and cpusets.
    cores = len(os.sched_getaffinity(0))
    free = available_memory()
    number = max(1, min(cores, free // memory))

    limit = "memory decides" if number < cores else "one a core"
    gib = memory / BYTES_PER_GIB
    supply = f"{gib:.0f} GiB a job, {free / BYTES_PER_GIB:.0f} available"
    return Jobs(number, f"{limit}: {cores} cores, {supply}")


def available_memory() -> int:
    """Return how many bytes of memory programs may still take."""
    meminfo = _MEMINFO.read_text("ascii")
    (kib,) = re.findall(r"^MemAvailable: +(\d+) kB", meminfo, re.MULTILINE)
    return int(kib) << 10


def network() -> str:
    """Say in a sentence whether a build here is cut off from the network.

    No wheel records it: the compiled code is the same either way, since every source and tool was
    fetched before and is known by its digest.
    """
    if namespace_words():
        return "cut off from the network, in a namespace of its own"
    return (
        "not cut off from the network: this machine lets nobody make network namespaces (Ubuntu: "
        "kernel.apparmor_restrict_unprivileged_userns)"
    )


@cache
def namespace_words() -> tuple[str, ...]:
    """Return the first words of a command without a network; () if no namespace can be made."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()

    prefix = [unshare, "--net", "--"]
    # unshare(1): who is not root makes a network namespace within a user namespace alone.
    if os.geteuid() != 0:
        prefix.insert(2, "--map-current-user")

    # Tried, since AppArmor, sysctls and containers can each forbid it.
    is_refused = attempt(*prefix, "true").trouble
    return () if is_refused else tuple(prefix)


WORK = Path("/var/tmp/patchkit")  # noqa: S108  (owner and mode are checked)
"""Below this everything is built; unlike /tmp it outlives a reboot, and is on a disk."""

_FACTS = "facts.json"
_STAGED = ".staged-"
_STALE = 86400  # seconds; nothing is staged for that long


@contextlib.contextmanager
def staging() -> Iterator[Path]:
    """Make a folder for this run, beside the work folders: a rename moves staged files there.

    An OSError of the build, for example a full disk, becomes a StorageError.
    """
    _require_private(WORK)
    for folder in WORK.glob(f"{_STAGED}*"):
        remove_stale(folder, _STALE)

    with (
        translated("the build is not finished", WORK),
        tempfile.TemporaryDirectory(
            prefix=_STAGED,
            dir=WORK,
            ignore_cleanup_errors=True,
        ) as staged,
    ):
        yield Path(staged)


def remove_stale(folder: Path, seconds: float) -> None:
    """Remove a folder that has not changed for so long, since a folder in use has no lock."""
    # Another process may just have removed it.
    with contextlib.suppress(FileNotFoundError):
        if time.time() - folder.lstat().st_mtime > seconds:
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
    """Hold a work folder for this build, with ``sources`` moved into it.

    An interrupted build with the same facts goes on; files of another build leave.
    ``free`` is how many bytes the disk must have left. Raises BusyError, StorageError.
    """
    _require_private(root)
    with locked(root) as handle:
        # The build holds the lock on if patchkit alone is killed (see make.run_build).
        os.set_inheritable(handle, True)

        stamp = root / _FACTS
        is_same = stamp.is_file() and stamp.read_text("utf-8") == facts
        if fresh or not is_same:
            stamp.unlink(missing_ok=True)  # first: without it no build goes on
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
    """Empty a folder, which may be locked, and return it; make it if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    return folder


def _require_private(folder: Path) -> None:
    """Make the folder, or check that nobody else can write into it."""
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
