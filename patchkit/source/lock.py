"""Locks: which files of a project's releases are known, and by which sha256.

A lock is a TOML file of ``[[sdist]]`` or ``[[wheel]]`` tables.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from packaging.utils import parse_wheel_filename
from packaging.version import InvalidVersion, Version

from patchkit.errors import SourceError, StorageError

T = TypeVar("T")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FILENAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]*")
_LINUX = re.compile(r"\w*linux(?:\d+|_\d+_\d+)?_([a-z]\w*)")
_LOCK_HEADER = """\
# The {what} that patchkit knows, with their sizes in bytes.
#
# Do not edit by hand. Regenerate with patchkit.source.fetch, which asks the package index:
#     {how}
"""
_LOCKS = {
    "sdist": ("source distributions", "render_lock(lock_entries(project, versions))"),
    "wheel": ("wheels", 'render_lock(wheel_entries(project, versions, cpus), "wheel")'),
}


@dataclass(frozen=True, slots=True)
class LockEntry:
    """One file of a release: ``sha256`` in lower-case hex, ``size`` in bytes."""

    version: str
    filename: str
    sha256: str
    size: int


def read_lock(path: Path) -> dict[str, LockEntry]:
    """Return the entries of a lock of sdists by version.

    Raises SourceError, naming the file and the key, if it is not a lock; StorageError if it
    cannot be read.
    """
    return _read(path, "sdist", _by_version)


def read_wheel_lock(path: Path) -> dict[str, dict[str, LockEntry]]:
    """Return the entries of a lock of wheels by CPU, as platform tags name it, then by version.

    Raises as ``read_lock`` does.
    """
    return _read(path, "wheel", _by_cpu)


def _read(path: Path, kind: str, ordered: Callable[[list[LockEntry]], T]) -> T:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StorageError(
            f"cannot read the lock {path}: {error.strerror or error}",
            why="the disk fails, or the permissions do not allow it",
            hint="check the file",
        ) from error
    try:
        tables = _tables(tomllib.loads(data.decode()), kind)
        return ordered([_entry(t, f"[[{kind}]] number {n}") for n, t in enumerate(tables, start=1)])
    except ValueError as error:
        raise SourceError(
            f"{path} is not a valid lock: {error}",
            why="it was edited by hand, or it is of another patchkit version",
            hint="restore the file, for example by installing patchkit again",
        ) from error


def _tables(document: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """Return the tables of a lock. This and its helpers raise ValueError about a bad lock."""
    _require_keys(document, {kind}, "the file")
    tables = document[kind]
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"the key {kind!r} is not an array of tables")
    return tables


def _by_version(listed: list[LockEntry]) -> dict[str, LockEntry]:
    entries: dict[str, LockEntry] = {}
    for entry in listed:
        if entry.version in entries:
            raise ValueError(f"the version {entry.version!r} is there twice")
        entries[entry.version] = entry
    return entries


def _by_cpu(listed: list[LockEntry]) -> dict[str, dict[str, LockEntry]]:
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


def _entry(table: dict[str, Any], where: str) -> LockEntry:
    _require_keys(table, {field.name for field in fields(LockEntry)}, where)
    valid = {
        "version": isinstance(table["version"], str) and is_version(table["version"]),
        # The name becomes part of a path in the cache, so it must not be able to leave it.
        "filename": _matches(_FILENAME, table["filename"]),
        "sha256": _matches(_SHA256, table["sha256"]),
        "size": type(table["size"]) is int and table["size"] > 0,
    }
    for key, fine in valid.items():
        if not fine:
            raise ValueError(f"{where} has a bad value for the key {key!r}: {table[key]!r}")
    return LockEntry(**table)


def _require_keys(table: dict[str, Any], expected: set[str], where: str) -> None:
    for key in sorted(expected - table.keys()):
        raise ValueError(f"{where} lacks the key {key!r}")
    for key in sorted(table.keys() - expected):
        raise ValueError(f"{where} has the unknown key {key!r}")


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def render_lock(entries: Iterable[LockEntry], kind: str = "sdist") -> str:
    """Return the text of a lock of one kind of file, in the order of the versions."""
    ordered = sorted(entries, key=lambda entry: Version(entry.version))
    what, how = _LOCKS[kind]
    header = _LOCK_HEADER.format(what=what, how=how)
    return "\n".join([header, *(_render_entry(entry, kind) for entry in ordered)])


def _render_entry(entry: LockEntry, kind: str) -> str:
    lines = [
        f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}"
        for key, value in asdict(entry).items()
    ]
    return "\n".join([f"[[{kind}]]", *lines, ""])
