"""vLLM for one device, from a release to a sealed wheel.

source, patched → external sources → build environment → CUDA → compile, cut off → prove → seal

vLLM's own setup.py and CMake do the work; everything that they would fetch is brought before.
"""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packaging.version import Version
from pyproject_hooks import BuildBackendHookCaller

from patchkit import __version__
from patchkit.apply import Outcome, apply, open_workspace
from patchkit.errors import BuildError, ProofError
from patchkit.patching.fix import Request, State
from patchkit.patching.ledger import ledger_path
from patchkit.patching.plan import Plan
from patchkit.patching.recipe import load_recipe
from patchkit.proof.archs import evaluate
from patchkit.source.archive import unpack
from patchkit.source.detect import detect
from patchkit.source.external import externals
from patchkit.source.tree import SourceTree
from patchkit.wheel.build_python import BuildPython, build_python
from patchkit.wheel.build_recipe import by_option, wanted
from patchkit.wheel.compiled import compiled_sources, prove_compiled, prove_groups
from patchkit.wheel.facts import FACTS, as_text, digest_label, tree_digest
from patchkit.wheel.full_toolkit import full_toolkit
from patchkit.wheel.gates import check_gates
from patchkit.wheel.inputs import Gathered, gather
from patchkit.wheel.inspect import Binary, inspect
from patchkit.wheel.leave_out import leave_out, only_extensions
from patchkit.wheel.libraries import judge, require_loading
from patchkit.wheel.make import Progress, clean_environment, ninja_steps, run
from patchkit.wheel.needs import needs, recorded_needs, requirements_of
from patchkit.wheel.network import cut_off
from patchkit.wheel.repro import object_digests
from patchkit.wheel.requirements import environment
from patchkit.wheel.sbom import patches, vllm_sbom
from patchkit.wheel.seal import seal
from patchkit.wheel.tags import platform_tag
from patchkit.wheel.toolchain import Toolchain, check_toolchain
from patchkit.wheel.work import WORK, emptied, staging, work_folder

Report = Callable[[str], Progress]

JOB_MEMORY = 4 << 30  # bytes; the issue trackers' 3 to 5 GB, and CUTLASS's largest files take 9
_FREE = 8 << 30  # bytes; 0.25.1 for one arch leaves 2 GB, and compilers write as they go
_ABI = "--py-limited-api=cp38"  # as upstream's wheels have it

# Libraries that come with torch, with the CUDA packages that it requires, and with the driver.
_PROVIDED = (
    *("libtorch*.so", "libc10*.so", "libcuda.so.1"),
    *("libcudart.so.*", "libcublas*.so.*", "libnvrtc*.so.*", "libcu*.so.*", "libnv*.so.*"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to build: sources by their identity, for which device, with what.

    ``extensions`` builds these alone (for tests), empty: all; ``without`` are optional extensions
    that are left out; ``given`` names sources of other projects, which may lie in ``mirror``, too;
    ``python`` has torch and what else builds run; by default that is an environment made of
    ``requirements``, by default the locked ones.
    """

    source: Path
    identity: str
    version: Version
    request: Request
    toolchain: Toolchain
    python: Path | None = None
    requirements: Path | None = None
    jobs: int
    given: Mapping[str, str] = field(default_factory=dict)
    mirror: Path | None = None
    offline: bool = False
    without: frozenset[str] = frozenset()
    extensions: frozenset[str] = frozenset()
    fresh: bool = False

    @property
    def label(self) -> str:
        """The beginning of the wheel's local version."""
        target = self.request.target
        return f"{target.cuda_tag}.{target.name}{'.reduced' if self.extensions else ''}"

    @property
    def expected(self) -> str:
        """What the wheel will be called, but for what only the build can tell."""
        version = f"{self.version.public}+{self.label}"
        return f"vllm-{version}-cp38-abi3-linux_{self.toolchain.machine}.whl"

    @property
    def work(self) -> Path:
        """Where it is compiled; a reduced build has a place of its own."""
        reduced = "-reduced" if self.extensions else ""
        name = f"vllm-{self.version.public}-{self.request.target.name}"
        return WORK / f"{name}-{self.toolchain.machine}{reduced}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A sealed wheel, what is known of it, what is in it, and what was proved of it."""

    wheel: Path
    facts: Mapping[str, Any]
    objects: Mapping[str, str]
    binaries: tuple[Binary, ...]
    proofs: tuple[str, ...]
    log: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """Everything that decides the wheel, on disk and as facts."""

    facts: Mapping[str, Any]
    texts: Mapping[str, str]
    gathered: Gathered
    python: BuildPython


def build_vllm(order: Order, report: Report) -> Built:
    """Patch, compile, prove and pack; ``report(task)`` gives each long task its progress.

    Raises BuildError, DriftError, HostError, ProofError, StorageError, UsageError.
    """
    with staging() as staged:
        seen = clean_environment(staged, _NAMESPACE)
        target = order.request.target
        arch = target.gencode_flags(target.arch_list(order.request.arch))
        check_toolchain(order.toolchain, arch, staged, seen)
        prepared = _prepare(order, staged, report)
        full_toolkit(order.toolchain, prepared.python.prefix, staged / "cuda")
        brought = [staged / name for name in ("source", "external", "cuda")]
        with work_folder(
            order.work, brought, as_text(prepared.facts), fresh=order.fresh, free=_FREE
        ) as root:
            return _build(root, order, prepared, report("compiling"))


_NAMESPACE = "patchkit-vllm"


def _prepare(order: Order, staged: Path, report: Report) -> _Prepared:
    source = staged / "source"
    _place(order.source, source)
    torch = _torch(order, detect(source))
    python = _python(order, torch, report)
    outcome = apply(source, load_recipe("vllm"), order.request)
    workspace = open_workspace(source)
    ledger = ledger_path(workspace.state)
    texts = {"patchkit.ledger.json": ledger.read_text("utf-8")} if ledger.is_file() else {}
    plan = Plan(
        request=order.request,
        stock=workspace.tree,
        patched=workspace.tree,
        verdicts=outcome.verdicts,
    )
    applied = patches(plan.steps())
    reduced = _reduced(order, detect(source))
    _check_still_patched(detect(source), order, outcome)
    gathered = _gathered(order, reduced, staged)
    facts = _facts(order, source, outcome, gathered, python)
    texts[FACTS] = as_text(facts)
    texts["sboms/patchkit.cdx.json"] = as_text(vllm_sbom(facts, applied))
    return _Prepared(facts=facts, texts=texts, gathered=gathered, python=python)


def _check_still_patched(tree: SourceTree, order: Order, outcome: Outcome) -> None:
    """Raise ProofError unless every fix is still seen, after extensions were left out."""
    for fix in (each.fix for each in outcome.verdicts if each.state is State.APPLIED):
        now = fix.look(tree, order.request)
        if now.state is not State.APPLIED:
            raise ProofError(
                f"{fix.id} is undone: {now.reason}",
                why="leaving extensions out changed the same lines",
                hint="please report this with the version",
            )


def _gathered(order: Order, tree: SourceTree, staged: Path) -> Gathered:
    """The sources of other projects, told by the paths where they will lie."""
    release = load_recipe("vllm").knows(order.version)
    found = gather(
        wanted(externals(tree), order.version, release=release),
        order.version,
        given=order.given,
        dest=staged / "external",
        mirror=order.mirror,
        offline=order.offline,
    )

    def moved(paths: Mapping[str, str]) -> dict[str, str]:
        return {name: path.replace(str(staged), str(order.work), 1) for name, path in paths.items()}

    return replace(found, environment=moved(found.environment), defines=moved(found.defines))


def check_machine(version: Version, python: Path | None, cuda: str) -> list[str]:
    """What a release of that version leaves out here; raises HostError for all that is missing."""
    name = os.environ.get("CXX", "g++")
    found = shutil.which(name)
    return check_gates(
        recorded_needs(version),
        release=str(version),
        python=python or Path(sys.executable),
        cxx=Path(found) if found else None,
        cuda=cuda,
    )


def _torch(order: Order, tree: SourceTree) -> str:
    """The torch that a tree takes; one that is no release says by itself what else it takes."""
    known = load_recipe("vllm").knows(order.version)
    taken = needs(tree, release=known)
    if not known:
        check_gates(
            taken,
            release=str(order.version),
            python=order.python or Path(sys.executable),
            cxx=order.toolchain.cxx,
            cuda=order.toolchain.cuda,
        )
    return taken.torch


def _python(order: Order, torch: str, report: Report) -> BuildPython:
    cuda = order.request.target.cuda
    if order.python is not None:
        return build_python(order.python, torch, cuda)
    locked = environment(
        requirements_of(torch, order.requirements),
        WORK,
        offline=order.offline,
        progress=report("build environment"),
    )
    return build_python(locked.python, torch, cuda, locked.digest)


def _place(origin: Path, dest: Path) -> None:
    if origin.is_dir():
        aside = shutil.ignore_patterns(".git", "build", ".deps", "*.egg-info", ".patchkit")
        shutil.copytree(origin, dest, symlinks=True, ignore=aside)
    else:
        unpack(origin, dest)


def _reduced(order: Order, tree: SourceTree) -> SourceTree:
    """The tree without what is left out, on disk as well."""
    reduced = leave_out(tree, by_option(order.without))
    if order.extensions:
        reduced = only_extensions(reduced, order.extensions)
    for path, text in reduced.overlay.items():
        (tree.root / path).write_text(text, encoding="utf-8")
    return reduced


def _facts(
    order: Order, source: Path, outcome: Outcome, gathered: Gathered, python: BuildPython
) -> dict[str, Any]:
    recipe, target = load_recipe("vllm"), order.request.target
    facts: dict[str, Any] = {
        "project": "vllm",
        "made": "build",
        "version": order.version.public,
        "patchkit": __version__,
        "recipe": recipe.digest,
        "source": order.identity,
        "tree": f"sha256:{tree_digest(source)}",
        "fixes": [
            f"{v.fix.id}: {v.state.value}"
            for v in outcome.verdicts
            if v.state is not State.NOT_APPLICABLE
        ],
        "target": target.name,
        "archs": recipe.build.value_for(order.request),
        "machine": order.toolchain.machine,
        "cuda": order.toolchain.cuda,
        "compiler": order.toolchain.compiler,
        "environment": dict(python.facts),
        "externals": gathered.facts,
        "without": sorted(order.without),
        "extensions": sorted(order.extensions) or "all",
        "license": {"vllm": "Apache-2.0"},
    }
    label = f"{order.label}.{digest_label(facts)}"
    return facts | {"wheel": f"{order.version.public}+{label}"}


def _build(root: Path, order: Order, prepared: _Prepared, progress: Progress) -> Built:
    raw = _compile(root, order, prepared, progress)
    prepared.python.check("after the build")
    binaries = inspect(raw)
    proofs = _prove(root, order, raw, binaries)
    sealed = seal(raw, emptied(root / "sealed"), platform_tag(raw, _PROVIDED), prepared.texts)
    return Built(
        wheel=sealed,
        facts=prepared.facts,
        objects=object_digests(root / "source" / "build"),
        binaries=binaries,
        proofs=proofs,
        log=root / "log.txt",
    )


def _prove(root: Path, order: Order, raw: Path, binaries: tuple[Binary, ...]) -> tuple[str, ...]:
    target = order.request.target
    sources = compiled_sources(root / "source" / "build", root / "source")
    if order.extensions:
        built = tuple(each for each in sources if each.library in order.extensions)
    else:
        built = sources
        require_loading(judge(raw, binaries, target, order.version), target, order.version)
    archs = target.arch_list(order.request.arch)
    groups = evaluate(detect(root / "source"), target, archs, order.toolchain.cuda)
    return (prove_groups(groups, sources), *prove_compiled(built, binaries, target))


def _compile(root: Path, order: Order, prepared: _Prepared, progress: Progress) -> Path:
    out = emptied(root / "raw")
    env = build_variables(root, order, prepared)
    source = root / "source"

    def runner(
        cmd: Sequence[str],
        cwd: str | None = None,
        extra_environ: Mapping[str, str] | None = None,
    ) -> None:
        full = {**env, **(extra_environ or {})}
        run(cut_off(list(cmd)), root, full, ninja_steps, progress, folder=Path(cwd or source))

    # The hook of PEP 517 itself: build's own front end would hide our errors behind its.
    backend = tomllib.loads((source / "pyproject.toml").read_text("utf-8"))["build-system"]
    BuildBackendHookCaller(
        str(source),
        backend["build-backend"],
        backend.get("backend-path"),
        runner=runner,
        python_executable=str(prepared.python.python),
    ).build_wheel(str(out), {"--build-option": [_ABI]})
    wheels = sorted(out.glob("*.whl"))
    if len(wheels) != 1:
        raise BuildError(f"{out} holds {len(wheels)} wheels instead of one")
    return wheels[0]


def build_variables(root: Path, order: Order, prepared: _Prepared) -> dict[str, str]:
    """What vLLM's setup.py, CMake and the compilers see."""
    clean = clean_environment(root, _NAMESPACE)
    cuda, tools = root / "cuda", prepared.python.python.parent
    variable, defines = load_recipe("vllm").build, prepared.gathered.defines
    return clean | {
        "PATH": f"{tools}:{cuda / 'bin'}:{clean['PATH']}",
        "CUDA_HOME": str(cuda),
        "CXX": str(order.toolchain.cxx),
        "CUDAHOSTCXX": str(order.toolchain.cxx),
        variable.variable: variable.value_for(order.request),
        "VLLM_TARGET_DEVICE": "cuda",
        "VLLM_VERSION_OVERRIDE": prepared.facts["wheel"],
        "MAX_JOBS": str(order.jobs),
        "NVCC_THREADS": "1",
        "CMAKE_ARGS": " ".join(f"-D{name}={path}" for name, path in defines.items()),
        "CMAKE_EXPORT_COMPILE_COMMANDS": "ON",
        "FETCHCONTENT_BASE_DIR": str(root / "deps"),
        "LDFLAGS": "-Wl,-s -Wl,--build-id=sha1",
        # The Rust front end is optional, and its crates are nowhere in the release.
        "CARGO": "/nonexistent/cargo",
        "RUSTC": "/nonexistent/rustc",
        "PIP_NO_INDEX": "1",
        # A server of a compiler cache is out of reach from a namespace without a network.
        "VLLM_DISABLE_SCCACHE": "1",
        **prepared.gathered.environment,
    }
