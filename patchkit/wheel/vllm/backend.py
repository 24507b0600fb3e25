"""Run vLLM's own build backend without a network: everything that it would fetch is there."""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from patchkit.errors import BuildError
from patchkit.patching.recipe import load_recipe
from patchkit.wheel.across.toolkit import cross_variables
from patchkit.wheel.build.make import Progress, clean_environment, ninja_steps, run
from patchkit.wheel.build.network import cut_off
from patchkit.wheel.build.work import emptied
from patchkit.wheel.vllm.order import VllmOrder
from patchkit.wheel.vllm.prepare import Prepared

NAMESPACE = "patchkit-vllm"
"""Keeps what a compiler cache holds of vLLM apart from what it holds of other builds."""

_ABI = "--py-limited-api=cp38"  # as upstream's wheels have it


def compile_wheel(
    root: Path, python: Path, variables: Mapping[str, str], progress: Progress
) -> Path:
    """Compile the wheel, and return it as setup.py leaves it in ``root/raw``.

    The output is in ``root/log.txt``. Raises BuildError with the lines that tell why, HostError.
    """
    source, out = root / "source", emptied(root / "raw")

    def runner(
        cmd: Sequence[str],
        cwd: str | None = None,
        extra_environ: Mapping[str, str] | None = None,
    ) -> None:
        full = {**variables, **(extra_environ or {})}
        run(cut_off(list(cmd)), root, full, ninja_steps, progress, folder=Path(cwd or source))

    from pyproject_hooks import BuildBackendHookCaller  # comes with the extra for builds

    # The hook of PEP 517 itself: build's own front end would hide our errors behind its.
    backend = tomllib.loads((source / "pyproject.toml").read_text("utf-8"))["build-system"]
    hooks = BuildBackendHookCaller(
        str(source),
        backend["build-backend"],
        backend.get("backend-path"),
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
    cuda, tools = root / "cuda", prepared.python.python.parent
    variable, defines = load_recipe("vllm").build, prepared.gathered.defines
    across = cross_variables(order.toolchain, cuda) if order.across else {}
    return {
        **clean,
        **across,
        "PATH": f"{tools}:{cuda / 'bin'}:{clean['PATH']}",
        "CUDA_HOME": str(cuda),
        "CXX": str(order.toolchain.cxx),
        "CUDAHOSTCXX": str(order.toolchain.cxx),  # nvcc's host compiler, as CMake takes it
        variable.variable: variable.value_for(order.request),
        "VLLM_TARGET_DEVICE": "cuda",
        "VLLM_VERSION_OVERRIDE": prepared.facts["wheel"],
        "MAX_JOBS": str(order.jobs),
        # The number of jobs was chosen by the memory of one compiler each.
        "NVCC_THREADS": "1",
        "CMAKE_ARGS": " ".join(f"-D{name}={path}" for name, path in defines.items()),
        # compiled.py reads from it what was compiled for which archs.
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
