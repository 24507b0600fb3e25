"""Tell what a release needs of Python and of the machine, and all that is missing, at once."""

from __future__ import annotations

import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from patchkit.errors import HostError, SourceError
from patchkit.finding import Finding, finding
from patchkit.process import ask, attempt
from patchkit.quoting import quoted
from patchkit.recipes.vllm.build import BUILD_FILE
from patchkit.records import RECIPES, read_toml, record
from patchkit.source.tree import SourceTree
from patchkit.wheel.build.machine import BuildPlan
from patchkit.wheel.build.toolchain import find_cxx, missing_tools

_REQUIREMENTS = RECIPES / "vllm" / "requirements"
_TORCH = re.compile(r"""["']torch *== *([\w.]+)["']""")
# With g++-13-aarch64-linux-gnu; Debian 12 and Ubuntu 22.04 end with GCC 12 for another CPU.
_HAVE_GCC_13 = "Debian 13, Ubuntu 24.04"
WITHOUT_RUST = (
    "Rust parts are left out: the front end, which VLLM_USE_RUST_FRONTEND=1 asks for, and from "
    "0.24 to 0.31 a parser for the tool calls of MiniMax M3"
)
_ASK = """\
import importlib.util, platform, sysconfig
from pathlib import Path
answer = {
    "version": platform.python_version(),
    "header": (Path(sysconfig.get_path("include")) / "Python.h").is_file(),
    "venv": all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")),
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The fields are described in ``recipes/vllm/build.toml``."""

    torch: str
    python: str
    standard: int
    gcc: str
    patch: bool
    rust: str
    protoc: bool


def read_needs(tree: SourceTree) -> Needs:
    """Return what a tree needs: as recorded, but the torch that its own pyproject.toml names."""
    recorded = recorded_needs(tree.version)
    named = _TORCH.search(tree.read("pyproject.toml"))
    return replace(recorded, torch=named[1]) if named else recorded


def recorded_needs(version: Version) -> Needs:
    """Return what the recipe has for a release, or for the newest one before it."""
    base = Version(version.base_version)
    merged: dict[str, Any] = {}
    for entry in read_toml(tuple[dict[str, Any], ...], BUILD_FILE, key="needs"):
        # Each entry has only what changed, from the oldest release to the newest.
        if Version(entry["from"]) <= base:
            merged |= {name: value for name, value in entry.items() if name != "from"}
    return record(Needs, merged)


def locked_requirements(torch: str, given: Path | None = None) -> Path:
    """Return the file that locks the build environment for a torch.

    Raises SourceError, with the reason, where the package index has no such torch for CUDA 13.
    """
    if given is not None:
        return given
    path = _REQUIREMENTS / f"torch-{torch}.txt"
    if path.is_file():
        return path
    raise SourceError(
        f"torch {torch} for CUDA 13 is not on the package index, so nothing is locked for it",
        why="up to 2.10 the index has torch for CUDA 12 or for CPUs alone, or this is none that a "
        "supported release takes",
        hint="the index that the PyTorch project keeps for cu130 has it: lock it there with "
        "`uv pip compile --generate-hashes` and name the file with --requirements; vLLM 0.20.0 and "
        "later take a torch that is locked here",
    )


def plan_vllm(
    needs: Needs, version: Version, machine: str, requirements: Path | None = None
) -> BuildPlan:
    """Plan a build for the CPU ``machine``. Raises SourceError where nothing is locked."""
    locked_requirements(needs.torch, requirements)
    across = machine if machine != platform.machine() else ""
    lacks = lacked(needs, Path(sys.executable), find_cxx(machine), across)
    missing = (*lacks, *missing_tools())
    return BuildPlan(title=f"vLLM {version}", missing=missing)


def lacked(needs: Needs, python: Path, cxx: Path | None, across: str = "") -> Iterator[Finding]:
    """Yield what this machine lacks; ``cxx`` is its C++ compiler, ``across`` the other CPU."""
    lack = partial(finding, HostError, "")
    try:
        facts = ask(python, _ASK)
    except HostError as error:
        yield lack(error.what, "apt install python3")
    else:
        version = facts["version"]
        short = ".".join(version.split(".")[:2])
        if not SpecifierSet(needs.python).contains(version, prereleases=True):
            yield lack(
                f"Python {version} is outside {needs.python}", "install patchkit into another one"
            )
        for fact, package in (("header", "dev"), ("venv", "venv")):
            if not facts[fact]:
                part = "headers (Python.h)" if fact == "header" else "module venv"
                supply = quoted("apt", "install", f"python{short}-{package}")
                yield lack(f"{python} has no {part}", supply)
    # The first GCC with -std=c++20, where the release itself names none.
    least = needs.gcc or ("10" if needs.standard >= 20 else "")
    major = Version(least).major if least else None
    other = [f"{across.replace('_', '-')}-linux-gnu"] if across else []
    package = "-".join(["g++", *([str(major)] if major else []), *other])
    supply = quoted("apt", "install", package)
    if cxx is None:
        yield lack(f"no C++ compiler{f' for {across}' if across else ''}", supply)
    else:
        said = attempt(cxx, "-dM", "-E", "-x", "c++", "/dev/null")
        # By its macros: any program may be called g++, and clang defines __GNUC__ as well.
        macros = dict(re.findall(r"^#define (\w+) (.*)$", said.output, re.MULTILINE))
        parts = (macros.get(f"__GNUC{part}__", "0") for part in ("", "_MINOR", "_PATCHLEVEL"))
        found = Version(".".join(parts))
        # The release only asks GCC for its version.
        is_gcc = "__GNUC__" in macros and "__clang__" not in macros
        if is_gcc and least and found < Version(least):
            compiler = f"{across}-linux-gnu-g++-{major}" if across else f"g++-{major}"
            taken = f"C++{needs.standard}, GCC {least} or later"
            yield lack(
                f"{cxx} is GCC {found}; the release takes {taken}",
                f"{supply}{f' ({_HAVE_GCC_13})' if across else ''}; then CXX={compiler}",
            )
    if needs.patch and shutil.which("patch") is None:
        yield lack("no program `patch`", "apt install patch")
