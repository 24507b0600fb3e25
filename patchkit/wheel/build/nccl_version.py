"""Choose which NCCL to build: the one that the torch beside it pins."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from packaging.version import Version

from patchkit.errors import SourceError, UsageError
from patchkit.source.releases import ReleaseFacts, load_facts
from patchkit.wheel.file.metadata import WheelMetadata, read_metadata
from patchkit.wheel.file.wheelfile import WheelFile

# From torch 2.11 on the wheels pin cu13; a wheel for CUDA 12 has the other name.
_NCCL = re.compile(r"nvidia-nccl-cu\d+")


def default_version(house: Path | None) -> tuple[Version, str]:
    """Return the NCCL to build for the wheels in a wheelhouse, and why that one, in words.

    A torch wheel pins it itself; a vLLM wheel pins its torch, and the recipe says what that pins;
    without either it is the recipe's default. Raises UsageError if two wheels want different ones,
    a torch is newer than the recipe, or a wheel cannot be read.
    """
    facts = load_facts()
    found = dict(_pins(house, facts)) if house is not None and house.is_dir() else {}
    if not found:
        return facts.default, "the recipe's default: no torch or vLLM wheel says otherwise"
    if len(found) > 1:
        raise UsageError(
            f"{house}: its wheels want {len(found)} versions of NCCL\n"
            + "\n".join(f"  {version}: {reason}" for version, reason in sorted(found.items())),
            hint="name one with --version, or remove a wheel",
        )
    return next(iter(found.items()))


def _pins(house: Path, facts: ReleaseFacts) -> Iterator[tuple[Version, str]]:
    torches = sorted(house.glob("torch-*.whl"))
    for wheel in torches:
        for name, pin in _read(wheel).pins.items():
            if _NCCL.fullmatch(name):
                yield Version(pin), f"{wheel.name} requires {name}=={pin}"
    for wheel in [] if torches else sorted(house.glob("vllm-*.whl")):
        if torch := _read(wheel).pins.get("torch"):
            series = ".".join(torch.split(".")[:2])
            if series not in facts.torch:
                raise UsageError(
                    f"{wheel.name} requires torch {torch}, and the recipe does not know its NCCL",
                    why=f"the recipe knows torch {', '.join(facts.torch)}",
                    hint="name one with --version: `pip download --no-deps torch` and its METADATA "
                    "say which",
                )
            yield facts.torch[series].version, f"{wheel.name} requires torch=={torch}"


def _read(path: Path) -> WheelMetadata:
    try:
        with WheelFile(path) as wheel:
            metadata = read_metadata(wheel)
        fault = metadata.faults[0] if metadata.faults else ""
    except SourceError as error:
        fault = error.what.removeprefix(str(path)).lstrip(": ")
    if fault:
        raise UsageError(
            f"{path}: its requirements cannot be read: {fault}",
            why="the file is damaged, or no wheel",
            hint="remove it from the wheelhouse, or build it again",
        )
    return metadata
