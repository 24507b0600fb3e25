"""Run a build: a clean environment, a log, and progress counted in steps."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path

from patchkit.durable.staging import is_full
from patchkit.elf import parse_library
from patchkit.errors import BuildError, ProofError, SourceError
from patchkit.follow import Completed, Follow
from patchkit.frozen import frozen
from patchkit.process import attempt, run
from patchkit.source.archive import Progress
from patchkit.wheel.build.toolchain import Toolchain
from patchkit.wheel.device.inspect import Binary
from patchkit.wheel.file.wheelfile import Facts
from patchkit.wheel.file.write import EPOCH

# The only variables of the caller that a build sees: they find programs and caches. Flags and paths
# of compilers (CXXFLAGS, CPATH, NVCC_APPEND_FLAGS …) would change the result without a trace.
_PASSED_ON = (
    "PATH",
    "HOME",
    "TMPDIR",
    "VIRTUAL_ENV",
    "CCACHE_DIR",
    "CCACHE_CONFIGPATH",
    "CCACHE_DISABLE",
)
_PLANNED = "planned"  # a file that is there once the sources are generated
_COMPILING = re.compile(r"^Compiling\s")
_NINJA = re.compile(r"^\[(\d+)/(\d+)\] ")
_FAILURE = re.compile(
    r"error|fatal|\*\*\* \[|undefined reference|No space left|Killed", re.IGNORECASE
)
_OUT_OF_MEMORY = re.compile(r"Killed|terminated by signal 9")
# Debian's and Ubuntu's folder of compilers by other names.
_CCACHE_COMPILERS = "/usr/lib/ccache"


@frozen
class BuiltWheel:
    """A sealed wheel, with its facts, libraries and proofs.

    ``circumstances`` say how it was built; nothing of them is in the wheel. Whoever installs the
    wheel has to know the ``notes``.
    """

    wheel: Path
    facts: Facts
    binaries: tuple[Binary, ...]
    log: Path
    proofs: tuple[str, ...] = ()
    circumstances: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def clean_environment(root: Path, namespace: str) -> dict[str, str]:
    """Return the environment of a build below ``root``: fixed locale, time and hash seed, no flags.

    ``namespace`` separates this kind of build from others in a compiler cache.
    """
    variables = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    if Path(_CCACHE_COMPILERS).is_dir():
        # In front: there g++ is ccache, which calls the real one.
        path = variables.get("PATH", os.defpath)
        variables["PATH"] = f"{_CCACHE_COMPILERS}:{path}"
    return variables | {
        # Messages that are searched for, and the order of sorted files, depend on the locale.
        "LC_ALL": "C",
        "TZ": "UTC",
        "SOURCE_DATE_EPOCH": str(EPOCH),
        "PYTHONHASHSEED": "0",
        # Without a seed nvcc names modules that export nothing after its process number.
        "NVCC_APPEND_FLAGS": "-frandom-seed=patchkit",
        # Builds ask git which commit they are; a repository around the work folder is not meant.
        "GIT_CEILING_DIRECTORIES": str(root.parent),
        # ccache 4.7 takes an object of -c for one of -dc and does not see the seed, so nothing is
        # shared with other builds.
        "CCACHE_NAMESPACE": namespace,
    }


def nccl_environment(root: Path, toolchain: Toolchain) -> dict[str, str]:
    """Return the environment of NCCL's build; the linker strips its libraries."""
    return clean_environment(root, "patchkit-nccl-seeded") | {
        # Without kernels, because their sources could not be generated, it would link all the same.
        "LDFLAGS": "-Wl,-s -Wl,--build-id=sha1 -Wl,-z,defs",
        "_PYTHON_HOST_PLATFORM": f"linux-{toolchain.machine}",
    }


def objects_to_make(
    root: Path,
    env: dict[str, str],
    functions: str,
) -> int:
    """Count the objects that are still to compile by make's own dry run; 0 if that fails.

    The dry run writes NCCL's generated sources, so it needs the build's own environment. make takes
    their folder for done as soon as it is there, whatever became of the generator; so sources of an
    interrupted run are generated anew.
    """
    planned = root / _PLANNED
    build = root / "build"
    if not planned.exists():
        shutil.rmtree(build, ignore_errors=True)

    command = ["make", "-n", "-C", str(root / "source" / "src"), "lib"]
    command += [f"BUILDDIR={build}", f"ONLY_FUNCS={functions}"]
    command += ["CUDA_HOME=/nonexistent", "NVCC_GENCODE="]
    done = attempt(*command, env=env, umask=0o022, timeout=None)

    # make does without the list that each folder of generated sources has once it is whole.
    folders = {path.parent for path in build.rglob("*.cu")}
    if not done.trouble and all((path / "rules.mk").is_file() for path in folders):
        planned.touch()
    return done.output.count("Compiling")


def run_build(
    command: list[str],
    root: Path,
    env: dict[str, str],
    progress: Progress,
    *,
    objects: int | None = None,
    folder: Path | None = None,
) -> None:
    """Run a build in ``folder`` (by default ``root``), its output in ``root/log.txt``.

    ``objects`` is how many NCCL's make compiles, 0 if it did not say; else ninja counts. Raises
    BuildError with the lines that tell why, HostError if the command does not start.
    """
    log = root / "log.txt"
    done = 0
    total = max(objects or 0, 1)
    with (
        # By line, so that the log of a killed build has all that it said.
        log.open("w", buffering=1, encoding="utf-8", errors="replace") as sink,
        # The build inherits the lock of the work folder: if patchkit alone is killed, nobody else
        # builds there until the build has ended, too.
        Follow(
            *command,
            env=env,
            cwd=folder or root,
            umask=0o022,
            inherit=True,
        ) as running,
    ):
        for line in running:
            sink.write(line)
            if step := _read_step(line, done, objects):
                done, total = step
                progress(done, total)

    ended = running.done
    if ended.status is None:
        raise ended.error()
    if ended.status:
        raise _build_error(ended, log)
    progress(total, total)


def _read_step(line: str, done: int, objects: int | None) -> tuple[int, int] | None:
    """Return how many steps are done and how many there are, if a line of output tells it."""
    if objects is None:
        step = _NINJA.match(line)  # [12/105]
        return (int(step[1]), int(step[2])) if step else None
    if _COMPILING.match(line):
        return min(done + 1, objects), max(objects, 1)
    return None


def _build_error(ended: Completed, log: Path) -> BuildError:
    lines = ended.output.splitlines()
    failures = list(filter(_FAILURE.search, lines))
    telling = failures[:8] or lines[-8:]
    error = BuildError(
        "\n    ".join([f"the build ended with {ended.status}", *telling]),
        hint=f"the whole log is {log}; run again to go on from here, with --fresh to begin anew",
    )
    # Not every tool says that the disk is full.
    if is_full(log):
        error.why = f"the disk of {log.parent} is full"
    if _OUT_OF_MEMORY.search(ended.output):
        error.why = "the system ran out of memory, and ended a compiler"
        error.hint = f"use fewer --jobs; {error.hint}"
    return error


def drop_partial(build: Path) -> None:
    """Remove objects and libraries that were left unfinished: make would take them for done.

    Assembler and linker write the ELF header last; before that it names no section headers.
    """
    for path in [*build.rglob("*.o"), *build.rglob("*.so*")]:
        if path.is_symlink():  # libnccl.so and libnccl.so.2 lead to the file itself
            continue

        try:
            with path.open("rb") as stream:
                parse_library(stream, str(path))
        except SourceError:
            path.unlink()


def platform_tag(wheel: Path, provided: Collection[str] = ()) -> str:
    """Return the oldest manylinux policy that a wheel keeps, as auditwheel finds it.

    ``provided`` are patterns of libraries that come with packages it requires, such as
    ``libtorch*.so``. Raises ProofError if it keeps none: a library that nothing brings, or another
    CPU's.
    """
    done = run(
        sys.executable,
        "-m",
        "auditwheel",
        "show",
        "--json",
        wheel,
        kind=ProofError,
        why="its library is not for the CPU of its file name, or is no ELF file",
        timeout=None,
    )
    report = json.loads(done.output)

    foreign = [
        name
        for name in report["external_libs"]
        if not any(fnmatchcase(name, pattern) for pattern in provided)
    ]
    # overall_tag also falls for libraries of other packages; sym_tag looks at symbols alone.
    tag: str = report["sym_tag" if provided and not foreign else "overall_tag"]
    if not tag.startswith("manylinux"):
        needs = ", ".join(foreign) or "symbols of an unknown libc"
        raise ProofError(
            f"{wheel.name} keeps no manylinux policy: it would get the tag {tag}",
            why=f"it needs {needs}",
            hint="build on a released distribution, without libraries of your own on the link line",
        )
    return tag
