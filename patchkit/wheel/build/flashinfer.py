"""Build a wheel of FlashInfer's modules for one device, ahead of time.

FlashInfer's own generators write what ninja does (``recipes/flashinfer/jit_modules.py``), without
torch and without a GPU. The wheel has the name of upstream's, so that pip replaces one by the
other, and serves releases before and after 0.7.
"""

import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import distribution
from operator import attrgetter
from pathlib import Path
from typing import Any

from patchkit.frozen import frozen
from patchkit.records import RECIPES
from patchkit.source.archive import Progress
from patchkit.units import BYTES_PER_GIB
from patchkit.wheel.build.compiled import (
    BuiltWheel,
    CompileOrder,
    clean_environment,
    fill_template,
    pack_wheel,
    patch_sources,
    run_build,
)
from patchkit.wheel.build.machine import (
    WORK,
    check_toolchain,
    jobs_for,
    namespace_words,
    staging,
    work_folder,
)
from patchkit.wheel.build.torch_toolkit import (
    build_toolkit,
    c_compiler,
    target_site,
)
from patchkit.wheel.file.wheelfile import Facts
from patchkit.wheel.file.write import (
    CUDA_LICENSE,
    as_text,
    digest_label,
)

_HOME = RECIPES / "flashinfer"
_SCRIPT = _HOME / "jit_modules.py"
_PACKAGE = "flashinfer_jit_cache"
# Bytes of disk: the source, the toolkit, and objects of the largest set.
_FREE = 8 * BYTES_PER_GIB
# Folders of the source that FlashInfer's wheels hold in flashinfer/data.
_DATA = ("3rdparty/cutlass", "3rdparty/spdlog", "3rdparty/cccl", "csrc", "include")


@frozen
class FlashInferOrder(CompileOrder):
    """An order for modules of FlashInfer.

    ``names`` are the sets and modules that the user asks for; ``calls`` make them, of the type
    ``Call`` of the runtime. With ``jobs`` None, memory decides.
    """

    project = "flashinfer"
    package = _PACKAGE

    names: Sequence[str]
    calls: Sequence[Any]
    jobs: int | None
    offline: bool

    @property
    def arch(self) -> str:
        """Return the arch of the device as nvcc's names have it, without a dot: ``121a``."""
        return self.target.native.replace(".", "")

    @property
    def requirements(self) -> Path:
        """Return the lock of the libraries of CUDA to compile against."""
        return _HOME / "requirements" / f"cuda-{self.target.cuda}.txt"


def build_flashinfer(order: FlashInferOrder, progress: Progress) -> BuiltWheel:
    """Patch FlashInfer, compile modules of kernels, prove and pack them, and return the wheel.

    Raises BuildError, HostError, ProofError, StorageError, and the errors of ``apply``.
    """
    with staging() as staged:
        env = clean_environment(order.work)
        gencode = f"-gencode=arch=compute_{order.arch},code=sm_{order.arch}"
        check_toolchain(order.toolchain, gencode, staged, env)

        source = staged / "source"
        facts = _patch_source(order, source)

        # Copied, so that modules include its headers by the same path on every machine.
        site = staged / "site"
        package = str(distribution("apache-tvm-ffi").locate_file("tvm_ffi"))
        shutil.copytree(package, site / "tvm_ffi")

        toolkit = staged / "cuda"
        _make_toolkit(order, toolkit, progress)

        with work_folder(
            order.work,
            [source, site, toolkit],
            as_text(facts),
            fresh=order.fresh,
            free=_FREE,
        ) as root:
            libraries = _compile(root, order, env, progress)
            arch = f"sm{order.arch}"
            title = order.target.title
            provider = fill_template(facts, "provider", title=title, arch=arch)
            return pack_wheel(
                root,
                order,
                facts,
                fill_template(facts, "pyproject", title=title),
                {f"{_PACKAGE}/__init__.py": provider.encode(), **libraries},
                sorted((root / "source").glob("LICENSE*")),
            )


def _patch_source(order: FlashInferOrder, source: Path) -> Facts:
    """Put the patched source where generators find it, and return the facts of the build."""
    facts = patch_sources(order, source)
    facts |= {
        "arch": order.arch,
        "modules": sorted(order.names),
        "tvm_ffi": distribution("apache-tvm-ffi").version,
        "license": {"flashinfer": "Apache-2.0", "cuda": CUDA_LICENSE},
    }
    calls = [
        [call.function, dict(call.arguments), call.libraries] for call in order.calls
    ]
    files = [
        path.read_text("utf-8")
        for path in (_SCRIPT, order.requirements, *sorted(_HOME.glob("*.template")))
    ]
    digest = digest_label(as_text(facts), as_text(calls), *files)
    facts["wheel"] = f"{order.version}+{order.label}.{digest}"

    # What FlashInfer's own build backend writes.
    package = source / "flashinfer"
    text = f'__version__ = "{order.version}"\n__git_version__ = "unknown"\n'
    (package / "_build_meta.py").write_text(text, "utf-8")
    data = package / "data"
    data.mkdir(exist_ok=True)
    for path in _DATA:
        (data / Path(path).name).symlink_to(f"../../{path}")
    return facts


def _make_toolkit(order: FlashInferOrder, dest: Path, progress: Progress) -> None:
    """Write the toolkit that FlashInfer calls CUDA_HOME, with the libraries that modules need."""
    tools = order.toolchain
    python = Path(sys.executable)
    libraries = {name for call in order.calls for name in call.libraries}
    site = target_site(
        order.requirements,
        WORK,
        tools.machine,
        python=python,
        patterns=sorted(libraries) or ["none"],
        offline=order.offline,
        progress=progress,
    )
    build_toolkit(tools, site, python, dest, root=order.work / dest.name)


def _compile(
    root: Path,
    order: FlashInferOrder,
    env: dict[str, str],
    progress: Progress,
) -> dict[str, bytes]:
    """Compile the modules, and return path in the wheel → library."""
    calls = [
        {
            "function": call.function,
            "arguments": dict(call.arguments),
            "jobs": jobs_for(int(call.gib * BYTES_PER_GIB), order.jobs).number,
        }
        for call in sorted(order.calls, key=attrgetter("gib"))
    ]
    request = root / "calls.json"
    request.write_text(as_text(calls), "utf-8")

    cxx = order.toolchain.cxx
    env |= {
        "CUDA_HOME": str(root / "cuda"),
        "CC": str(c_compiler(cxx)),  # nvcc's host compiler
        "CXX": str(cxx),
        "FLASHINFER_CUDA_ARCH_LIST": order.target.native,
        # Lazy: attention refers to tiles that are never taken, and that 0.6.16 and later leave out.
        "FLASHINFER_EXTRA_LDFLAGS": "-Wl,-s -Wl,--build-id=sha1 -Wl,-z,lazy",
        "FLASHINFER_WORKSPACE_BASE": str(root / "workspace"),
        "PYTHONPATH": f"{root / 'site'}:{root / 'source'}",
    }
    command = [*namespace_words(), sys.executable, str(_SCRIPT)]
    command += ["--cuda", order.target.cuda, str(request)]
    run_build(command, root, env, progress)

    return {
        f"{_PACKAGE}/jit_cache/{path.parent.name}/{path.name}": path.read_bytes()
        for path in sorted((root / "workspace").glob("**/cached_ops/*/*.so"))
    }
