"""Build libnccl for one device, from a patched tree to a sealed wheel.

NCCL's own makefiles compile, and scikit-build-core packs.
"""

from collections.abc import Iterator
from pathlib import Path

from patchkit.frozen import Values, frozen
from patchkit.source.archive import Progress
from patchkit.source.releases import load_facts
from patchkit.units import BYTES_PER_GIB
from patchkit.wheel.build.compiled import (
    BuiltWheel,
    CompileOrder,
    clean_environment,
    drop_partial,
    fill_template,
    objects_to_make,
    pack_wheel,
    patch_sources,
    run_build,
)
from patchkit.wheel.build.machine import check_toolchain, staging, work_folder
from patchkit.wheel.file.wheelfile import Facts
from patchkit.wheel.file.write import CUDA_LICENSE, as_text, digest_label

# Bytes of disk: 2.29.7 for one arch leaves 204 MB, and compilers write temporary files.
_FREE = 2 * BYTES_PER_GIB
_LICENSE = "LICENSE.txt"
_NOTICES = "ThirdPartyNotices.txt"
JOB_MEMORY = BYTES_PER_GIB  # bytes; the largest ptxas of NCCL 2.28.9 took 564 MiB


@frozen
class NcclOrder(CompileOrder):
    """An order for libnccl.

    ``functions`` limits the device code to some functions (NCCL's ONLY_FUNCS, for tests), "" builds
    all of them.
    """

    project = "nccl"
    package = "nvidia_nccl_cu13"

    jobs: int
    functions: str

    @property
    def reduced(self) -> str:
        return ".reduced" if self.functions else ""

    @property
    def label(self) -> str:
        return f"{self.target.name}{self.reduced}"

    @property
    def gencode(self) -> str:
        """Return nvcc's arguments, for the arch without a suffix.

        NCCL uses no instructions that only one arch has.
        """
        return load_facts("nccl").build.value_for(self.target, "native")


def build_nccl(order: NcclOrder, progress: Progress) -> BuiltWheel:
    """Patch, compile, prove and pack libnccl, and return its wheel.

    Raises BuildError, HostError, ProofError, StorageError, and the errors of ``apply``.
    """
    with staging() as staged:
        env = clean_environment(order.work)
        # -z defs: else a library without kernels, whose sources were not generated, would link.
        env["LDFLAGS"] = "-Wl,-s -Wl,--build-id=sha1 -Wl,-z,defs"
        check_toolchain(order.toolchain, order.gencode, staged, env)

        source = staged / "source"
        facts = _nccl_facts(order, source)

        with work_folder(
            order.work,
            [source],
            as_text(facts),
            fresh=order.fresh,
            free=_FREE,
        ) as root:
            build = _compile_nccl(root, order, env, progress)
            return pack_wheel(
                root,
                order,
                facts,
                fill_template(facts, "pyproject"),
                dict(_installed_files(build, order.version)),
                [root / "source" / name for name in (_LICENSE, _NOTICES)],
            )


def _compile_nccl(
    root: Path,
    order: NcclOrder,
    env: Values,
    progress: Progress,
) -> Path:
    """Compile the library below a folder, and return the folder."""
    build = root / "build"
    drop_partial(build)
    objects = objects_to_make(root, env, order.functions)

    command = ["make", f"--directory={root / 'source' / 'src'}", "lib"]
    command += [f"--jobs={order.jobs}", f"BUILDDIR={build}"]

    tools = order.toolchain
    command += [f"CUDA_HOME={tools.nvcc.parents[1]}", f"NVCC={tools.nvcc}"]
    command += [f"CUDA_INC={tools.include}", f"CUDA_LIB={tools.lib}"]
    command += [f"CXX={tools.cxx}", f"NVCC_GENCODE={order.gencode}"]
    command += [f"ONLY_FUNCS={order.functions}"]
    run_build(command, root, env, progress, objects=objects)
    return build


def _installed_files(build: Path, version: str) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of what stock's wheels hold: one library, and the headers."""
    home = "nvidia/nccl"
    library = build / "lib" / f"libnccl.so.{version}"
    yield f"{home}/lib/libnccl.so.2", library.read_bytes()

    for path in sorted((build / "include").rglob("*.h*")):
        yield f"{home}/{path.relative_to(build)}", path.read_bytes()


def _nccl_facts(order: NcclOrder, source: Path) -> Facts:
    facts = patch_sources(order, source)
    # Releases differ in their licence, so each one's own text decides.
    apache = "Apache License" in (source / _LICENSE).read_text("utf-8")
    facts |= {
        "gencode": order.gencode,
        "functions": order.functions or "all",
        "license": {
            "nccl": "Apache-2.0 AND BSD-3-Clause" if apache else "BSD-3-Clause",
            "cuda": CUDA_LICENSE,
        },
    }
    template = fill_template({**facts, "wheel": ""}, "pyproject")
    # 2.29.7+gb10.0a1b2c3d4e: a digest of the facts and of what packs them.
    digest = digest_label(as_text(facts), template)
    return facts | {"wheel": f"{order.version}+{order.label}.{digest}"}
