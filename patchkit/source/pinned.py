"""Which NCCL to build: the one that the torch beside it pins."""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from patchkit.errors import UsageError
from patchkit.source.releases import ReleaseFacts, load_facts

# From torch 2.11 on the wheels pin cu13; a wheel for CUDA 12 has the other name.
_NCCL = re.compile(r"nvidia-nccl-cu\d+")


def default_version(house: Path | None) -> tuple[Version, str]:
    """The NCCL to build for the wheels in a wheelhouse, and why that one, in words.

    A torch wheel says it itself; a vLLM wheel names its torch, and the recipe what that pins;
    without either it is the recipe's default. Raises UsageError if two wheels want different ones,
    or a torch is newer than the recipe.
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
        for requirement in _requirements(wheel):
            if _NCCL.fullmatch(canonicalize_name(requirement.name)) and (pin := _pin(requirement)):
                yield pin, f"{wheel.name} requires {requirement.name}=={pin}"
    for wheel in [] if torches else sorted(house.glob("vllm-*.whl")):
        for requirement in _requirements(wheel):
            if canonicalize_name(requirement.name) == "torch" and (pin := _pin(requirement)):
                yield _of_torch(pin, wheel, facts), f"{wheel.name} requires torch=={pin}"


def _of_torch(torch: Version, wheel: Path, facts: ReleaseFacts) -> Version:
    series = f"{torch.major}.{torch.minor}"
    if series in facts.torch:
        return facts.torch[series]
    raise UsageError(
        f"{wheel.name} requires torch {torch}, and the recipe does not know its NCCL",
        why=f"the recipe knows torch {', '.join(facts.torch)}",
        hint="name one with --version: `pip download --no-deps torch` and its METADATA say which",
    )


def _pin(requirement: Requirement) -> Version | None:
    """The one version that a requirement allows, None if it allows several."""
    exact = [each.version for each in requirement.specifier if each.operator == "=="]
    return Version(exact[0]) if len(exact) == 1 and "*" not in exact[0] else None


def _requirements(wheel: Path) -> Iterator[Requirement]:
    """Requires-Dist of a wheel; of extras not."""
    try:
        with zipfile.ZipFile(wheel) as bundle:
            names = [n for n in bundle.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n)]
            text = bundle.read(names[0]).decode()
        lines = HeaderParser().parsestr(text).get_all("Requires-Dist") or []
        parsed = [Requirement(line) for line in lines]
    except (
        OSError,
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        IndexError,  # no METADATA at all
        RuntimeError,  # encrypted, or a compression that zipfile does not know
        ValueError,  # no UTF-8, or a requirement that is none
    ) as e:
        raise UsageError(
            f"{wheel}: its requirements cannot be read: {e}",
            why="the file is damaged, or no wheel",
            hint="remove it from the wheelhouse, or build it again",
        ) from None
    yield from (each for each in parsed if "extra" not in str(each.marker or ""))
