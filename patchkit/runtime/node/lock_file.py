"""Read from the lock of a wheelhouse which versions a node will have installed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from patchkit.errors import UsageError
from patchkit.reading import read_text

_LOCK = "requirements.txt"
# A line of a lock: nvidia-nccl-cu13==2.30.7+gb10.0a1b2c ; platform_machine == "aarch64" --hash=…
_LINE = re.compile(r"(?P<project>[\w.-]+)==(?P<public>[\w.!]+)(?:\+[\w.]+)?(?=[\s;]|$)")
_ASKED = {"vllm": "vllm", "triton": "triton", "nccl": r"nvidia-nccl-cu\d+"}


def locked_versions(place: Path) -> Mapping[str, str]:
    """Return the public versions of vllm, triton and nccl that a lock names, those that it has.

    ``place`` is the file, or the wheelhouse with it. Raises UsageError if it names none of them,
    or two versions of one; SourceError, StorageError.
    """
    path = place / _LOCK if place.is_dir() else place
    lines = read_text(path, hint="name a wheelhouse, or its requirements.txt").splitlines()
    matches = [match for line in lines if (match := _LINE.match(line))]
    found = {}
    for name, pattern in _ASKED.items():
        versions = {each["public"] for each in matches if re.fullmatch(pattern, each["project"])}
        if len(versions) > 1:
            several = " and ".join(sorted(versions))
            raise UsageError(f"{path}: locks {name} {several}", hint=f"say which with --{name}")
        if versions:
            found[name] = versions.pop()
    if not found:
        raise UsageError(
            f"{path}: locks none of {', '.join(_ASKED)}",
            hint="name the requirements.txt that patchkit wrote into a wheelhouse",
        )
    return found
