"""What --vllm-src may name: a folder, an sdist file, or a release of the lock."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from patchkit.errors import SourceError, UsageError
from patchkit.source.detect import detect

_RELEASE = re.compile(r"(?P<project>[A-Za-z0-9._-]+)==(?P<version>[^/]+)")
Progress = Callable[[int, int], None]  # bytes done, bytes in all
Report = Callable[[str], Progress]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is known of the project, and what the user wants.

    ``lock`` names its releases, ``check`` refuses unsupported ones; ``dest`` is where archives are
    unpacked; ``report(task)`` gives a progress callback.
    """

    project: str
    lock: Path
    check: Callable[[Version], None]
    report: Report
    dest: Path | None = None
    offline: bool = False


@contextlib.contextmanager
def resolved(spec: str, options: Options, *, keep: bool) -> Iterator[Path]:
    """The folder that ``spec`` names.

    An archive or a release is unpacked into ``options.dest`` (default ``build/PROJECT-VERSION``),
    or into a folder that is removed again if nobody wants to ``keep`` it.
    """
    archive, version = _archive(spec, options)
    if archive is None:
        if options.dest is not None:
            raise UsageError(
                f"{spec} is a folder and is patched in place; --dest is for archives and releases",
                hint=f"cp -a {spec} {options.dest}, then name the copy",
            )
        yield Path(spec)
    elif keep or options.dest is not None:
        yield _unpacked(
            archive, options.dest or Path("build") / f"{options.project}-{version}", options
        )
    else:
        with tempfile.TemporaryDirectory(prefix="patchkit-") as folder:
            yield _unpack(archive, Path(folder) / "tree", options)


def fetch_release(spec: str, options: Options) -> Path:
    """The sdist of ``vllm==X.Y.Z`` in the cache, verified against the lock."""
    version = _release(spec, options.project)
    if version is None:
        raise UsageError(
            f"{spec!r} names no release", hint=f"for example {options.project}==0.24.0"
        )
    from patchkit.source.fetch import fetch, read_lock  # a tree in a folder needs no downloads

    lock = read_lock(options.lock)
    progress = options.report(f"Fetching {spec}")
    return fetch(options.project, version, lock, offline=options.offline, progress=progress)


def _archive(spec: str, options: Options) -> tuple[Path | None, str]:
    path = Path(spec)
    if path.is_dir():
        return None, ""
    if path.is_file():
        name = re.match(
            r"(?P<project>.+?)-(?P<version>\d[^-]*?)(\.tar\.gz|\.tar|\.zip)$", path.name
        )
        return path, name["version"] if name else path.stem
    version = _release(spec, options.project)
    if version is None:
        raise SourceError(
            f"{spec}: no such file or directory",
            hint="name an unpacked sdist, a git checkout, an sdist file, an installed "
            f"site-packages/{options.project}, or a release such as {options.project}==0.24.0",
        )
    options.check(Version(version))
    return fetch_release(spec, options), version


def _release(spec: str, project: str) -> str | None:
    match = _RELEASE.fullmatch(spec)
    if match is None or match["project"].lower() != project:
        return None
    try:
        return str(Version(match["version"]))
    except InvalidVersion:
        raise UsageError(f"{match['version']!r} is not a version") from None


def _unpacked(archive: Path, dest: Path, options: Options) -> Path:
    if dest.is_dir() and any(dest.iterdir()):
        # A second run names the same release: the tree of the first is the one to work on.
        tree = detect(dest)
        if not archive.name.startswith(f"{tree.project}-{tree.version}."):
            raise SourceError(
                f"{dest}: holds {tree.project} {tree.version}, not {archive.name}",
                hint="name another --dest",
            )
        return dest
    return _unpack(archive, dest, options)


def _unpack(archive: Path, dest: Path, options: Options) -> Path:
    from patchkit.source.archive import unpack

    return unpack(archive, dest, progress=options.report("Unpacking"))
