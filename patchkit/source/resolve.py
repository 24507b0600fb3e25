"""Resolve what --vllm-src and --nccl-src name: a folder, an archive, a commit, a release."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from patchkit.durable.signals import committed
from patchkit.durable.staging import ScratchFolder
from patchkit.errors import SourceError, UsageError
from patchkit.quoting import quoted
from patchkit.source.detect import detect, projects, spelled
from patchkit.versions import meant, named_version

if TYPE_CHECKING:
    from patchkit.source.nccl import SourceOrigin

_RELEASE = re.compile(r"(?P<project>[A-Za-z0-9._-]+)==(?P<version>[^/]+)")
Progress = Callable[[int, int], None]  # bytes done, bytes in all
Report = Callable[[str], Progress]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Facts about the project, and the user's wishes.

    ``lock`` names its releases on the package index, ``check`` refuses unsupported ones; ``dest``
    is where archives are unpacked; ``report(task)`` gives a progress callback; ``sha256`` is what
    an archive must have that nothing else vouches for.
    """

    project: str
    lock: Path
    check: Callable[[Version], None]
    report: Report
    dest: Path | None = None
    offline: bool = False
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Resolved:
    """A folder; ``locked`` if this run has made it of an archive whose hash patchkit knows."""

    path: Path
    locked: bool = False


@contextlib.contextmanager
def resolved(spec: str, options: Options, *, keep: bool) -> Iterator[Resolved]:
    """Give the folder that ``spec`` names.

    An archive or a release is unpacked into ``options.dest`` (default ``build/PROJECT-VERSION``),
    or, without ``keep``, into a folder that is removed again. A release that was
    patched there before is that tree.
    """
    if options.dest is None and (before := patched_before(spec, options.project)):
        yield Resolved(before)
        return
    found = _find_archive(spec, options)
    if found is None:
        if options.dest is not None:
            raise UsageError(
                f"{spec} is a folder and is patched in place; --dest is for archives and releases",
                hint=f"{quoted('cp', '-a', Path(spec), options.dest)}; then name the copy",
            )
        yield Resolved(Path(spec))
    elif keep or options.dest is not None:
        dest = options.dest or _default_dest(options.project, found.label)
        yield _unpack_once(found, dest, options)
    else:
        with ScratchFolder() as folder:
            yield Resolved(
                _unpack_archive(found.path, Path(folder) / "tree", options), found.locked
            )


def patched_before(spec: str, project: str) -> Path | None:
    """Return the folder below build/ where an earlier run patched this release, if there is one.

    Raises SourceError if another version lies there.
    """
    if Path(spec).exists() or (version := _release(spec, project)) is None:
        return None
    folder = _default_dest(project, version)
    if not (folder / ".patchkit").is_dir():
        return None
    _check_version(folder, project, version)
    return folder


def patched_tree(spec: str, project: str) -> Path:
    """Return the folder that is or was patched, by its path or as a release below build/.

    Raises UsageError for a release that is not there.
    """
    version = None if Path(spec).exists() else _release(spec, project)
    if version is None:
        return Path(spec)
    folder = patched_before(spec, project) or _default_dest(project, version)
    if not folder.is_dir():
        raise UsageError(
            f"{spec}: nothing of it is patched in {folder}",
            why="apply was run in another folder, or with --dest, or not at all",
            hint="name the folder that apply named: patchkit revert FOLDER",
        )
    return folder


def _default_dest(project: str, label: str) -> Path:
    return Path("build") / f"{project}-{label}"


def fetch_release(spec: str, options: Options) -> Path:
    """Return the archive of ``vllm==X.Y.Z`` or ``nccl==X.Y.Z`` in the cache, verified."""
    version = _release(spec, options.project)
    if version is None:
        hint = meant(spec, projects()) or f"for example {projects()[options.project].example}"
        raise UsageError(f"{spec!r} names no release", hint=hint)
    if options.project == "nccl":
        return _nccl_origin(spec, options).path
    from patchkit.source.fetch import fetch  # a tree in a folder needs no downloads
    from patchkit.source.lock import read_lock

    lock = read_lock(options.lock)
    progress = options.report(f"Fetching {spec}")
    return fetch(options.project, version, lock, offline=options.offline, progress=progress)


def _nccl_origin(spec: str, options: Options) -> SourceOrigin:
    from patchkit.source.nccl import nccl_tree  # nothing of it is needed for vLLM

    return nccl_tree(spec, sha256=options.sha256, offline=options.offline, check=options.check)


@dataclass(frozen=True, slots=True)
class _Archive:
    """Something to unpack; ``label`` tells its default folder from others of the version."""

    path: Path
    version: str
    label: str
    locked: bool = False


def _find_archive(spec: str, options: Options) -> _Archive | None:
    """Return the archive that ``spec`` stands for; None for a folder."""
    path = Path(spec)
    if path.is_dir():
        return None
    if options.project == "nccl":
        origin = _nccl_origin(spec, options)
        label = str(origin.version)
        locked = _release(spec, options.project) is not None
        if not locked:
            # Commits and archives of one version differ; a release is one thing.
            label += f"-{origin.identity.rpartition(':')[2][:8]}"
        return _Archive(origin.path, str(origin.version), label, locked)
    if path.is_file():
        # vllm-0.19.1.tar.gz, as sdists are named (PEP 625).
        name = re.match(r"(?P<project>.+?)-(?P<version>\d[^-]*?)(\.tar\.gz|\.tar)$", path.name)
        named = name["version"] if name else path.stem
        return _Archive(path, named, named)
    version = _release(spec, options.project)
    if version is None:
        raise UsageError(
            f"{spec}: no such file or directory",
            hint=meant(spec, projects()) or f"name {spelled(options.project)}",
        )
    options.check(Version(version))
    return _Archive(fetch_release(spec, options), version, version, locked=True)


def _release(spec: str, project: str) -> str | None:
    match = _RELEASE.fullmatch(spec)
    if match is None or match["project"].lower() != project:
        return None
    return str(named_version(match["version"], f"for example {projects()[project].example}"))


def _unpack_once(archive: _Archive, dest: Path, options: Options) -> Resolved:
    if dest.is_dir() and any(dest.iterdir()):
        # A second run names the same release: the tree of the first is the one to work on.
        _check_version(dest, options.project, archive.version)
        return Resolved(dest)
    root = _unpack_archive(archive.path, dest, options)
    # An interrupt from here on says so, since the folder stays.
    committed(f"{dest} was unpacked")
    return Resolved(root, archive.locked)


def _check_version(folder: Path, project: str, version: str) -> None:
    tree = detect(folder, project)
    if str(tree.version) != version:
        raise SourceError(
            f"{folder}: holds {project} {tree.version}, not {version}",
            hint="name another --dest",
        )


def _unpack_archive(archive: Path, dest: Path, options: Options) -> Path:
    from patchkit.source.archive import unpack

    return unpack(archive, dest, progress=options.report("Unpacking"))
