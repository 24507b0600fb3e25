"""Tell what a release needs of Python and of the machine: as recorded, and as its files say."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from patchkit.edit.cmake import Command, commands
from patchkit.errors import DriftError, SourceError
from patchkit.paths import RECIPES
from patchkit.recipes.vllm.build import BUILD_FILE
from patchkit.recipes.vllm.external import ROOT_FILE, for_cuda
from patchkit.records import read_toml, record
from patchkit.source.tree import SourceTree

_PROJECT = "pyproject.toml"
_REQUIREMENTS = RECIPES / "vllm" / "requirements"
_GCC = "CMAKE_CXX_COMPILER_VERSION VERSION_LESS"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOnIndex:
    """A torch of the package index: CPU → the CUDA that its wheel is for, "" for none."""

    version: str
    cuda: Mapping[str, str]


def read_needs(tree: SourceTree, *, release: bool) -> Needs:
    """Return what a tree needs. Raises DriftError if a known release says otherwise than recorded.

    For any other tree its own files decide; they say too little of the Rust front end, so that is
    taken from the newest release.
    """
    recorded = recorded_needs(tree.version)
    stated = stated_needs(tree)
    wrong = {name: value for name, value in stated.items() if getattr(recorded, name) != value}
    if wrong and release:
        name, value = next(iter(wrong.items()))
        raise DriftError(
            f"{tree.root}: vLLM {tree.version} says {name} = {value!r}, "
            f"recorded is {getattr(recorded, name)!r}",
            why="the tree is not the release that it says it is, or it was edited",
            hint="compare it with the release; the record stands in recipes/vllm/build.toml",
        )
    return Needs(**{**{f.name: getattr(recorded, f.name) for f in fields(Needs)}, **stated})


def recorded_needs(version: Version) -> Needs:
    """Return what the recipe has for a release, or for the newest one before it."""
    base = Version(version.base_version)
    merged: dict[str, Any] = {}
    for entry in read_toml(tuple[dict[str, Any], ...], BUILD_FILE, key="needs"):
        # Each entry has only what changed, from the oldest release to the newest.
        if Version(entry["from"]) <= base:
            merged |= {name: value for name, value in entry.items() if name != "from"}
    return record(Needs, merged)


def torches() -> tuple[TorchOnIndex, ...]:
    """Return every torch that some release takes."""
    return read_toml(tuple[TorchOnIndex, ...], BUILD_FILE, key="torch")


def locked_requirements(torch: str, given: Path | None = None) -> Path:
    """Return the file that locks the build environment for a torch.

    Raises SourceError, with the reason, where the package index has no such torch for CUDA 13.
    """
    if given is not None:
        return given
    path = _REQUIREMENTS / f"torch-{torch}.txt"
    if path.is_file():
        return path
    has = next((each.cuda for each in torches() if each.version == torch), None)
    offered = "; ".join(
        f"on {cpu} {f'for CUDA {c}' if c else 'for CPUs alone'}" for cpu, c in (has or {}).items()
    )
    raise SourceError(
        f"torch {torch} for CUDA 13 is not on the package index, so nothing is locked for it",
        why=f"the index has it {offered}" if has else "no supported release takes this torch",
        hint="the index that the PyTorch project keeps for cu130 has it: lock it there with "
        "`uv pip compile --generate-hashes` and name the file with --requirements; vLLM 0.20.0 and "
        "later take a torch that is locked here",
    )


def stated_needs(tree: SourceTree) -> dict[str, Any]:
    """Return what the files of a tree say, by the names of Needs."""
    # Branches for ROCm or CPUs may set the same variables.
    calls = [call for call in commands(tree.read(ROOT_FILE), ROOT_FILE) if for_cuda(call.block)]
    try:
        project = tomllib.loads(tree.read(_PROJECT))
    except tomllib.TOMLDecodeError as error:
        raise DriftError(f"{_PROJECT}: {error}", hint="restore it from the release") from None
    torch = _set(calls, "TORCH_SUPPORTED_VERSION_CUDA")
    pinned = {
        r.name: str(r.specifier) for r in map(Requirement, project["build-system"]["requires"])
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
        if call.name == "set" and len(call.arguments) > 1 and call.arguments[0].value == variable
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
    limits = (re.search(r"Torch_VERSION VERSION_LESS ([\d.]+)", text) for text in conditions)
    return all(Version(torch) < Version(limit[1]) for limit in limits if limit)
