"""Find what vLLM compiles with on a node at the first request, and what it has compiled before."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from patchkit.process import attempt

_PROGRAMS = ("cc", "gcc", "clang", "c++", "g++", "nvcc", "ninja")
_PTXAS = "lib/python3*/*-packages/triton/backends/nvidia/bin/ptxas*"
# What Triton reads before it takes its own one of that name.
_NAMED = {"ptxas": "TRITON_PTXAS_PATH", "ptxas-blackwell": "TRITON_PTXAS_BLACKWELL_PATH"}
_RELEASE = re.compile(r"release (?P<cuda>\d+\.\d+)")
_MOST = 50  # names of a cache's folder
_SECONDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JitCache:
    """A folder of compiled code: who writes it, and the names in it.

    ``locked`` is the first folder on the way to it, or in it, that this user may not write into.
    """

    owner: str
    folder: str
    names: tuple[str, ...] = ()
    locked: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PtxAssembler:
    """A ptxas by Triton's name for it; ``cuda`` is its release, "" if it does not say one.

    ``named`` is the variable that chose it, "" for the one that Triton brings.
    """

    name: str
    path: str
    cuda: str = ""
    named: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilers:
    """Programs that are there, by name; the header and the ptxas of the Python that has vLLM.

    ``nvcc`` is the release of CUDA that nvcc says, "" if there is none or it does not say.
    """

    programs: tuple[tuple[str, str], ...] = ()
    nvcc: str = ""
    python_h: str = ""
    ptxas: tuple[PtxAssembler, ...] = ()
    caches: tuple[JitCache, ...] = ()

    def has(self, *names: str) -> bool:
        """Return whether one of these programs is there."""
        return any(name in names for name, _ in self.programs)


def find_compilers(venv: str, environment: Mapping[str, str]) -> Compilers:
    """Return what a rank finds that runs with these variables; ``venv`` is "" if none is known."""
    found = dict(_find_programs(venv, environment))
    nvcc = found.get("nvcc", "")
    return Compilers(
        programs=tuple(found.items()),
        nvcc=_cuda_release(nvcc) if nvcc else "",
        python_h=_find_header(Path(venv)) if venv else "",
        ptxas=tuple(_find_assemblers(Path(venv), environment)) if venv else (),
        caches=tuple(_find_caches(environment)),
    )


def _find_programs(venv: str, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    # FlashInfer looks into CUDA's own folder before PATH, and takes /usr/local/cuda at last.
    homes = (environment.get("CUDA_HOME", ""), environment.get("CUDA_PATH", ""))
    first = [f"{home}/bin" for home in homes if home]
    own = [f"{venv}/bin"] if venv else []
    usual = environment.get("PATH", os.defpath)
    path = os.pathsep.join((*first, *own, usual, "/usr/local/cuda/bin"))
    for name in _PROGRAMS:
        if where := shutil.which(name, path=path):
            yield name, where


def _cuda_release(program: str) -> str:
    """Return the release of CUDA that nvcc or ptxas is of."""
    match = _RELEASE.search(attempt(program, "--version", timeout=_SECONDS).output)
    return match["cuda"] if match else ""


def _find_header(venv: Path) -> str:
    """Return Python.h of the Python that an environment was made with, "" if it is not there."""
    try:
        base = (venv / "bin" / "python").resolve(strict=True).parents[1]
    except OSError:
        return ""
    minor = next((each.name for each in venv.glob("lib/python3.*")), "")
    places = (base / "include" / minor / "Python.h", venv / "include" / minor / "Python.h")
    return next((str(each) for each in places if each.is_file()), "")


def _find_assemblers(venv: Path, environment: Mapping[str, str]) -> Iterator[PtxAssembler]:
    bundled = {each.name: str(each) for each in sorted(venv.glob(_PTXAS))}
    for name, variable in _NAMED.items():
        chosen = environment.get(variable, "")
        if path := chosen or bundled.get(name, ""):
            named = variable if chosen else ""
            yield PtxAssembler(name=name, path=path, cuda=_cuda_release(path), named=named)


def _find_caches(environment: Mapping[str, str]) -> Iterator[JitCache]:
    """Yield the folders of compiled code, those that are not there yet as well."""
    home = Path(environment.get("HOME") or Path.home())
    cache = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    vllm = Path(environment.get("VLLM_CACHE_ROOT") or cache / "vllm")
    triton = Path(environment.get("TRITON_HOME") or home) / ".triton" / "cache"
    flashinfer = Path(environment.get("FLASHINFER_WORKSPACE_BASE") or home)
    inductor = f"torchinductor_{home.name}"
    folders = {
        "triton": environment.get("TRITON_CACHE_DIR") or triton,
        "flashinfer": flashinfer / ".cache" / "flashinfer",
        "vllm": vllm / "torch_compile_cache",
        "deep_gemm": environment.get("DG_JIT_CACHE_DIR") or vllm / "deep_gemm",
        "inductor": environment.get("TORCHINDUCTOR_CACHE_DIR")
        or Path(tempfile.gettempdir(), inductor),
    }
    for owner, place in folders.items():
        folder = Path(place)
        inside = list(itertools.islice(folder.glob("*"), _MOST))
        near = next((above for above in (folder, *folder.parents) if above.exists()), folder)
        looked = (near, *(entry for entry in inside if entry.is_dir()))
        locked = [str(entry) for entry in looked if not os.access(entry, os.W_OK | os.X_OK)]
        yield JitCache(
            owner=owner,
            folder=str(folder),
            names=tuple(sorted(entry.name for entry in inside)),
            locked=locked[0] if locked else "",
        )
