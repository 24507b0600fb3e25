"""Find what vLLM compiles with on a node at the first request, and what it has compiled before."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROGRAMS = ("cc", "gcc", "c++", "g++", "nvcc", "ninja")
_PTXAS = "lib/python3*/site-packages/triton/backends/nvidia/bin/ptxas*"
_MOST = 50  # names of a cache's folder


@dataclass(frozen=True, slots=True, kw_only=True)
class JitCache:
    """A folder of compiled code: who writes it, and the names of versions and archs in it."""

    owner: str
    folder: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilers:
    """Programs that are there, by name; the header and the ptxas of the Python that has vLLM."""

    programs: tuple[tuple[str, str], ...] = ()
    python_h: str = ""
    ptxas: tuple[str, ...] = ()
    caches: tuple[JitCache, ...] = ()

    def has(self, *names: str) -> bool:
        """Return whether one of these programs is there."""
        return any(name in names for name, _ in self.programs)


def compilers(venv: str) -> Compilers:
    """Return what is there for the Python of an environment, "" for none."""
    own = f"{venv}/bin" if venv else ""
    path = os.pathsep.join(filter(None, (own, os.environ.get("PATH", ""), "/usr/local/cuda/bin")))
    found = ((name, shutil.which(name, path=path)) for name in _PROGRAMS)
    place = Path(venv)
    return Compilers(
        programs=tuple((name, where) for name, where in found if where),
        python_h=_header(place) if venv else "",
        ptxas=tuple(map(str, sorted(place.glob(_PTXAS)))) if venv else (),
        caches=tuple(_caches()),
    )


def _header(venv: Path) -> str:
    """Return Python.h of the Python that an environment was made with, "" if it is not there."""
    try:
        base = (venv / "bin" / "python").resolve(strict=True).parents[1]
    except OSError:
        return ""
    minor = next((each.name for each in venv.glob("lib/python3.*")), "")
    places = (base / "include" / minor / "Python.h", venv / "include" / minor / "Python.h")
    return next((str(each) for each in places if each.is_file()), "")


def _caches() -> Iterator[JitCache]:
    home, env = Path.home(), os.environ
    cache = Path(env.get("XDG_CACHE_HOME") or home / ".cache")
    vllm = Path(env.get("VLLM_CACHE_ROOT") or cache / "vllm")
    folders = {
        "triton": Path(env.get("TRITON_CACHE_DIR") or home / ".triton" / "cache"),
        "flashinfer": Path(env.get("FLASHINFER_WORKSPACE_BASE") or home) / ".cache" / "flashinfer",
        "vllm": vllm / "torch_compile_cache",
        "deep_gemm": vllm / "deep_gemm",
    }
    for owner, folder in folders.items():
        try:
            # FlashInfer's are VERSION/ARCHS: two levels; of the others one is enough.
            levels = ("*", "*/*") if owner == "flashinfer" else ("*",)
            names = [
                str(each.relative_to(folder))
                for level in levels
                for each in sorted(folder.glob(level))[:_MOST]
            ]
        except OSError:
            continue
        if folder.is_dir():
            yield JitCache(owner=owner, folder=str(folder), names=tuple(names))
