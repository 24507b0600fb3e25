"""Skip tests without what they need of the distribution, and say how to get it."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest

from patchkit.errors import HostError, PatchkitError, SourceError
from patchkit.target import Toolkit, toolkits
from patchkit.wheel.build.machine import Toolchain, find_toolchain
from patchkit.wheel.native.assemble import Assembler
from support import PACKAGES


def need(*programs: str) -> None:
    """Skip the present test unless all of these programs are on this machine."""
    for program in programs:
        if not shutil.which(program):
            package = PACKAGES.get(program, program)
            pytest.skip(f"{program} is not installed: apt install {package}")


def need_headers() -> None:
    """Skip the present test unless extensions can be compiled for this Python."""
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        pytest.skip("Python.h is not installed: apt install python3-dev")


def need_ptxas() -> Assembler:
    """Return what assembles PTX; skip the present test if its ptxas cannot be had."""
    try:
        return Assembler()
    except (SourceError, HostError) as error:
        pytest.skip(f"ptxas cannot be had here: {error}")


def need_toolchain(machine: str, toolkit: Toolkit | None = None) -> Toolchain:
    """Return what builds for a CPU; skip the present test with what is missing."""
    try:
        return find_toolchain(machine, (toolkit or toolkits()[0]).cuda)
    except PatchkitError as error:
        pytest.skip(f"{error.what}; {error.hint}")
