"""Read from the files of a vLLM tree what its build takes, to compare it with the recipe."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from patchkit.edit.cmake import Command, commands
from patchkit.errors import DriftError
from patchkit.recipes.vllm.external import ROOT_FILE, for_cuda
from patchkit.source.tree import SourceTree

_PROJECT = "pyproject.toml"
_GCC = "CMAKE_CXX_COMPILER_VERSION VERSION_LESS"


def stated_needs(tree: SourceTree) -> dict[str, Any]:
    """Return what the files of a tree say, by the names of Needs."""
    # Branches for ROCm or CPUs may set the same variables.
    calls = [
        call
        for call in commands(tree.read(ROOT_FILE), ROOT_FILE)
        if for_cuda(call.block)
    ]
    try:
        project = tomllib.loads(tree.read(_PROJECT))
    except tomllib.TOMLDecodeError as error:
        raise DriftError(
            f"{_PROJECT}: {error}", hint="restore it from the release"
        ) from None
    torch = _set(calls, "TORCH_SUPPORTED_VERSION_CUDA")
    pinned = {
        r.name: str(r.specifier)
        for r in map(Requirement, project["build-system"]["requires"])
    }
    if pinned.get("torch") != f"=={torch}":
        raise DriftError(
            f"{_PROJECT}: torch{pinned.get('torch', ' is missing')}, but {ROOT_FILE} has {torch}",
            why="one of the two was edited",
            hint="restore both files from the release",
        )
    return {
        "torch": torch,
        "python": project["project"]["requires-python"],
        "standard": int(_set(calls, "CMAKE_CXX_STANDARD")),
        "gcc": max(_gcc(calls), key=Version, default=""),
        "patch": any(_runs_patch(call, torch) for call in calls),
    }


def _set(calls: Iterable[Command], variable: str) -> str:
    """Return the one value that the file sets a variable to. Raises DriftError for none, or two."""
    found = {
        call.arguments[1].value
        for call in calls
        if call.name == "set"
        and len(call.arguments) > 1
        and call.arguments[0].value == variable
    }
    if len(found) != 1:
        raise DriftError(
            f"{ROOT_FILE}: {variable} is set to {len(found)} values, expected 1",
            why="upstream rewrote it, or the file was edited by hand",
            hint="compare it with the release",
        )
    return found.pop()


def _gcc(calls: Iterable[Command]) -> Iterator[str]:
    """Return the versions of GCC below which the file stops."""
    for call in calls:
        if (
            call.name == "message"
            and call.arguments[:1]
            and call.arguments[0].value == "FATAL_ERROR"
        ):
            for branch in call.block:
                text = " ".join(branch.condition)
                if match := re.search(rf"{_GCC} ([\d.]+)", text):
                    yield match[1]


def _runs_patch(call: Command, torch: str) -> bool:
    """Check whether a command runs ``patch`` for a torch that its branches do not exclude."""
    values = [argument.value for argument in call.arguments]
    if call.name != "execute_process" or "patch" not in values:
        return False
    conditions = (" ".join(branch.condition) for branch in call.block)
    limits = (
        re.search(r"Torch_VERSION VERSION_LESS ([\d.]+)", text) for text in conditions
    )
    return all(Version(torch) < Version(limit[1]) for limit in limits if limit)
