"""Build vLLM for one device, from a release to a sealed wheel.

order → prepare → CUDA → backend, cut off → prove → assemble PTX → seal

vLLM's own setup.py and CMake do the work; everything that they would fetch is brought before.
"""

from __future__ import annotations

import contextlib
import os
import threading
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from patchkit.errors import BuildError, ProofError, SourceError
from patchkit.patching.recipe import load_recipe
from patchkit.recipes.vllm.archs import evaluate
from patchkit.recipes.vllm.leave_out import asked_targets
from patchkit.records import RecordError, record
from patchkit.source.archive import Progress
from patchkit.source.detect import detect
from patchkit.source.tree import Sandboxed
from patchkit.units import BYTES_PER_GIB
from patchkit.wheel.build.machine import (
    emptied,
    namespace_words,
    network,
    staging,
    work_folder,
)
from patchkit.wheel.build.make import (
    BuiltWheel,
    clean_environment,
    platform_tag,
    run_build,
)
from patchkit.wheel.build.toolchain import check_toolchain
from patchkit.wheel.build.torch_toolkit import (
    cross_toolkit,
    cross_variables,
    full_toolkit,
)
from patchkit.wheel.device.inspect import inspect_wheel
from patchkit.wheel.device.libraries import (
    check_wheel,
    compiled_sources,
    judge_libraries,
    prove_compiled,
    prove_groups,
    require_loading,
)
from patchkit.wheel.file.metadata import read_metadata
from patchkit.wheel.file.sbom import as_text, wheel_sbom
from patchkit.wheel.file.torch import installed_torch, require_torch
from patchkit.wheel.file.wheelfile import FACTS, WheelFile
from patchkit.wheel.file.write import seal_wheel
from patchkit.wheel.native.assemble import Assembler
from patchkit.wheel.native.make import make_native
from patchkit.wheel.vllm.native_parts import native_parts
from patchkit.wheel.vllm.prepare import Prepared, Report, prepare
from patchkit.wheel.vllm.source import VllmOrder
from patchkit.wheel.vllm.upstream_parts import (
    fetch_upstream,
    prove_parts,
    upstream_parts,
)

# The issue trackers' 3 to 5 GB, and CUTLASS's largest files take 9.
JOB_MEMORY = 4 * BYTES_PER_GIB
_FREE = (
    8 * BYTES_PER_GIB
)  # 0.25.1 for one arch leaves 2 GB, and compilers write as they go

# Libraries that come with torch, with the CUDA packages that it requires, and with the driver.
_PROVIDED = (
    *("libtorch*.so", "libc10*.so", "libcuda.so.1"),
    *(
        "libcudart.so.*",
        "libcublas*.so.*",
        "libnvrtc*.so.*",
        "libcu*.so.*",
        "libnv*.so.*",
    ),
)


def build_vllm(order: VllmOrder, report: Report) -> BuiltWheel:
    """Patch, compile, prove and pack; ``report(task)`` gives each long task its progress.

    Raises BuildError, DriftError, HostError, ProofError, StorageError, UsageError.
    """
    with staging() as staged:
        target = order.request.target
        arch = target.gencode_flags(target.arch_list(order.request.arch))
        check_toolchain(
            order.toolchain, arch, staged, clean_environment(staged, NAMESPACE)
        )
        assembler = Assembler(offline=order.offline)
        with _assembling_ahead(order, staged / "ahead", assembler, report) as ahead:
            prepared = prepare(order, staged, report)
            cuda = staged / "cuda"
            if order.across:
                used = order.work / cuda.name
                cross_toolkit(
                    order.toolchain, prepared.site, prepared.python, cuda, root=used
                )
            else:
                full_toolkit(order.toolchain, prepared.site, cuda)
            brought = [staged / name for name in ("source", "external", "cuda")]
            with work_folder(
                order.work,
                brought,
                as_text(prepared.facts),
                fresh=order.fresh,
                free=_FREE,
            ) as root:
                variables = build_variables(root, order, prepared)
                raw = compile_wheel(
                    root, prepared.python, variables, report("compiling")
                )
                ahead()
                return _make_vllm_wheel(root, raw, order, prepared, assembler, report)


def _make_vllm_wheel(
    root: Path,
    raw: Path,
    order: VllmOrder,
    prepared: Prepared,
    assembler: Assembler,
    report: Report,
) -> BuiltWheel:
    target = order.request.target
    circumstances = (network(),)
    note(root, *circumstances)
    # The torch that was compiled against is a fact of the wheel: it must still be that one.
    require_torch(
        installed_torch(prepared.python), order.torch, target.cuda, "after the build"
    )
    with WheelFile(raw) as wheel:
        binaries = inspect_wheel(wheel)
        judged = judge_libraries(binaries, target, order.version)
        if not order.extensions:
            require_loading(judged, target, order.version)
        sources = compiled_sources(root / "source" / "build", root / "source")
        tree = detect(
            root / "source", sandboxed=Sandboxed.IF_POSSIBLE
        )  # it has been built
        archs = target.arch_list(order.request.arch)
        groups, asked = (
            evaluate(tree, target, archs, order.toolchain.cuda),
            asked_targets(tree),
        )
        built = [source for source in sources if source.library in asked]
        proofs = (
            prove_groups(groups, sources),
            *prove_compiled(built, binaries, target),
        )
        proofs += tuple(
            prove_parts(wheel, root / "external" / each.known.option, each.known.option)
            for each in prepared.gathered.installed
            if not order.extensions or order.extensions & set(each.known.targets)
        )
        # Also of what was compiled: upstream's CMake asks for PTX alone here and there.
        parts = wheel, binaries, judged, target, emptied(root / "native"), assembler
        native = native_parts(
            *parts, _in_mb(report("assembling PTX, in MB")), keep=True
        )
    if count := sum(len(library.ptx) for library in native.libraries):
        proofs += (
            f"{count} fat binaries are assembled from PTX, by ptxas {assembler.version}",
        )
    left = (why for library in native.libraries for why in library.refused)
    facts = {**prepared.facts, "native": native.facts}
    sbom = as_text(wheel_sbom(facts, prepared.steps))
    texts = {**prepared.texts, FACTS: as_text(facts), "sboms/patchkit.cdx.json": sbom}
    libraries = {
        each.name: each.path.read_bytes() for each in native.libraries if each.path
    }
    tag = platform_tag(raw, _PROVIDED)
    sealed = seal_wheel(raw, emptied(root / "sealed"), tag, texts, libraries)
    with WheelFile(sealed) as wheel:
        metadata, binaries = read_metadata(wheel), inspect_wheel(wheel)
    # As `patchkit inspect` would find it: an RPATH, a library of torch's …
    if found := list(check_wheel(metadata, binaries)):
        raise ProofError(
            f"{sealed.name} would not be fit for other machines\n"
            + "\n".join(f"    {fault.where} {fault.what}" for fault in found),
            why="the toolchain added it, or upstream's build changed",
            hint="please report this with the version",
        )
    return BuiltWheel(
        wheel=sealed,
        facts=facts,
        binaries=binaries,
        proofs=proofs,
        circumstances=circumstances,
        notes=tuple(f"{why}; it is compiled at first use" for why in left),
        log=root / "log.txt",
    )


@contextlib.contextmanager
def _assembling_ahead(
    order: VllmOrder, folder: Path, assembler: Assembler, report: Report
) -> Iterator[Callable[[], object]]:
    """Assemble what comes from upstream's wheel beside the block, for the cache alone.

    It takes what time the compilers leave; the result waits for it. What it cannot assemble is told
    when the wheel is made.
    """
    if order.extensions or not order.taken:
        yield lambda: None
        return
    release = order.version, order.toolchain.machine
    fetch_upstream(*release, order.offline, _in_mb(report("upstream's wheel, in MB")))
    target, bar = (
        order.request.target,
        _in_mb(report("assembling upstream's PTX, in MB")),
    )

    def assemble() -> None:
        os.setpriority(
            os.PRIO_PROCESS, threading.get_native_id(), 10
        )  # for its children, too
        for known in order.taken:
            upstream_parts(known, *release, target, True, None).fill(
                folder / known.option
            )
        files = {str(path): path for path in sorted(folder.rglob("*.so"))}
        make_native(files, target, folder, assembler, bar)

    with ThreadPoolExecutor(1) as pool:
        assembling = pool.submit(assemble)
        try:
            yield assembling.exception
        except BaseException:
            assembler.stopped.set()
            raise


def _in_mb(bar: Progress) -> Progress:
    return lambda done, total: bar(done // 10**6, total // 10**6)


NAMESPACE = "patchkit-vllm"
"""Keeps what a compiler cache holds of vLLM apart from what it holds of other builds."""

_ABI = "--py-limited-api=cp38"  # as upstream's wheels have it


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSystem:
    """The table [build-system] of a pyproject.toml, as PEP 517 and 518 have it."""

    name: str = field(metadata={"key": "build-backend"})
    folders: tuple[str, ...] | None = field(
        default=None, metadata={"key": "backend-path"}
    )
    requires: tuple[str, ...] = ()


def read_build_system(pyproject: Path) -> BuildSystem:
    """Return which backend builds a source. Raises SourceError."""
    try:
        project = tomllib.loads(pyproject.read_text(encoding="utf-8"))
        return record(BuildSystem, project.get("build-system", {}))
    except RecordError as error:
        what = f"[build-system]: {error}"
    except ValueError as error:  # no TOML, or no UTF-8
        what = f"is not TOML: {error}"
    except FileNotFoundError:
        what = "is missing"
    raise SourceError(
        f"{pyproject}: {what}",
        why="the source was edited, or is damaged",
        hint="build from an unchanged release",
    )


def compile_wheel(
    root: Path, python: Path, variables: Mapping[str, str], progress: Progress
) -> Path:
    """Compile the wheel, and return it as setup.py leaves it in ``root/raw``.

    The output is in ``root/log.txt``. Raises BuildError with the lines that tell why, HostError,
    SourceError.
    """
    source, out = root / "source", emptied(root / "raw")

    def runner(
        cmd: Sequence[str],
        cwd: str | None = None,
        extra_environ: Mapping[str, str] | None = None,
    ) -> None:
        full = {**variables, **(extra_environ or {})}
        words = [*namespace_words(), *cmd]
        run_build(words, root, full, progress, folder=Path(cwd or source))

    from pyproject_hooks import (
        BuildBackendHookCaller,
    )  # comes with the extra for builds

    # The hook of PEP 517 itself: build's own front end would hide our errors behind its.
    backend = read_build_system(source / "pyproject.toml")
    hooks = BuildBackendHookCaller(
        str(source),
        backend.name,
        backend.folders,
        runner=runner,
        python_executable=str(python),
    )
    # Warnings of the backend belong in the log, not on the terminal.
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        hooks.build_wheel(str(out), {"--build-option": [_ABI]})
    note(root, *(f"{each.filename}:{each.lineno}: {each.message}" for each in warned))
    wheels = sorted(out.glob("*.whl"))
    if len(wheels) != 1:
        raise BuildError(f"{out} holds {len(wheels)} wheels instead of one")
    return wheels[0]


def note(root: Path, *lines: str) -> None:
    """Add lines to the log of a build."""
    with (root / "log.txt").open("a", encoding="utf-8") as log:
        log.writelines(f"{line}\n" for line in lines)


def build_variables(root: Path, order: VllmOrder, prepared: Prepared) -> dict[str, str]:
    """Return the environment of vLLM's setup.py, CMake and the compilers."""
    clean = clean_environment(root, NAMESPACE)
    cuda, tools = root / "cuda", prepared.python.parent
    variable, defines = load_recipe("vllm").build, prepared.gathered.defines
    across = cross_variables(order.toolchain, cuda) if order.across else {}
    return {
        **clean,
        **across,
        "PATH": f"{tools}:{cuda / 'bin'}:{clean['PATH']}",
        "CUDA_HOME": str(cuda),
        "CXX": str(order.toolchain.cxx),
        "CUDAHOSTCXX": str(
            order.toolchain.cxx
        ),  # nvcc's host compiler, as CMake takes it
        variable.variable: variable.value_for(order.request),
        "VLLM_TARGET_DEVICE": "cuda",
        "VLLM_VERSION_OVERRIDE": prepared.facts["wheel"],
        "MAX_JOBS": str(order.jobs),
        # The number of jobs was chosen by the memory of one compiler each.
        "NVCC_THREADS": "1",
        "CMAKE_ARGS": " ".join(f"-D{name}={path}" for name, path in defines.items()),
        # prove_compiled reads from it what was compiled for which archs.
        "CMAKE_EXPORT_COMPILE_COMMANDS": "ON",
        "FETCHCONTENT_BASE_DIR": str(root / "deps"),
        # Stripped; the build id is a digest of the contents, and so the same in every build.
        "LDFLAGS": "-Wl,-s -Wl,--build-id=sha1",
        # The Rust front end is optional, and its crates are nowhere in the release.
        "CARGO": "/nonexistent/cargo",
        "RUSTC": "/nonexistent/rustc",
        "PIP_NO_INDEX": "1",
        # sccache compiles in a server, which cannot be reached from a namespace without a network.
        "VLLM_DISABLE_SCCACHE": "1",
        **prepared.gathered.environment,
    }
