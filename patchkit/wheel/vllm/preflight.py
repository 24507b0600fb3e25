"""Check all that a build needs of the machine, at once and before anything that takes long."""

from __future__ import annotations

import platform
import re
import shutil
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from patchkit.errors import HostError
from patchkit.finding import Finding
from patchkit.process import ask, attempt
from patchkit.quoting import quoted
from patchkit.wheel.build.machine import BuildPlan
from patchkit.wheel.build.toolchain import cross_package, find_cxx, missing_tools
from patchkit.wheel.file.torch import installed_torch, require_torch
from patchkit.wheel.vllm.build_python import TOOLS
from patchkit.wheel.vllm.needs import Needs, locked_requirements
from patchkit.wheel.vllm.source import VllmSource

# With g++-13-aarch64-linux-gnu; Debian 12 and Ubuntu 22.04 end with GCC 12 for another CPU.
_HAVE_GCC_13 = "Debian 13, Ubuntu 24.04"
_WITHOUT_RUST = (
    "Rust parts are left out: the front end, which VLLM_USE_RUST_FRONTEND=1 asks for, and from "
    "0.24 to 0.31 a parser for the tool calls of MiniMax M3"
)
_ASK = """\
import importlib.metadata as found, importlib.util, platform, sys, sysconfig
from pathlib import Path
answer = {
    "version": platform.python_version(),
    "header": (Path(sysconfig.get_path("include")) / "Python.h").is_file(),
    "venv": all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")),
    "absent": [name for name in sys.argv[1:] if not any(found.Distribution.discover(name=name))],
}
"""


def lacked(
    needs: Needs,
    python: Path,
    cxx: Path | None,
    *,
    packages: Collection[str] = (),
    across: str = "",
) -> tuple[Finding, ...]:
    """Return what this machine lacks for a build.

    ``cxx`` is the C++ compiler, None if none was found; ``packages`` are what the Python must have
    if it builds itself, () if it only makes an environment; ``across`` is the CPU of a cross build.
    """
    patch = needs.patch and shutil.which("patch") is None
    return (
        *_python_findings(needs, python, packages),
        *_compiler_findings(needs, cxx, across),
        *([_missing_need("no program `patch`", "apt install patch")] if patch else []),
    )


def left_out(needs: Needs) -> list[str]:
    """Return what a build leaves out, whatever the machine has."""
    return [_WITHOUT_RUST] if needs.rust else []


def plan_vllm(
    source: VllmSource,
    *,
    machine: str,
    cuda: str,
    python: Path | None = None,
    requirements: Path | None = None,
    compiles: Sequence[str] = (),
) -> BuildPlan:
    """Plan a build for the CPU ``machine`` with the CUDA release ``cuda``.

    A ``python`` has torch; without one patchkit makes an environment. Raises BuildError for another
    torch, SourceError where nothing is locked for the release's torch.
    """
    across = machine if machine != platform.machine() else ""
    if python is None:
        locked_requirements(source.needs.torch, requirements)
    missing = [
        *lacked(
            source.needs,
            python or Path(sys.executable),
            find_cxx(machine),
            packages=(*TOOLS, "torch") if python else (),
            across=across,
        ),
        *missing_tools(),
    ]
    if python and not missing:
        require_torch(installed_torch(python), source.needs.torch, cuda, "before the build")
    return BuildPlan(
        title=f"vLLM {source.version}",
        compiles=tuple(compiles),
        missing=tuple(missing),
    )


def _missing_need(what: str, hint: str) -> Finding:
    return Finding(what=what, hint=hint, kind=HostError)


def _python_findings(needs: Needs, python: Path, packages: Collection[str]) -> Iterator[Finding]:
    try:
        facts = ask(python, _ASK, *packages)
    except HostError as error:
        yield _missing_need(error.what, "apt install python3")
        return
    version = facts["version"]
    short = ".".join(version.split(".")[:2])
    if not SpecifierSet(needs.python).contains(version, prereleases=True):
        yield _missing_need(
            f"Python {version} is outside {needs.python}", "name another one with --python"
        )
    if not facts["header"]:
        yield _missing_need(
            f"Python.h of {python} is missing", quoted("apt", "install", f"python{short}-dev")
        )
    if not facts["venv"] and not packages:
        yield _missing_need(
            f"{python} has no module venv", quoted("apt", "install", f"python{short}-venv")
        )
    if absent := facts["absent"]:
        named = (f"torch=={needs.torch}" if name == "torch" else name for name in absent)
        supply = quoted(python, "-m", "pip", "install", *named)
        yield _missing_need(f"{python} has no {', '.join(absent)}", supply)


def _compiler_findings(needs: Needs, cxx: Path | None, across: str) -> Iterator[Finding]:
    # The first GCC with -std=c++20, where the release itself names none.
    least = needs.gcc or ("10" if needs.standard >= 20 else "")
    major = Version(least).major if least else None
    package = cross_package(across, major) if across else f"g++-{major}" if major else "g++"
    supply = quoted("apt", "install", package)
    if cxx is None:
        yield _missing_need(f"no C++ compiler{f' for {across}' if across else ''}", supply)
        return
    version = gcc_version(cxx)
    if version is None:
        return  # another compiler: the release only asks GCC for its version
    if least and version < Version(least):
        said = f"C++{needs.standard}, GCC {least} or later"
        yield _missing_need(
            f"{cxx} is GCC {version}; the release takes {said}",
            f"{supply} ({_HAVE_GCC_13}); then CXX={across}-linux-gnu-g++-{major}"
            if across
            else f"{supply}; then CXX=g++-{major}",
        )


def gcc_version(cxx: Path) -> Version | None:
    """Return the version of a GCC; None for another compiler, or one that does not run."""
    said = attempt(cxx, "-dM", "-E", "-x", "c++", "/dev/null")
    # By its macros: any program may be called g++, and clang defines __GNUC__ as well.
    macros = dict(re.findall(r"^#define (\w+) (.*)$", said.output, re.MULTILINE))
    if "__clang__" in macros or "__GNUC__" not in macros:
        return None
    parts = (macros[f"__GNUC{part}__"] for part in ("", "_MINOR", "_PATCHLEVEL"))
    return Version(".".join(parts))
