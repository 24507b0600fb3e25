"""Say what a build needs and this machine gives: jobs, what is missing, no network, work folders.

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
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from patchkit.durable.lock import locked
from patchkit.errors import HostError, StorageError, translated
from patchkit.finding import Finding, finding
from patchkit.process import ask, attempt
from patchkit.quoting import quoted
from patchkit.recipes.vllm.build import Needs, locked_requirements
from patchkit.units import BYTES_PER_GIB
from patchkit.wheel.build.toolchain import find_cxx, missing_tools

_MEMINFO = Path("/proc/meminfo")
# With g++-13-aarch64-linux-gnu; Debian 12 and Ubuntu 22.04 end with GCC 12 for another CPU.
_HAVE_GCC_13 = "Debian 13, Ubuntu 24.04"
_ASK = """\
import importlib.util, platform, sysconfig
from pathlib import Path
answer = {
    "version": platform.python_version(),
    "header": (Path(sysconfig.get_path("include")) / "Python.h").is_file(),
    "venv": all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")),
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """``title`` says what is built."""

    title: str
    missing: tuple[Finding, ...] = ()

    def require(self) -> None:
        """Raise one error that lists all that is missing."""
        if not self.missing:
            return
        worst = max(self.missing, key=lambda lack: lack.kind.exit_code)
        raise worst.kind(
            f"this machine cannot build {self.title}:\n"
            + "\n".join(f"    {lack.what}: {lack.hint}" for lack in self.missing),
            why="the release's own build would stop there, some of them after an hour",
            hint="install all of these, then run the same command again",
        )


def plan_vllm(
    needs: Needs, version: Version, machine: str, requirements: Path | None = None
) -> BuildPlan:
    """Plan a build for the CPU ``machine``. Raises SourceError where nothing is locked."""
    locked_requirements(needs.torch, requirements)
    across = machine if machine != platform.machine() else ""
    lacks = lacked(needs, Path(sys.executable), find_cxx(machine), across)
    missing = (*lacks, *missing_tools())
    return BuildPlan(title=f"vLLM {version}", missing=missing)


def lacked(
    needs: Needs, python: Path, cxx: Path | None, across: str = ""
) -> Iterator[Finding]:
    """Yield what this machine lacks; ``cxx`` is its C++ compiler, ``across`` the other CPU."""
    lack = partial(finding, HostError, "")
    try:
        facts = ask(python, _ASK)
    except HostError as error:
        yield lack(error.what, "apt install python3")
    else:
        version = facts["version"]
        short = ".".join(version.split(".")[:2])
        if not SpecifierSet(needs.python).contains(version, prereleases=True):
            yield lack(
                f"Python {version} is outside {needs.python}",
                "install patchkit into another one",
            )
        for fact, package in (("header", "dev"), ("venv", "venv")):
            if not facts[fact]:
                part = "headers (Python.h)" if fact == "header" else "module venv"
                supply = quoted("apt", "install", f"python{short}-{package}")
                yield lack(f"{python} has no {part}", supply)
    # The first GCC with -std=c++20, where the release itself names none.
    least = needs.gcc or ("10" if needs.standard >= 20 else "")
    major = Version(least).major if least else None
    other = [f"{across.replace('_', '-')}-linux-gnu"] if across else []
    package = "-".join(["g++", *([str(major)] if major else []), *other])
    supply = quoted("apt", "install", package)
    if cxx is None:
        yield lack(f"no C++ compiler{f' for {across}' if across else ''}", supply)
    else:
        said = attempt(cxx, "-dM", "-E", "-x", "c++", "/dev/null")
        # By its macros: any program may be called g++, and clang defines __GNUC__ as well.
        macros = dict(re.findall(r"^#define (\w+) (.*)$", said.output, re.MULTILINE))
        parts = (
            macros.get(f"__GNUC{part}__", "0") for part in ("", "_MINOR", "_PATCHLEVEL")
        )
        found = Version(".".join(parts))
        # The release only asks GCC for its version.
        is_gcc = "__GNUC__" in macros and "__clang__" not in macros
        if is_gcc and least and found < Version(least):
            compiler = f"{across}-linux-gnu-g++-{major}" if across else f"g++-{major}"
            taken = f"C++{needs.standard}, GCC {least} or later"
            yield lack(
                f"{cxx} is GCC {found}; the release takes {taken}",
                f"{supply}{f' ({_HAVE_GCC_13})' if across else ''}; then CXX={compiler}",
            )
    if needs.patch and shutil.which("patch") is None:
        yield lack("no program `patch`", "apt install patch")


@dataclass(frozen=True, slots=True)
class Jobs:
    """A number of jobs, and the reason in one phrase."""

    number: int
    reason: str


def jobs_for(memory: int, asked: int | None = None) -> Jobs:
    """Return one job per core, or fewer if each needs ``memory`` bytes of what is available."""
    if asked:
        return Jobs(asked, "as asked for")
    # Cores that this process may use; os.cpu_count() ignores affinity and cpusets.
    cores = len(os.sched_getaffinity(0))
    free = available_memory()
    number = max(1, min(cores, free // memory))
    limit = "memory decides" if number < cores else "one a core"
    needs = (
        f"{memory / BYTES_PER_GIB:.0f} GiB a job, {free / BYTES_PER_GIB:.0f} available"
    )
    return Jobs(number, f"{limit}: {cores} cores, {needs}")


def available_memory() -> int:
    """Return how many bytes of memory programs may still take."""
    found = re.search(
        r"^MemAvailable: +(\d+) kB", _MEMINFO.read_text("ascii"), re.MULTILINE
    )
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(found[1]) << 10 if found else pages  # in kB, which are KiB here


def network() -> str:
    """Say in a sentence whether a build here is cut off.

    It is not part of a wheel: what is compiled is the same either way, since every source and tool
    was fetched before and is known by its digest.
    """
    if namespace_words():
        return "cut off from the network, in a namespace of its own"
    return (
        "not cut off from the network: this machine lets nobody make network namespaces (Ubuntu: "
        "kernel.apparmor_restrict_unprivileged_userns)"
    )


@cache
def namespace_words() -> tuple[str, ...]:
    """Return what begins a command that has no network; () if no namespace can be made."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()
    # unshare(1): who is not root makes a network namespace within a user namespace alone.
    rights = () if os.geteuid() == 0 else ("--map-current-user",)
    prefix = (unshare, "--net", *rights, "--")
    # Tried, since AppArmor, sysctls and containers can each forbid it.
    return () if attempt(*prefix, "true").trouble else prefix


WORK = Path("/var/tmp/patchkit")  # noqa: S108  (owner and mode are checked)
"""Below this everything is built; unlike /tmp it outlives a reboot, and is on a disk."""

_FACTS = "facts.json"
_STAGED = ".staged-"
_STALE = 86400  # seconds; nothing is staged for that long


@contextlib.contextmanager
def staging() -> Iterator[Path]:
    """Make a folder of this run, beside the work folders: what is staged in it moves by a rename.

    An OSError of the build, such as that of a full disk, becomes a StorageError.
    """
    _require_private(WORK)
    for stale in WORK.glob(f"{_STAGED}*"):
        with contextlib.suppress(
            FileNotFoundError
        ):  # another build has just removed it
            # By age, since a folder that is staged now has no lock.
            if time.time() - stale.lstat().st_mtime > _STALE:
                shutil.rmtree(stale, ignore_errors=True)
    with translated("the build is not finished", WORK):
        folder = Path(tempfile.mkdtemp(prefix=_STAGED, dir=WORK))
        try:
            yield folder
        except BaseException:
            _remove_later(
                folder
            )  # thousands of files, and somebody waits behind Ctrl-C
            raise
        shutil.rmtree(folder, ignore_errors=True)


def _remove_later(folder: Path) -> None:
    """Have a folder removed by a process that outlives this one, and no signal of a terminal."""
    words = ("rm", "-rf", "--", str(folder))
    nothing = [
        (os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)
    ]
    try:
        os.posix_spawnp(words[0], words, os.environ, file_actions=nothing, setsid=True)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def work_folder(
    root: Path, sources: Iterable[Path], facts: str, *, fresh: bool, free: int
) -> Iterator[Path]:
    """Hold a work folder for this build, with ``sources`` moved into it.

    An interrupted build with the same facts is gone on with; what is left of another one goes.
    ``free`` is how many bytes the disk must have left. Raises BusyError, StorageError.
    """
    _require_private(root)
    with locked(root) as handle:
        # The build holds the lock on if patchkit alone is killed (see make.run_build).
        os.set_inheritable(handle, True)
        known = root / _FACTS
        if fresh or not known.is_file() or known.read_text(encoding="utf-8") != facts:
            known.unlink(missing_ok=True)  # first: without it nothing is gone on with
            emptied(root)
            for source in sources:
                source.rename(root / source.name)
            known.write_text(facts, encoding="utf-8")
        if shutil.disk_usage(root).free < free:
            raise StorageError(
                f"{root}: less than {free >> 30} GiB free", hint="free some space"
            )
        yield root


def emptied(folder: Path) -> Path:
    """Empty a folder, which may be held, and return it; it is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    for entry in folder.iterdir():
        is_folder = entry.is_dir() and not entry.is_symlink()
        shutil.rmtree(entry) if is_folder else entry.unlink()
    return folder


def _require_private(folder: Path) -> None:
    """Make the folder, or check that nobody else can write into it."""
    with translated("nothing was built", folder):
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        # lstat: in /var/tmp anybody may have put a link here, to a folder of ours.
        status = folder.lstat()
    shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or shared:
        raise StorageError(
            f"{folder} belongs to somebody else, or others may write into it",
            why="builds happen at this path on every machine, so that their bytes are the same",
            hint=f"let its owner remove it, or run as its owner: {quoted('ls', '-ld', folder)}",
        )
