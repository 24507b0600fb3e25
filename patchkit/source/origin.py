"""Find the sources that a user names, and their identity.

Sources are a folder, an archive, a commit or a release. The identity of a folder is a digest of its
files. Other sources are verified: an archive by its sha256, a commit by git's own hashes, a release
by the sha256 or the commit in the ``recipe.toml`` of its project.
"""

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
from patchkit.source.detect import detect, named_release
from patchkit.source.fetch import cache_dir
from patchkit.source.git import GitSource, commit_archive, parse_git
from patchkit.source.project import describe_sources
from patchkit.source.releases import (
    Release,
    load_facts,
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
