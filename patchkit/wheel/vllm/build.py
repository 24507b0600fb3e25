"""Build vLLM for one device, from a release to a sealed wheel.

order → prepare → CUDA → backend, cut off → prove → seal

vLLM's own setup.py and CMake do the work; everything that they would fetch is brought before.
"""

from __future__ import annotations

from pathlib import Path

from patchkit.errors import ProofError
from patchkit.recipes.vllm.archs import evaluate
from patchkit.recipes.vllm.leave_out import asked_targets
from patchkit.source.detect import detect
from patchkit.source.tree import Sandboxed
from patchkit.units import BYTES_PER_GIB
from patchkit.wheel.across.toolkit import cross_toolkit
from patchkit.wheel.build.ccache import counted, savings
from patchkit.wheel.build.full_toolkit import full_toolkit
from patchkit.wheel.build.make import BuiltWheel, Progress, clean_environment
from patchkit.wheel.build.network import network
from patchkit.wheel.build.repro import object_digests
from patchkit.wheel.build.toolchain import check_toolchain
from patchkit.wheel.build.work import emptied, staging, work_folder
from patchkit.wheel.device.compiled import compiled_sources, prove_compiled, prove_groups
from patchkit.wheel.device.inspect import Binary, inspect_wheel
from patchkit.wheel.device.libraries import judge, require_loading
from patchkit.wheel.file.facts import as_text
from patchkit.wheel.file.metadata import read_metadata
from patchkit.wheel.file.tags import platform_tag
from patchkit.wheel.file.wheelfile import WheelFile
from patchkit.wheel.file.write import seal
from patchkit.wheel.vllm.backend import NAMESPACE, build_variables, compile_wheel, note
from patchkit.wheel.vllm.order import VllmOrder
from patchkit.wheel.vllm.prepare import Prepared, Report, prepare
from patchkit.wheel.vllm.upstream_parts import prove_parts
from patchkit.wheel.wheelhouse.wheel_checks import check

# The issue trackers' 3 to 5 GB, and CUTLASS's largest files take 9.
JOB_MEMORY = 4 * BYTES_PER_GIB
_FREE = 8 * BYTES_PER_GIB  # 0.25.1 for one arch leaves 2 GB, and compilers write as they go

# Libraries that come with torch, with the CUDA packages that it requires, and with the driver.
_PROVIDED = (
    *("libtorch*.so", "libc10*.so", "libcuda.so.1"),
    *("libcudart.so.*", "libcublas*.so.*", "libnvrtc*.so.*", "libcu*.so.*", "libnv*.so.*"),
)


def build_vllm(order: VllmOrder, report: Report) -> BuiltWheel:
    """Patch, compile, prove and pack; ``report(task)`` gives each long task its progress.

    Raises BuildError, DriftError, HostError, ProofError, StorageError, UsageError.
    """
    with staging() as staged:
        target = order.request.target
        arch = target.gencode_flags(target.arch_list(order.request.arch))
        check_toolchain(order.toolchain, arch, staged, clean_environment(staged, NAMESPACE))
        prepared = prepare(order, staged, report)
        python, cuda = prepared.python, staged / "cuda"
        if order.across:
            used = order.work / cuda.name
            cross_toolkit(order.toolchain, python.site, python.python, cuda, root=used)
        else:
            full_toolkit(order.toolchain, python.site, cuda)
        brought = [staged / name for name in ("source", "external", "cuda")]
        with work_folder(
            order.work, brought, as_text(prepared.facts), fresh=order.fresh, free=_FREE
        ) as root:
            return _build(root, order, prepared, report("compiling"))


def _build(root: Path, order: VllmOrder, prepared: Prepared, progress: Progress) -> BuiltWheel:
    variables = build_variables(root, order, prepared)
    # ccache counts over all builds: the difference is this one's.
    before = counted(variables)
    raw = compile_wheel(root, prepared.python.python, variables, progress)
    circumstances = (network(), savings(before, counted(variables)))
    note(root, *circumstances)
    # The torch that was compiled against is a fact of the wheel: it must still be that one.
    prepared.python.check("after the build")
    with WheelFile(raw) as wheel:
        binaries = inspect_wheel(wheel)
        proofs = _prove(root, order, wheel, binaries)
        proofs += tuple(
            prove_parts(wheel, root / "external" / each.known.option, each.known.option)
            for each in prepared.gathered.installed
            if not order.extensions or order.extensions & set(each.known.targets)
        )
    sealed = seal(raw, emptied(root / "sealed"), platform_tag(raw, _PROVIDED), prepared.texts)
    _require_clean(sealed, binaries)
    return BuiltWheel(
        wheel=sealed,
        facts=prepared.facts,
        objects=object_digests(root / "source" / "build"),
        binaries=binaries,
        proofs=proofs,
        circumstances=circumstances,
        log=root / "log.txt",
    )


def _require_clean(wheel: Path, binaries: tuple[Binary, ...]) -> None:
    """Raise ProofError for what `patchkit inspect` would find: an RPATH, a library of torch's …"""
    with WheelFile(wheel) as sealed:
        metadata = read_metadata(sealed)
    if found := check(metadata, binaries):
        raise ProofError(
            f"{wheel.name} would not be fit for other machines\n"
            + "\n".join(f"    {each.where} {each.what}" for each in found),
            why="the toolchain added it, or upstream's build changed",
            hint="please report this with the version",
        )


def _prove(
    root: Path, order: VllmOrder, raw: WheelFile, binaries: tuple[Binary, ...]
) -> tuple[str, ...]:
    target = order.request.target
    sources = compiled_sources(root / "source" / "build", root / "source")
    if not order.extensions:
        require_loading(judge(raw, binaries, target, order.version), target, order.version)
    archs = target.arch_list(order.request.arch)
    tree = detect(root / "source", sandboxed=Sandboxed.IF_POSSIBLE)  # it has been built
    asked = asked_targets(tree)
    built = [each for each in sources if each.library in asked]
    groups = evaluate(tree, target, archs, order.toolchain.cuda)
    return (prove_groups(groups, sources), *prove_compiled(built, binaries, target))
