"""Order a compiled wheel, patch its sources, and pack what was compiled.

A build runs in a clean environment; it has a log, and its progress is counted in steps.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from string import Template
from typing import ClassVar

from patchkit import __version__
from patchkit.apply import apply
from patchkit.digests import tree_digest
from patchkit.durable.staging import is_full
from patchkit.elf import parse_library
from patchkit.errors import BuildError, ProofError, SourceError
from patchkit.follow import Completed, Follow
from patchkit.frozen import Texts, Values, frozen
from patchkit.patching.commit import Applied
from patchkit.patching.fix import Request, State
from patchkit.patching.recipe import load_recipe
from patchkit.patching.workspace import open_workspace
from patchkit.process import attempt, run
from patchkit.records import RECIPES
from patchkit.source.archive import Progress, unpack
from patchkit.source.resolve import SourceOrigin
from patchkit.source.tree import Sandboxed
from patchkit.target import Target
from patchkit.wheel.build.machine import WORK, Toolchain, emptied
from patchkit.wheel.device.inspect import prove_exact
from patchkit.wheel.device.libraries import require_portable
from patchkit.wheel.file.library_rules import library_rules
from patchkit.wheel.file.wheelfile import FACTS, Facts, WheelName
from patchkit.wheel.file.write import EPOCH, as_text, seal_wheel

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


@frozen
class CompileOrder:
    """An order for a wheel that is compiled for one device, from verified sources.

    With ``fresh``, nothing of an interrupted build is used.
    """

    project: ClassVar[str]
    package: ClassVar[str]
    pythons: ClassVar[str] = "py3-none"

    origin: SourceOrigin
    request: Request
    toolchain: Toolchain
    fresh: bool

    @property
    def target(self) -> Target:
        return self.request.target

    @property
    def version(self) -> str:
        return self.origin.version.public

    @property
    def reduced(self) -> str:
        """Return ``.reduced`` for a part that is built for tests, else an empty text."""
        return ""

    @property
    def label(self) -> str:
        """Return the beginning of the wheel's local version."""
        return f"{self.target.cuda_tag}.{self.target.name}{self.reduced}"

    @property
    def work(self) -> Path:
        """Return the work folder in which the project is compiled."""
        part = self.reduced.replace(".", "-")
        machine = f"{self.toolchain.machine}{part}"
        return WORK / f"{self.project}-{self.version}-{self.target.name}-{machine}"

    @property
    def expected(self) -> str:
        """Return the file name of the wheel, without the digest that only the build knows."""
        wheel = f"{self.package}-{self.version}+{self.label}-{self.pythons}"
        return f"{wheel}-linux_{self.toolchain.machine}.whl"


def patch_sources(order: CompileOrder, source: Path) -> Facts:
    """Copy or unpack an order's sources to ``source``, apply the fixes, return the build's facts.

    Raises the errors of ``apply``, SourceError, StorageError.
    """
    origin = order.origin
    project = order.project
    if origin.path.is_dir():
        # The facts have a digest of the whole tree, so git's history and objects of an earlier
        # build stay where they are.
        ignored = shutil.ignore_patterns(".git", "build")
        shutil.copytree(origin.path, source, symlinks=True, ignore=ignored)
    else:
        unpack(origin.path, source)

    # The sources are patched anew: with the user's patches that the folder's ledger names, too.
    ledger = open_workspace(source, project).ledger
    patches = ledger.request.patches if ledger else ()
    request = replace(order.request, patches=patches)

    # A lacking sandbox is no obstacle: the build that follows runs the source's code anyway.
    possible = Sandboxed.IF_POSSIBLE
    recipe = load_recipe(project)
    outcome = apply(source, recipe, request, anew=True, sandboxed=possible)
    fixes = {"fixes": fix_states(outcome)}
    return order_facts(order, source) | request.patch_facts | fixes


def fix_states(outcome: Applied) -> list[str]:
    """Return the state of each fix that applies to the release, for the facts."""
    return [
        f"{verdict.fix.id}: {verdict.state.value}"
        for verdict in outcome.verdicts
        if verdict.state is not State.NOT_APPLICABLE
    ]


def order_facts(order: CompileOrder, source: Path) -> Facts:
    """Return the facts of every compiled wheel; ``source`` has the patched sources."""
    tools = order.toolchain
    return {
        "project": order.project,
        "version": order.version,
        "patchkit": __version__,
        "source": order.origin.identity,
        "tree": f"sha256:{tree_digest(source)}",
        "target": order.target.name,
        "machine": tools.machine,
        "cuda": tools.cuda,
        "compiler": tools.compiler,
    }


def fill_template(facts: Facts, name: str, **values: str) -> str:
    """Return a template of the project's recipe with its facts, and some other values, in it."""
    project = facts["project"]
    template = (load_recipe(project).home / f"{name}.template").read_text("utf-8")
    terms = facts["license"][project]
    return Template(template).substitute(facts, terms=terms, **values)


def pack_wheel(
    root: Path,
    order: CompileOrder,
    facts: Facts,
    pyproject: str,
    files: Mapping[str, bytes],
    licenses: Iterable[Path],
) -> BuiltWheel:
    """Pack ``files``, path → content, with scikit-build-core, and seal the wheel.

    Prove that its libraries are portable, and compiled for exactly the order's device. ``root`` is
    the work folder, ``pyproject`` the text of the project's pyproject.toml. Raises BuildError,
    ProofError.
    """
    project = emptied(root / "project")
    shutil.copy(RECIPES / "wheel" / "CMakeLists.txt", project)
    (project / "pyproject.toml").write_text(pyproject, "utf-8")
    for path, content in files.items():
        place = project / "files" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)

    out = emptied(root / "raw")
    # Without isolation: scikit-build-core comes with the extra ``build``.
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    command += [f"--outdir={out}", str(project)]
    # By itself a wheel gets the tag of this machine's CPU.
    platform = {"_PYTHON_HOST_PLATFORM": f"linux-{facts['machine']}"}
    run(*command, kind=BuildError, env=clean_environment(root) | platform)
    (raw,) = out.glob("*.whl")

    texts = {
        f"licenses/{path.name}": path.read_text("utf-8")
        for path in licenses
        if path.is_file()
    }
    texts[FACTS] = as_text(facts)
    # The sealed wheel's tag says which glibc its libraries need.
    tag = platform_tag(raw)
    sealed = seal_wheel(raw, emptied(root / "sealed"), tag, texts, {})

    for binary in require_portable(sealed):
        prove_exact(binary, order.target, cpu=order.toolchain.machine)
    log = root / "log.txt"  # of the compilers
    return BuiltWheel(wheel=sealed, facts=facts, log=log)
