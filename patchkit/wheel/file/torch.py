"""Tell a torch for CUDA from a torch for CPUs alone, in a wheel or in a Python.

An index may have both kinds under one version.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from patchkit.errors import BuildError, HostError
from patchkit.frozen import frozen
from patchkit.process import ask

_LIBRARY = "torch/lib/libtorch_cuda.so"
_LABEL = re.compile(r"cu(?P<major>\d{2})\d?(?:\.|$)")  # of 2.11.0+cu130
_NAMED = re.compile(r"nvidia-.+-cu(?P<major>\d{2})")  # nvidia-nccl-cu13
_CUDA = ("nvidia-", "cuda-")
_ASK = """\
import torch
answer = {"version": str(torch.__version__), "cuda": torch.version.cuda or ""}
"""


@dataclass(frozen=True, slots=True)
class Torch:
    """The torch of a wheel.

    ``cuda`` is the major version, 0 if the wheel does not say it; None means for CPUs alone.
    ``seen`` is the evidence, in words.
    """

    version: Version
    cuda: int | None
    seen: str


def torch_of(
    version: Version,
    requires: Iterable[str],
    members: Collection[str] | None = None,
) -> Torch:
    """Tell the kind of a torch from the requirements that hold on its machine.

    ``members`` are the paths in its wheel, where that is at hand. Wheels for CUDA require NVIDIA's
    libraries, or have them inside and say so in their local version.
    """
    names = [
        canonicalize_name(Requirement(requirement).name) for requirement in requires
    ]
    major = _named_cuda(version, names)

    if members is not None:
        if _LIBRARY in members:
            return Torch(version, major, f"it has {_LIBRARY}")
        return Torch(version, None, f"it has no {_LIBRARY}")

    nvidia = [name for name in names if name.startswith(_CUDA)]
    if nvidia:
        return Torch(version, major, f"it requires {', '.join(nvidia[:2])} …")
    if major:
        return Torch(version, major, f"its version is {version}")
    return Torch(version, None, "it requires none of NVIDIA's libraries there")


def _named_cuda(version: Version, names: Iterable[str]) -> int:
    """Return the CUDA that a label or the name of a required package tells, 0 if none does."""
    if label := _LABEL.match(version.local or ""):
        return int(label["major"])

    matches = filter(None, map(_NAMED.fullmatch, names))
    return max((int(match["major"]) for match in matches), default=0)


_REINSTALL = "remove {} and run again, if patchkit made it; else install torch anew"


@frozen
class InstalledTorch:
    """The torch of a Python: ``2.11.0+cu130`` and ``13.0``, or "" without CUDA."""

    python: Path
    version: str
    cuda: str


def installed_torch(python: Path) -> InstalledTorch:
    """Return the torch that an interpreter imports. Raises BuildError if it imports none."""
    try:
        return InstalledTorch(python=python, **ask(python, _ASK))
    except HostError as error:
        raise BuildError(
            f"torch cannot be imported: {error.what}",
            why="the environment is damaged, or a library that torch needs is missing",
            hint=_REINSTALL.format(python.parents[1]),
        ) from error


def require_torch(torch: InstalledTorch, version: str, cuda: str) -> None:
    """Raise BuildError unless it is this release, with that CUDA or a later one of its major."""
    # The label says which index it is from, and torch itself says its CUDA.
    is_release = torch.version.partition("+")[0] == version
    is_major = torch.cuda.partition(".")[0] == cuda.partition(".")[0]
    if is_release and is_major and Version(torch.cuda) >= Version(cuda):
        return

    kind = "no CUDA: it is for CPUs alone"
    if torch.cuda:
        kind = f"CUDA {torch.cuda}"
    raise BuildError(
        f"before the build, torch is {torch.version} with {kind}; "
        f"wanted: {version} with CUDA {cuda}",
        why="something replaced it: for some releases the package index has torch for CPUs, or for "
        "CUDA 12, under the same version",
        hint=f"{_REINSTALL.format(torch.python.parents[1])}; torch for CUDA 13 comes from the "
        "index that the PyTorch project keeps for it",
    )
