"""Tell a torch for CUDA from a torch for CPUs alone, in a wheel or in a Python.

An index may have both kinds under one version.
"""

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from patchkit.errors import BuildError, HostError
from patchkit.frozen import frozen, positional
from patchkit.process import ask

_LIBRARY = "torch/lib/libtorch_cuda.so"
_LABEL = r"cu(?P<major>\d{2})\d?(?:\.|$)"  # the label of 2.11.0+cu130
_NAMED = re.compile(r"nvidia-.+-cu(?P<major>\d{2})")  # a project: nvidia-nccl-cu13
_CUDA = ("nvidia-", "cuda-")
_ASK = """\
import torch
answer = {"version": str(torch.__version__), "cuda": torch.version.cuda or ""}
"""


@positional
class Torch:
    """The torch that a wheel holds.

    ``cuda`` is the major version of its CUDA, 0 if it is for CUDA but tells no version, None if it
    is for CPUs alone. ``seen`` is the evidence, in words.
    """

    version: Version
    cuda: int | None
    seen: str


def torch_of(
    version: Version,
    requires: Iterable[str],
    members: Collection[str] | None = None,
) -> Torch:
    """Return the torch of a wheel, with the CUDA that the wheel shows it to be for.

    ``requires`` are the requirements whose markers hold on the machine. ``members`` are the paths
    in the wheel, or None if the file is not there: then a wheel counts as for CUDA if it requires
    NVIDIA's libraries, or if its local version names a CUDA (the wheel holds the libraries then).
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
    """Return the major version of CUDA in the label of a version, or else in required projects.

    Return 0 if neither names one.
    """
    if label := re.match(_LABEL, version.local or ""):
        return int(label["major"])

    matches = filter(None, map(_NAMED.fullmatch, names))
    return max((int(match["major"]) for match in matches), default=0)


_REINSTALL = "remove {} and run again, if patchkit made it; else install torch anew"


@frozen
class InstalledTorch:
    """The torch that a Python imports: version ``2.11.0+cu130``, CUDA ``13.0`` ("" for none)."""

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
    """Raise BuildError unless a torch is the release ``version`` and has a CUDA that fits.

    A CUDA fits if it has the major version of ``cuda`` and is not older.
    """
    # The label (+cu130) is left out: torch.cuda tells the CUDA.
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
