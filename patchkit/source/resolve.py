"""Turn a source that a command line names into a folder with its files.

A source is a folder, an archive, a commit or a release.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from packaging.version import Version

from patchkit.digests import sha256_of
from patchkit.durable.signals import committed
from patchkit.durable.staging import ScratchFolder
from patchkit.errors import SourceError, UsageError
from patchkit.frozen import positional
from patchkit.quoting import quoted
from patchkit.records import RECIPES_VARIABLE
from patchkit.source.archive import unpack
from patchkit.source.detect import detect, named_release
from patchkit.source.fetch import Progress, fetch, lock_files
from patchkit.source.origin import SourceOrigin, find_origin
from patchkit.source.project import (
    example,
    is_shipped,
    projects,
    recipe_folder,
)
from patchkit.source.releases import LockEntry, load_facts, read_lock

Report = Callable[[str], Progress]


Check = Callable[[Version], None]
"""A function that raises SourceError for a release that is not supported."""


@positional
class SourceOptions:
    """A source as a command line names it, and how to get it.

    ``sha256`` is the digest of an archive that the recipe does not have. If the source is
    ``trusted``, its code runs without a sandbox.
    """

    project: str
    spec: str
    offline: bool = False
    sha256: str | None = None
    trusted: bool = False


@positional
class Resolved:
    """A folder with sources.

    ``locked`` says that this run unpacked it from an archive whose hash patchkit knows.
    """

    path: Path
    locked: bool = False


@contextlib.contextmanager
def resolved(
    source: SourceOptions,
    check: Check,
    report: Report,
    *,
    keep: bool,
) -> Iterator[Resolved]:
    """Yield the folder with the sources that a user names.

    An archive, commit or release is unpacked below ``build/``; without ``keep``, into a temporary
    folder that is removed at the end. If a release was patched in ``build/PROJECT-VERSION`` before,
    that tree is used. ``report(task)`` returns the progress callback for a task. Raises UsageError
    or SourceError for a wrong source, and as ``unpack`` and ``fetch`` do.
    """
    before = _release_folder(source.spec, source.project)
    if before is not None and (before / ".patchkit").is_dir():
        yield Resolved(before)
        return

    archive = _find_archive(source, check, report)
    if archive is None:
        yield Resolved(Path(source.spec))
    elif keep:
        yield _unpack_to_keep(archive, source.project)
    else:
        with ScratchFolder() as scratch:
            tree = unpack(archive.path, Path(scratch) / "tree")
            yield Resolved(tree, archive.locked)


def _unpack_to_keep(archive: _Archive, project: str) -> Resolved:
    """Unpack an archive into its folder below build/, unless an earlier run has done so.

    Raises SourceError if the folder holds another version.
    """
    folder = Path("build") / f"{project}-{archive.label}"
    if folder.is_dir() and any(folder.iterdir()):
        # An earlier run has unpacked the same release: continue with its tree.
        _check_version(folder, project, archive.version)
        return Resolved(folder)

    root = unpack(archive.path, folder)
    # The folder stays from here on, so the message of an interrupt has to name it.
    committed(f"{folder} was unpacked")
    return Resolved(root, archive.locked)


def _release_folder(spec: str, project: str) -> Path | None:
    """Return the folder below build/ for a release; None if ``spec`` names no release.

    The folder may not exist. Raises SourceError if another version was patched there.
    """
    version = None if Path(spec).exists() else named_release(spec, project)
    if version is None:
        return None

    folder = Path("build") / f"{project}-{version}"
    if (folder / ".patchkit").is_dir():
        _check_version(folder, project, str(version))
    return folder


def patched_tree(spec: str, project: str) -> Path:
    """Return the folder of a patched tree; ``spec`` is its path, or a release.

    Raises UsageError if a release has no folder below build/.
    """
    folder = _release_folder(spec, project)
    if folder is None:
        return Path(spec)

    if not folder.is_dir():
        raise UsageError(
            f"{spec}: nothing of it is patched in {folder}",
            why="apply was run in another folder, or not at all",
            hint="name the folder that apply named: patchkit revert FOLDER",
        )
    return folder


def fetch_release(source: SourceOptions, check: Check, report: Report) -> Path:
    """Return the verified archive, in the cache, of a release such as ``vllm==X.Y.Z``.

    Raises UsageError if the source names no release, SourceError if the lock of a user's recipe
    does not have it, and as ``fetch`` or ``find_origin`` does.
    """
    project = source.project
    lock = recipe_folder(project) / "lock.toml"
    if load_facts(project).releases:
        version_of(source)
        return _origin_of(source, check).path

    entries = read_lock(lock) if lock.is_file() else {}
    return fetch_locked(source, lock, entries, check, report)


def locked_origin(
    project: str, version: Version, report: Report, *, offline: bool
) -> SourceOrigin:
    """Return the origin of a release on the package index, which its lock has by sha256.

    Raises as ``fetch_release`` does.
    """
    source = SourceOptions(project, f"{project}=={version}", offline=offline)
    path = fetch_release(source, lambda _version: None, report)
    identity = f"sha256:{sha256_of(path)}"
    return SourceOrigin(path=path, version=version, identity=identity)


def fetch_locked(
    source: SourceOptions,
    lock: Path,
    entries: Mapping[str, LockEntry],
    check: Check,
    report: Report,
) -> Path:
    """Return the file of a release in the cache; ``entries`` are those of ``lock``, by version.

    Raises UsageError if the source names no release, SourceError if a user's lock does not have it,
    and as ``check`` and ``fetch`` do.
    """
    version = version_of(source)
    if str(version) not in entries and not is_shipped(lock.parent):
        raise SourceError(
            f"{source.spec}: {lock} does not name it",
            why="what is fetched is checked by its sha256, which a lock names",
            hint=quoted("patchkit", "fetch", source.spec, "--lock"),
        )

    check(version)
    return fetch(
        projects()[source.project].distribution,
        str(version),
        entries,
        offline=source.offline,
        progress=report(f"Fetching {source.spec}"),
    )


def lock_release(source: SourceOptions, report: Report) -> Path:
    """Name a release in its project's locks; return its sdist, or else its wheel, in the cache.

    Raises UsageError if the source names no release or the lock is patchkit's own, and as
    ``lock_files`` does.
    """
    version = version_of(source)
    folder = recipe_folder(source.project)
    if is_shipped(folder):
        raise UsageError(
            f"{source.project}: its lock is patchkit's own",
            hint=f"name a folder of recipes with --recipes or {RECIPES_VARIABLE}",
        )
    distribution = projects()[source.project].distribution
    if not distribution:
        raise UsageError(
            f"{source.project}: its recipe names no distribution",
            why="a lock names files of a package index",
            hint="name a folder, an archive or git+URL@COMMIT; a [[release]] in recipe.toml "
            "names the commit of a release",
        )
    return lock_files(distribution, version, folder, report(f"Fetching {source.spec}"))


def version_of(source: SourceOptions) -> Version:
    """Return the version of a release. Raises UsageError if the source names none."""
    version = named_release(source.spec, source.project)
    if version is None:
        raise UsageError(
            f"{source.spec}: no such file, folder or release",
            hint=f"for example {example(source.project)}",
        )
    return version


def _origin_of(source: SourceOptions, check: Check) -> SourceOrigin:
    return find_origin(
        source.project,
        source.spec,
        sha256=source.sha256,
        offline=source.offline,
        check=check,
    )


@positional
class _Archive:
    """An archive to unpack, into ``build/PROJECT-LABEL`` if it is kept."""

    path: Path
    version: str
    label: str
    locked: bool = False


def _find_archive(
    source: SourceOptions, check: Check, report: Report
) -> _Archive | None:
    """Return the archive of a source, and fetch it if needed; None if the source is a folder.

    Raises UsageError if the source is neither a file, a folder, a git URL nor a release.
    """
    path = Path(source.spec)
    if path.is_dir():
        return None

    version = named_release(source.spec, source.project)
    has_lock = not load_facts(source.project).releases
    if path.is_file() and has_lock and source.sha256 is None:
        # The name of an sdist (PEP 625): vllm-0.19.1.tar.gz.
        name = re.match(r".+?-(\d[^-]*?)(\.tar\.gz|\.tar)$", path.name)
        label = name[1] if name else path.stem
        return _Archive(path, label, label)

    if version is not None:
        archive = fetch_release(source, check, report)
        return _Archive(archive, str(version), str(version), locked=True)

    origin = _origin_of(source, check)
    # Commits and archives of one version can differ, so a digest in the label tells them apart.
    digest = origin.identity.rpartition(":")[2][:8]
    label = f"{origin.version}-{digest}"
    return _Archive(origin.path, str(origin.version), label)


def _check_version(folder: Path, project: str, version: str) -> None:
    tree = detect(folder, project)
    if str(tree.version) != version:
        what = f"{folder}: holds {project} {tree.version}, not {version}"
        raise SourceError(what, hint=quoted("mv", folder, f"{folder}.other"))
