"""Find what Triton compiles with on a node at the first request."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from patchkit.process import attempt

_PTXAS = "lib/python3*/*-packages/triton/backends/nvidia/bin/ptxas*"
# What Triton reads before it takes its own one of that name.
_NAMED = {"ptxas": "TRITON_PTXAS_PATH", "ptxas-blackwell": "TRITON_PTXAS_BLACKWELL_PATH"}
_RELEASE = re.compile(r"release (?P<cuda>\d+\.\d+)")
_SECONDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PtxAssembler:
    """A ptxas by Triton's name for it; ``cuda`` is its release, "" if it does not say one."""

    name: str
    path: str
    cuda: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilers:
    """A C compiler, the header and the ptxas of the Python that has vLLM; "" for none."""

    compiler: str = ""
    python_h: str = ""
    ptxas: tuple[PtxAssembler, ...] = ()


def find_compilers(venv: str, environment: Mapping[str, str]) -> Compilers:
    """Return what a rank finds that runs with these variables; ``venv`` is "" if none is known."""
    path = os.pathsep.join((f"{venv}/bin", environment.get("PATH", os.defpath)))
    found = (shutil.which(name, path=path) for name in ("gcc", "cc", "clang"))
    compiler = next(filter(None, found), "")
    if not venv:
        return Compilers(compiler=compiler)
    bundled = {each.name: str(each) for each in sorted(Path(venv).glob(_PTXAS))}
    ptxas = []
    for name, variable in _NAMED.items():
        if place := environment.get(variable) or bundled.get(name):
            release = _RELEASE.search(attempt(place, "--version", timeout=_SECONDS).output)
            cuda = release["cuda"] if release else ""
            ptxas.append(PtxAssembler(name=name, path=place, cuda=cuda))
    header = _find_header(Path(venv))
    return Compilers(compiler=compiler, python_h=header, ptxas=tuple(ptxas))


def _find_header(venv: Path) -> str:
    """Return Python.h of the Python that an environment was made with, "" if it is not there."""
    try:
        base = (venv / "bin" / "python").resolve(strict=True).parents[1]
    except OSError:
        return ""
    minor = next((each.name for each in venv.glob("lib/python3.*")), "")
    places = (base / "include" / minor / "Python.h", venv / "include" / minor / "Python.h")
    return next((str(each) for each in places if each.is_file()), "")
