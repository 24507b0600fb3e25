"""Run a build: a clean environment, a log, and progress counted in steps."""

import json
import os
import re
import shutil
import sys
from fnmatch import fnmatchcase
from pathlib import Path

from patchkit.durable.staging import is_full
from patchkit.elf import parse_library
from patchkit.errors import BuildError, ProofError, SourceError
from patchkit.follow import Completed, Follow
from patchkit.frozen import Texts, Values, frozen
from patchkit.process import attempt, run
from patchkit.source.archive import Progress
from patchkit.wheel.file.library_rules import library_rules
from patchkit.wheel.file.wheelfile import Facts, WheelName
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
_PLANNED = "planned"  # a file that exists once NCCL's sources are generated
_COMPILING = r"^Compiling\s"
_NINJA = r" *\[(\d+)/(\d+)\] "
_FAILURE = re.compile(
    r"error|fatal|\*\*\* \[|undefined reference|No space left|Killed", re.IGNORECASE
)
_OUT_OF_MEMORY = r"Killed|terminated by signal 9"
# The folder of Debian and Ubuntu in which gcc, g++ and others are links to ccache.
_CCACHE_COMPILERS = "/usr/lib/ccache"


@frozen
class BuiltWheel:
    """A sealed wheel, with its facts and proofs.

    ``circumstances`` say how the wheel was built, and are not recorded in it. ``notes`` are what a
    user has to know who installs the wheel.
    """

    wheel: Path
    facts: Facts
    log: Path
    proofs: Texts = ()
    circumstances: Texts = ()
    notes: Texts = ()


def clean_environment(root: Path) -> dict[str, str]:
    """Return the environment of a build below ``root``: fixed locale, time and hash seed, no flags.

    NCCL's makefiles get compilers by their paths, so vLLM's builds alone use a compiler cache.
    """
    variables = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    if Path(_CCACHE_COMPILERS).is_dir():
        # First in PATH, so that g++ is ccache, which calls the real compiler.
        path = variables.get("PATH", os.defpath)
        variables["PATH"] = f"{_CCACHE_COMPILERS}:{path}"
    return variables | {
        # Messages that are searched for, and the order of sorted files, depend on the locale.
        "LC_ALL": "C",
        "TZ": "UTC",
        "SOURCE_DATE_EPOCH": str(EPOCH),
        "PYTHONHASHSEED": "0",
        # Without a seed nvcc names a module that exports nothing after its process number.
        "NVCC_APPEND_FLAGS": "-frandom-seed=patchkit",
        # Builds ask git for their commit; git must not find a repository above the work folder.
        "GIT_CEILING_DIRECTORIES": str(root.parent),
        # A cache apart from other builds: ccache 4.7 ignores the seed.
        "CCACHE_NAMESPACE": "patchkit-vllm",
    }


def objects_to_make(
    root: Path,
    env: Values,
    functions: str,
) -> int:
    """Return how many objects are still to compile, as a dry run of make says; 0 if make fails.

    The dry run also generates NCCL's sources, so it needs the build's own environment ``env``. make
    takes the folder of generated sources as complete as soon as the folder exists. Therefore the
    folder of an interrupted run is removed first. ``functions`` is NCCL's ONLY_FUNCS.
    """
    planned = root / _PLANNED
    build = root / "build"
    if not planned.exists():
        shutil.rmtree(build, ignore_errors=True)

    command = ["make", "-n", "-C", str(root / "source" / "src"), "lib"]
    command += [f"BUILDDIR={build}", f"ONLY_FUNCS={functions}"]
    command += ["CUDA_HOME=/nonexistent", "NVCC_GENCODE="]
    done = attempt(*command, env=env, umask=0o022, timeout=None)

    # The generator writes rules.mk last, so a folder without it is incomplete; make does not check.
    folders = {path.parent for path in build.rglob("*.cu")}
    if not done.trouble and all((path / "rules.mk").is_file() for path in folders):
        planned.touch()
    return done.output.count("Compiling")


def run_build(
    command: list[str],
    root: Path,
    env: Values,
    progress: Progress,
    *,
    objects: int | None = None,
) -> None:
    """Run a build in the folder ``root``, and write its output to ``root/log.txt``.

    ``objects`` is how many objects NCCL's make will compile, 0 if unknown; None for a build with
    ninja, which counts its steps itself. Raises BuildError with the lines of the output that tell
    the reason, HostError if the command does not start.
    """
    log = root / "log.txt"
    done = 0
    total = max(objects or 0, 1)
    with (
        # Buffered by line, so that the log of a killed build is complete.
        log.open("w", buffering=1, encoding="utf-8", errors="replace") as sink,
        # The build inherits the lock of the work folder: if patchkit alone is killed, nobody else
        # builds there until the build has ended, too.
        Follow(
            *command,
            env=env,
            cwd=root,
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
    """Return (steps done, all steps) if a line of the output counts a step, else None."""
    if objects is None:
        step = re.match(_NINJA, line)  # [12/105]
        return (int(step[1]), int(step[2])) if step else None
    if re.match(_COMPILING, line):
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
    if re.search(_OUT_OF_MEMORY, ended.output):
        error.why = "the system ran out of memory, and ended a compiler"
        error.hint = f"use fewer --jobs; {error.hint}"
    return error


def drop_partial(build: Path) -> None:
    """Remove unfinished objects and libraries of an interrupted build: make would use them.

    Assembler and linker write the ELF header last; an unfinished file cannot be parsed.
    """
    for path in [*build.rglob("*.o"), *build.rglob("*.so*")]:
        if path.is_symlink():  # libnccl.so and libnccl.so.2 lead to the file itself
            continue

        try:
            with path.open("rb") as stream:
                parse_library(stream, str(path))
        except SourceError:
            path.unlink()


def platform_tag(wheel: Path) -> str:
    """Return the oldest manylinux policy that a wheel meets, according to auditwheel.

    Raises ProofError if the wheel meets no policy, for example since it needs a library that no
    package brings, or has a library for another CPU.
    """
    provided = library_rules().provided.get(WheelName(wheel.name).project, ())
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
    # overall_tag also counts libraries of other packages; sym_tag judges symbol versions only.
    tag: str = report["sym_tag" if provided and not foreign else "overall_tag"]
    if not tag.startswith("manylinux"):
        needs = ", ".join(foreign) or "symbols of an unknown libc"
        raise ProofError(
            f"{wheel.name} keeps no manylinux policy: it would get the tag {tag}",
            why=f"it needs {needs}",
            hint="build on a released distribution, without libraries of your own on the link line",
        )
    return tag
