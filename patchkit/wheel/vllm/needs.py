"""Plan a build of vLLM: all that is missing of what a release needs, at once."""

from __future__ import annotations

import platform
import re
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from patchkit.errors import HostError
from patchkit.finding import Finding, finding
from patchkit.process import ask, attempt
from patchkit.quoting import quoted
from patchkit.recipes.vllm.build import Needs, locked_requirements
from patchkit.wheel.build.machine import BuildPlan
from patchkit.wheel.build.toolchain import find_cxx, missing_tools

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
