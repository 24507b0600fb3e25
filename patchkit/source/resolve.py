"""Turn a source that a command line names into a folder with its files.

A source is a folder, an archive, a commit or a release. The identity of a folder is a digest of its
files. Other sources are verified: an archive by its sha256, a commit by git's own hashes, a release
by the sha256 or the commit in the recipe.toml of its project.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from packaging.version import Version

from patchkit.digests import sha256_of, tree_digest
from patchkit.durable.signals import committed
from patchkit.durable.staging import ScratchFolder
from patchkit.errors import (
    HashMismatchError,
    HostError,
    SourceError,
    StorageError,
    UsageError,
)
from patchkit.frozen import frozen, positional
from patchkit.quoting import quoted
from patchkit.records import RECIPES_VARIABLE
from patchkit.source.archive import unpack
from patchkit.source.detect import detect, named_release
from patchkit.source.fetch import Progress, cache_dir, fetch, lock_files
from patchkit.source.git import GitSource, commit_archive, parse_git
from patchkit.source.project import (
    describe_sources,
    example,
    is_shipped,
    projects,
    recipe_folder,
)
from patchkit.source.releases import (
    LockEntry,
    Release,
    load_facts,
    read_lock,
)

_SHA256 = r"[0-9a-f]{64}"


@frozen
class SourceOrigin:
    """Sources on this machine, and their identity.

    ``path`` is a folder, or an archive for ``source.archive.unpack``. ``identity`` is ``sha256:``
    and the digest of an archive, ``git:`` and the id of a commit, or ``tree:sha256:`` and a digest
    of the files of a folder.
    """

    path: Path
    version: Version
    identity: str


def find_origin(
    project: str,
    spec: str,
    *,
    sha256: str | None = None,
    offline: bool = False,
    check: Callable[[Version], None] = lambda _version: None,
) -> SourceOrigin:
    """Return the sources that ``spec`` names, and fetch and verify them if necessary.

    ``spec`` is a folder, an archive, ``git+URL@COMMIT``, or ``nccl==2.29.7``. ``sha256`` is the
    digest of an archive, which is required for an archive that the recipe does not have. ``check``
    raises an error for an unsupported version; for a release, it is called before the release is
    fetched.

    Raises UsageError if ``spec`` names no source, SourceError if the sources cannot be used or
    verified, HashMismatchError for a wrong digest, StorageError or HostError if network, disk or a
    program fails.
    """
    if sha256 is not None:
        require_sha256(sha256)

    path = Path(spec)
    if path.is_dir():
        if sha256 is not None:
            raise UsageError(f"{path} is a folder; --sha256 is for an archive")
        version = detect(path, project).version
        identity = f"tree:sha256:{tree_digest(path.resolve())}"
        origin = SourceOrigin(path=path, version=version, identity=identity)
    elif path.is_file():
        origin = _take_archive(path, sha256, project)
    elif source := parse_git(spec):
        origin = _take_commit(source, project, offline=offline)
    elif release := named_release(spec, project):
        check(release)
        origin = _take_release(release, project, offline=offline)
    else:
        raise UsageError(
            f"{spec}: no such file or directory, and neither a git URL nor a release",
            hint=f"name {describe_sources(project)}",
        )

    check(origin.version)
    return origin


def require_sha256(text: str) -> None:
    """Raise UsageError for a text that is no sha256."""
    if not re.fullmatch(_SHA256, text):
        raise UsageError(
            f"{text!r} is not a sha256",
            hint="64 lower-case hex digits, as sha256sum prints them",
        )


def _take_archive(path: Path, sha256: str | None, project: str) -> SourceOrigin:
    """Return the origin of an archive that a user names.

    Raises HashMismatchError if the archive does not have the sha256 that the user gives,
    SourceError if the user gives none and the recipe does not have it.
    """
    actual = sha256_of(path)
    if sha256 is not None and actual != sha256:
        raise HashMismatchError(
            f"{path} has the sha256 {actual}, not {sha256}",
            why="it is damaged, or not the archive that was meant",
            hint="fetch it again, from a source that you trust",
        )

    facts = load_facts(project)
    release = next((r for r in facts.releases if r.sha256 == actual), None)
    version = _version_inside(path, project, release, str(path))
    if release is None and sha256 is None:
        title = facts.project.title
        raise SourceError(
            f"{path} ({title} {version}) has the sha256 {actual}, which the recipe does not know",
            hint=f"if you trust this very file, add --sha256 {actual}; or name "
            f"git+{facts.upstream.git}@COMMIT",
        )
    return SourceOrigin(path=path, version=version, identity=f"sha256:{actual}")


def _take_commit(
    source: GitSource,
    project: str,
    release: Release | None = None,
    *,
    offline: bool,
) -> SourceOrigin:
    archive = commit_archive(
        source.url,
        source.commit,
        cache=cache_dir() / "sources",
        prefix=project,
        offline=offline,
    )
    name = f"{source.url}: commit {source.commit}"
    version = _version_inside(archive, project, release, name)
    return SourceOrigin(path=archive, version=version, identity=f"git:{source.commit}")


def _take_release(version: Version, project: str, *, offline: bool) -> SourceOrigin:
    """Return the origin of a release: its archive if the cache has it, else its commit.

    Raises SourceError if the recipe does not have the commit, and as ``commit_archive`` does.
    """
    facts = load_facts(project)
    release = facts.known(version)
    archive = cache_dir() / "sources" / f"{project}-{version}.tar.gz"
    if release.sha256 and archive.is_file() and sha256_of(archive) == release.sha256:
        identity = f"sha256:{release.sha256}"
        return SourceOrigin(path=archive, version=version, identity=identity)

    name = f"{facts.project.title} {version}"
    hint = f"clone {facts.upstream.git}, check {release.tag} out and name the folder"
    if not release.commit:
        raise SourceError(
            f"the sources of {name} cannot be verified: the recipe does not know "
            f"the commit of {release.tag}",
            hint=hint,
        )
    try:
        source = GitSource(facts.upstream.git, release.commit)
        return _take_commit(source, project, release, offline=offline)
    except (SourceError, StorageError, HostError) as error:
        what = f"no sources of {name} could be had: {error.what}"
        raise type(error)(what, why=error.why, hint=hint) from None


def _version_inside(
    archive: Path, project: str, release: Release | None, name: str
) -> Version:
    """Unpack an archive into a temporary folder, and return the version that its files tell.

    Raises SourceError if it is unsafe, of another project, or not of the version of ``release``.
    """
    with ScratchFolder() as folder:
        tree = unpack(archive, Path(folder) / project)
        try:
            version = detect(tree, project).version
        except SourceError as error:
            what = error.what.replace(f"{tree}", str(archive))
            hint = f"name its version with --source-version, or {describe_sources(project)}"
            raise SourceError(what, why=error.why, hint=hint) from None

    if release is not None and release.version != version:
        raise SourceError(
            f"{name}: its files say {version}, the recipe says {release.version}"
        )
    return version


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
