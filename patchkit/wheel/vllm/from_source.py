"""Build vLLM for one device, from a release to a sealed wheel.

order → prepare → CUDA → backend, cut off → prove → assemble PTX → seal

vLLM's own setup.py and CMake do the work; everything that they would fetch is fetched before.
"""

from collections.abc import Iterator
from pathlib import Path

from patchkit.frozen import Values
from patchkit.patching.recipe import load_recipe
from patchkit.recipes.vllm.archs import evaluate
from patchkit.recipes.vllm.leave_out import asked_targets
from patchkit.source.archive import Progress
from patchkit.source.detect import detect
from patchkit.source.resolve import Report
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
    build_toolkit,
    cross_variables,
)
from patchkit.wheel.device.inspect import Binaries
from patchkit.wheel.device.libraries import (
    compiled_sources,
    prove_compiled,
    prove_groups,
    require_loading,
    require_portable,
)
from patchkit.wheel.file.labels import as_text
from patchkit.wheel.file.wheelfile import FACTS, WheelFile
from patchkit.wheel.file.write import seal_wheel
from patchkit.wheel.native.assemble import Assembler
from patchkit.wheel.native.parts import native_parts, read_kernels
from patchkit.wheel.vllm.inputs import prove_parts
from patchkit.wheel.vllm.prepare import Prepared, VllmOrder, in_mb, prepare_build

# Issue trackers report 3 to 5 GB per compiler; the largest files of CUTLASS take 9.
JOB_MEMORY = 4 * BYTES_PER_GIB
# Bytes of disk: 0.25.1 for one arch leaves 2 GB, and compilers write temporary files.
_FREE = 8 * BYTES_PER_GIB


def build_vllm(order: VllmOrder, report: Report) -> BuiltWheel:
    """Patch, compile, prove and pack vLLM. ``report(task)`` returns the progress of a long task.

    Raises BuildError, DriftError, HostError, ProofError, StorageError, UsageError.
    """
    with staging() as staged:
        target = order.target
        arch = target.gencode_flags(target.arch_list(order.request.arch))
        environment = clean_environment(staged)
        check_toolchain(order.toolchain, arch, staged, environment)

        assembler = Assembler(offline=order.offline)
        prepared = prepare_build(order, staged, report)
        folders = [staged / name for name in ("source", "external", "cuda")]
        build_toolkit(
            order.toolchain,
            prepared.site,
            prepared.python,
            folders[2],
            root=order.work / "cuda",
        )
        facts = as_text(prepared.facts)
        with work_folder(
            order.work,
            folders,
            facts,
            fresh=order.fresh,
            free=_FREE,
        ) as root:
            variables = build_variables(root, order, prepared)
            bar = report("compiling")
            raw = compile_wheel(root, prepared.python, variables, bar)
            return _make_vllm_wheel(root, raw, order, prepared, assembler, report)


def _make_vllm_wheel(
    root: Path,
    raw: Path,
    order: VllmOrder,
    prepared: Prepared,
    assembler: Assembler,
    report: Report,
) -> BuiltWheel:
    target = order.target
    with WheelFile(raw) as wheel:
        kernels = read_kernels(wheel, target)
        if not order.extensions:
            require_loading(kernels.judged, target, wheel.name)
        proofs = list(_prove_compiled(root, order, kernels.binaries))
        for part in prepared.gathered.installed:
            known = part.known
            if not order.extensions or order.extensions & set(known.targets):
                folder = root / "external" / known.option
                proofs.append(prove_parts(wheel, folder, known.option))

        # Libraries that were compiled here, too: upstream's CMake asks for only PTX in some places.
        folder = emptied(root / "native")
        bar = in_mb(report("assembling PTX, in MB"))
        native = native_parts(wheel, kernels, target, folder, assembler, bar)

    if native.count:
        ptxas = f"ptxas {assembler.version}"
        proofs.append(f"{native.count} fat binaries are assembled from PTX, by {ptxas}")

    facts = {**prepared.facts, "native": native.facts}
    texts = {
        **prepared.texts,
        FACTS: as_text(facts),
    }
    tag = platform_tag(raw)
    sealed = seal_wheel(raw, emptied(root / "sealed"), tag, texts, native.members)
    require_portable(sealed)
    return BuiltWheel(
        wheel=sealed,
        facts=facts,
        proofs=tuple(proofs),
        circumstances=(network(),),
        notes=tuple(native.refused_notes),
        log=root / "log.txt",
    )


def _prove_compiled(
    root: Path,
    order: VllmOrder,
    binaries: Binaries,
) -> Iterator[str]:
    """Prove that CMake compiled for the wanted archs and that the libraries hold this code.

    Yield a sentence for each proof. Raises ProofError.
    """
    source = root / "source"
    compiled = compiled_sources(source / "build", source)

    target = order.target
    archs = target.arch_list(order.request.arch)
    tree = detect(source, "vllm", sandboxed=Sandboxed.IF_POSSIBLE)  # it has been built
    groups = evaluate(tree, target, archs, order.toolchain.cuda)
    yield prove_groups(groups, compiled)

    libraries = asked_targets(tree)
    linked = [source for source in compiled if source.library in libraries]
    yield from prove_compiled(linked, binaries, target)


_ABI = "--py-limited-api=cp38"  # as upstream's wheels have it


def compile_wheel(
    root: Path,
    python: Path,
    variables: Values,
    progress: Progress,
) -> Path:
    """Compile the wheel with the release's own build backend; return its path, in ``root/raw``.

    The output is written to ``root/log.txt``. Raises BuildError with the lines of the output that
    tell the reason, HostError.
    """
    out = emptied(root / "raw")
    command = [
        *namespace_words(), str(python), "-m", "pip", "wheel", "--isolated", "--verbose",
        "--use-pep517", "--no-build-isolation", "--no-index", "--no-deps",
        f"--config-settings=--build-option={_ABI}", f"--wheel-dir={out}", str(root / "source"),
    ]  # fmt: skip
    run_build(command, root, variables, progress)
    (wheel,) = out.glob("*.whl")
    return wheel


def build_variables(root: Path, order: VllmOrder, prepared: Prepared) -> Values:
    """Return the environment of vLLM's setup.py, CMake and the compilers."""
    variables = clean_environment(root)
    path = variables["PATH"]
    cuda = root / "cuda"
    cxx = str(order.toolchain.cxx)
    archs = load_recipe("vllm").facts.build
    defines = prepared.gathered.defines
    if order.toolchain.across:
        variables |= cross_variables(order.toolchain, cuda)
    return variables | {
        "PATH": f"{prepared.python.parent}:{cuda / 'bin'}:{path}",
        "CUDA_HOME": str(cuda),
        "CXX": cxx,
        "CUDAHOSTCXX": cxx,  # nvcc's host compiler, as CMake takes it
        archs.variable: archs.value_for(order.target, order.request.arch),
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
