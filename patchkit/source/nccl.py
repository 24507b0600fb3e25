"""Find the sources of NCCL that a user names: a folder or an archive, and its identity.

All sources are verified: a folder by a digest over its files, an archive by its sha256, a commit by
git's own hashes, a release by the sha256 or the commit in ``recipes/nccl/recipe.toml``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from packaging.version import Version

from patchkit.digests import sha256_of, tree_digest
from patchkit.durable.staging import ScratchFolder
from patchkit.errors import (
    HashMismatchError,
    HostError,
    SourceError,
    StorageError,
    UsageError,
)
from patchkit.frozen import frozen
from patchkit.source.archive import unpack
from patchkit.source.detect import detect, named_release, projects
from patchkit.source.fetch import cache_dir
from patchkit.source.git import commit_archive, parse_git
from patchkit.source.releases import (
    Release,
    ReleaseFacts,
    guess_release,
    load_facts,
)

PROJECT = "nccl"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@frozen
class SourceOrigin:
    """Sources on this machine, and their identity.

    ``path`` is a folder, or an archive for ``source.archive.unpack``. ``identity`` is ``sha256:``
    and the digest of an archive, ``git:`` and the commit, or ``tree:sha256:`` and a digest over the
    files of a folder.
    """

    path: Path
    version: Version
    identity: str


def nccl_tree(
    spec: str,
    *,
    sha256: str | None = None,
    offline: bool = False,
    check: Callable[[Version], None] = lambda _version: None,
    facts: ReleaseFacts | None = None,
) -> SourceOrigin:
    """Return the sources that ``spec`` names. They are fetched if needed, and always verified.

    ``spec`` is a folder, an archive, ``git+URL@COMMIT``, or ``nccl==2.29.7``. ``sha256`` is the
    digest of an archive; an archive that the recipe does not know needs it. ``check`` raises for an
    unsupported version, before a release is fetched. ``facts`` replace the facts of the recipe.

    Raises UsageError if ``spec`` names no source, SourceError if the sources cannot be used or
    verified, HashMismatchError for a wrong digest, StorageError or HostError if network, disk or a
    program fails.
    """
    if sha256 is not None and not _SHA256.fullmatch(sha256):
        raise UsageError(
            f"{sha256!r} is not a sha256",
            hint="64 lower-case hex digits, as sha256sum prints them",
        )

    facts = facts or load_facts(PROJECT)
    path = Path(spec)
    if path.is_dir():
        origin = _take_folder(path, sha256)
    elif path.is_file():
        origin = _take_archive(path, sha256, facts)
    elif source := parse_git(spec):
        origin = _take_commit(source.url, source.commit, offline=offline)
    elif version := named_release(spec, PROJECT):
        check(version)
        origin = _take_release(facts.known(version), facts, offline=offline)
    else:
        raise UsageError(
            f"{spec}: no such file or directory, and neither a git URL nor a release",
            hint=guess_release(spec, projects())
            or f"name {projects()[PROJECT].spelled}",
        )

    check(origin.version)
    return origin


def _take_folder(path: Path, sha256: str | None) -> SourceOrigin:
    if sha256 is not None:
        raise UsageError(f"{path} is a folder; --sha256 is for an archive")
    return SourceOrigin(
        path=path,
        version=detect(path, PROJECT).version,
        identity=f"tree:sha256:{tree_digest(path.resolve())}",
    )


def _take_archive(path: Path, sha256: str | None, facts: ReleaseFacts) -> SourceOrigin:
    """Return the origin of the user's archive.

    Raises SourceError if the recipe does not know its sha256 and the user gives none,
    HashMismatchError if the user gives another one.
    """
    actual = sha256_of(path)
    if sha256 is not None and actual != sha256:
        raise HashMismatchError(
            f"{path} has the sha256 {actual}, not {sha256}",
            why="it is damaged, or not the archive that was meant",
            hint="fetch it again, from a source that you trust",
        )

    release = next((r for r in facts.releases if r.sha256 == actual), None)
    version = _version_inside(path, release, str(path))
    if release is None and sha256 is None:
        raise SourceError(
            f"{path} (NCCL {version}) has the sha256 {actual}, which the recipe does not know",
            hint=f"if you trust this very file, add --sha256 {actual}; or name "
            f"git+{facts.git}@COMMIT",
        )
    return SourceOrigin(path=path, version=version, identity=f"sha256:{actual}")


def _take_commit(
    url: str, commit: str, release: Release | None = None, *, offline: bool
) -> SourceOrigin:
    store = cache_dir() / "sources"
    archive = commit_archive(url, commit, cache=store, prefix=PROJECT, offline=offline)
    version = _version_inside(archive, release, f"{url}: commit {commit}")
    return SourceOrigin(path=archive, version=version, identity=f"git:{commit}")


def _take_release(
    release: Release, facts: ReleaseFacts, *, offline: bool
) -> SourceOrigin:
    """Return the origin of a release: its archive in the cache, or its commit from upstream.

    Raises SourceError if the recipe does not know the commit, and as ``commit_archive`` does.
    """
    archive = cache_dir() / "sources" / f"{PROJECT}-{release.version}.tar.gz"
    if release.sha256 and archive.is_file() and sha256_of(archive) == release.sha256:
        identity = f"sha256:{release.sha256}"
        return SourceOrigin(path=archive, version=release.version, identity=identity)

    hint = f"clone {facts.git}, check {release.tag} out and name the folder"
    if not release.commit:
        raise SourceError(
            f"the sources of NCCL {release.version} cannot be verified: the recipe does not know "
            f"the commit of {release.tag}",
            hint=hint,
        )
    try:
        return _take_commit(facts.git, release.commit, release, offline=offline)
    except (SourceError, StorageError, HostError) as error:
        what = f"no sources of NCCL {release.version} could be had: {error.what}"
        raise type(error)(what, why=error.why, hint=hint) from None


def _version_inside(archive: Path, release: Release | None, name: str) -> Version:
    """Unpack an archive for a moment and return the version in its makefiles.

    Raises SourceError if it is unsafe, no archive of NCCL, or not the version of ``release``.
    """
    with ScratchFolder() as folder:
        tree = unpack(archive, Path(folder) / PROJECT)
        try:
            version = detect(tree, PROJECT).version
        except SourceError as error:
            what = error.what.replace(f"{tree}", str(archive))
            raise SourceError(
                what, why=error.why, hint="name an archive of NCCL"
            ) from None

    if release is not None and release.version != version:
        raise SourceError(
            f"{name}: its files say {version}, the recipe says {release.version}"
        )
    return version
