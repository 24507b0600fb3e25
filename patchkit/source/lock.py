"""Locks: which files of a project's releases are known, and by which sha256.

A lock is a TOML file of ``[[sdist]]`` or ``[[wheel]]`` tables.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from packaging.utils import parse_wheel_filename
from packaging.version import Version

from patchkit.errors import SourceError
from patchkit.records import Sha256, matching, read_toml

# The name becomes part of a path in the cache, so it must not be able to leave it.
_Filename = Annotated[str, matching(r"[A-Za-z0-9][A-Za-z0-9._+!-]*", "the name of a file")]
# manylinux_2_28_aarch64 (PEP 600), manylinux2014_x86_64, musllinux_1_2_x86_64, linux_x86_64.
_LINUX = re.compile(r"\w*linux(?:\d+|_\d+_\d+)?_([a-z]\w*)")


@dataclass(frozen=True, slots=True)
class LockEntry:
    """One file of a release: ``sha256`` in lower-case hex, ``size`` in bytes."""

    version: Annotated[str, Version]
    filename: _Filename
    sha256: Sha256
    size: int


def read_lock(path: Path) -> dict[str, LockEntry]:
    """Return the entries of a lock of sdists by version.

    Raises SourceError, naming the file and the key, if it is not a lock.
    """
    return _by_version(path, read_toml(tuple[LockEntry, ...], path, SourceError, key="sdist"))


def read_wheel_lock(path: Path) -> dict[str, dict[str, LockEntry]]:
    """Return the entries of a lock of wheels by CPU, as platform tags name it, then by version.

    Raises as ``read_lock`` does.
    """
    cpus: dict[str, list[LockEntry]] = {}
    for entry in read_toml(tuple[LockEntry, ...], path, SourceError, key="wheel"):
        for cpu in wheel_cpus(entry.filename):
            cpus.setdefault(cpu, []).append(entry)
    return {cpu: _by_version(path, entries) for cpu, entries in cpus.items()}


def _by_version(path: Path, listed: Sequence[LockEntry]) -> dict[str, LockEntry]:
    entries = {entry.version: entry for entry in listed}
    if len(entries) < len(listed):
        raise SourceError(f"{path}: a version is there twice")
    return entries


def wheel_cpus(filename: str) -> list[str]:
    """Return the CPUs that a wheel's tags name: ``aarch64`` of ``manylinux_2_28_aarch64``.

    Raises ValueError if that is not the name of a wheel.
    """
    tags = parse_wheel_filename(filename)[3]
    return sorted({match[1] for tag in tags if (match := _LINUX.fullmatch(tag.platform))})
