"""Locks: which files of a project's releases are known, and by which sha256.

A lock is a TOML file of ``[[sdist]]`` or ``[[wheel]]`` tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from packaging.utils import parse_wheel_filename
from packaging.version import Version

from patchkit.errors import SourceError, StorageError
from patchkit.records import RecordError, Sha256, matching, read_toml

T = TypeVar("T")
# The name becomes part of a path in the cache, so it must not be able to leave it.
_Filename = Annotated[str, matching(r"[A-Za-z0-9][A-Za-z0-9._+!-]*", "the name of a file")]
# manylinux_2_28_aarch64 (PEP 600), manylinux2014_x86_64, musllinux_1_2_x86_64, linux_x86_64.
_LINUX = re.compile(r"\w*linux(?:\d+|_\d+_\d+)?_([a-z]\w*)")


def _require_positive(number: int) -> None:
    if number <= 0:
        raise RecordError(f"is {number}, not a number of bytes")


@dataclass(frozen=True, slots=True)
class LockEntry:
    """One file of a release: ``sha256`` in lower-case hex, ``size`` in bytes."""

    version: Annotated[str, Version]
    filename: _Filename
    sha256: Sha256
    size: Annotated[int, _require_positive]


@dataclass(frozen=True, slots=True)
class _Sdists:
    sdist: tuple[LockEntry, ...]

    def __post_init__(self) -> None:
        _by_version(self.sdist)


@dataclass(frozen=True, slots=True)
class _Wheels:
    wheel: tuple[LockEntry, ...]

    def __post_init__(self) -> None:
        _by_cpu(self.wheel)


def read_lock(path: Path) -> dict[str, LockEntry]:
    """Return the entries of a lock of sdists by version.

    Raises SourceError, naming the file and the key, if it is not a lock; StorageError if it
    cannot be read.
    """
    return _by_version(_read_lock_file(_Sdists, path).sdist)


def read_wheel_lock(path: Path) -> dict[str, dict[str, LockEntry]]:
    """Return the entries of a lock of wheels by CPU, as platform tags name it, then by version.

    Raises as ``read_lock`` does.
    """
    return _by_cpu(_read_lock_file(_Wheels, path).wheel)


def _read_lock_file(kind: type[T], path: Path) -> T:
    try:
        return read_toml(kind, path, error=SourceError)
    except OSError as error:
        raise StorageError(
            f"cannot read the lock {path}: {error.strerror or error}",
            why="the disk fails, or the permissions do not allow it",
            hint="check the file",
        ) from error


def _by_version(listed: Iterable[LockEntry]) -> dict[str, LockEntry]:
    entries: dict[str, LockEntry] = {}
    for entry in listed:
        if entry.version in entries:
            raise ValueError(f"the version {entry.version!r} is there twice")
        entries[entry.version] = entry
    return entries


def _by_cpu(listed: Iterable[LockEntry]) -> dict[str, dict[str, LockEntry]]:
    cpus: dict[str, list[LockEntry]] = {}
    for entry in listed:
        for cpu in wheel_cpus(entry.filename):
            cpus.setdefault(cpu, []).append(entry)
    return {cpu: _by_version(entries) for cpu, entries in cpus.items()}


def wheel_cpus(filename: str) -> list[str]:
    """Return the CPUs that a wheel's tags name: ``aarch64`` of ``manylinux_2_28_aarch64``.

    Raises ValueError if that is not the name of a wheel.
    """
    tags = parse_wheel_filename(filename)[3]
    return sorted({match[1] for tag in tags if (match := _LINUX.fullmatch(tag.platform))})
