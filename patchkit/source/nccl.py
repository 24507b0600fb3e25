"""Sources of NCCL: whatever names them becomes a folder or an archive, with an identity.

Nothing of them is on a package index, so there are four ways, and each is verified: a folder, by a
digest over its files; an archive, by its sha256; a git commit, by git's own hashes; a release, by
the commit in ``recipes/nccl/recipe.toml``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from patchkit.digests import sha256_of, tree_digest
from patchkit.durable.scratch import ScratchFolder
from patchkit.errors import (
    HashMismatchError,
    HostError,
    SourceError,
    StorageError,
    UsageError,
)
from patchkit.source.archive import unpack
from patchkit.source.detect import detect, projects, spelled
from patchkit.source.fetch import Progress, cache_dir
from patchkit.source.git import GitSource, commit_archive, parse_git
from patchkit.source.releases import Release, ReleaseFacts, load_facts
from patchkit.versions import meant, named_version

PROJECT = "nccl"
_RELEASE = re.compile(r"nccl==(?P<version>[^/\s]+)", re.IGNORECASE)
_SHA256 = re.compile(r"[0-9a-f]{64}")

Report = Callable[[str], Progress]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOrigin:
    """Sources that are on this machine, and by what they are known.

    ``path`` is a folder, or an archive that ``source.archive.unpack`` takes. ``identity`` begins
    with what kind it is: ``sha256:`` of an archive, ``git:`` and the commit, ``tree:sha256:`` over
    the files of a folder.
    """

    path: Path
    version: Version
    identity: str

    @property
    def is_tree(self) -> bool:
        return self.path.is_dir()


def nccl_tree(
    spec: str,
    *,
    sha256: str | None = None,
    cache: Path | None = None,
    offline: bool = False,
    report: Report | None = None,
    check: Callable[[Version], None] | None = None,
    facts: ReleaseFacts | None = None,
) -> SourceOrigin:
    """Return the sources that ``spec`` names, fetched if need be and verified in any case.

    ``spec`` is a folder, an archive, ``git+URL@COMMIT`` or ``URL#COMMIT``, or ``nccl==2.29.7``.
    ``sha256`` is what an archive must have, for one that the recipe does not know. ``cache`` is the
    folder for downloads (default: patchkit's). ``check`` refuses unsupported versions, for a
    release before anything is fetched. ``facts`` are the recipe's unless others are given.

    Raises SourceError, HashMismatchError, UsageError for a spec that says too little, StorageError
    and HostError if network, disk or a program fails.
    """
    if sha256 is not None and not _SHA256.fullmatch(sha256):
        raise UsageError(
            f"{sha256!r} is not a sha256", hint="64 lower-case hex digits, as sha256sum prints them"
        )
    store = (cache or cache_dir()) / "sources"
    silent = lambda _task: lambda _done, _total: None  # noqa: E731
    wanted = _Wanted(facts or load_facts(PROJECT), store, offline, report or silent)
    origin = _find_source(spec, sha256, wanted, check)
    if check is not None:
        check(origin.version)
    return origin


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Things that every way of getting sources has to know."""

    facts: ReleaseFacts
    store: Path
    offline: bool
    report: Report


def _find_source(
    spec: str, sha256: str | None, wanted: _Wanted, check: Callable[[Version], None] | None
) -> SourceOrigin:
    path = Path(spec)
    if path.is_dir():
        if sha256 is not None:
            raise UsageError(f"{spec} is a folder; --sha256 is for an archive")
        version = detect(path, PROJECT).version
        return SourceOrigin(
            path=path, version=version, identity=f"tree:sha256:{tree_digest(path.resolve())}"
        )
    if path.is_file():
        return _take_archive(path, sha256, wanted)
    if source := parse_git(spec):
        return _take_commit(source, wanted)
    if match := _RELEASE.fullmatch(spec):
        version = named_version(match["version"], "for example nccl==2.29.7")
        if check is not None:
            check(version)
        return _release(wanted.facts.known(version), wanted)
    raise UsageError(
        f"{spec}: no such file or directory, and neither a git URL nor a release",
        hint=meant(spec, projects()) or f"name {spelled(PROJECT)}",
    )


def _take_archive(path: Path, sha256: str | None, wanted: _Wanted) -> SourceOrigin:
    """Take an archive that the user has: known by the recipe, or vouched for with its sha256."""
    actual = sha256_of(path)
    if sha256 is not None and actual != sha256:
        raise HashMismatchError(
            f"{path} has the sha256 {actual}, not {sha256}",
            why="it is damaged, or not the archive that was meant",
            hint="fetch it again, from a source that you trust",
        )
    release = wanted.facts.by_digest(actual)
    version = _version_inside(path)
    if release is None and sha256 is None:
        expected = wanted.facts.release(version)
        raise SourceError(
            f"{path} (NCCL {version}) has the sha256 {actual}, which the recipe does not know",
            why=f"the archive of {expected.tag} has {expected.sha256}"
            if expected and expected.sha256
            else f"the recipe knows no sha256 of NCCL {version}",
            hint=f"if you trust this very file, add --sha256 {actual}; "
            f"{_other_ways(expected, wanted.facts)}",
        )
    if release is not None and release.version != version:
        raise SourceError(f"{path}: its files say {version}, the recipe says {release.version}")
    return SourceOrigin(path=path, version=version, identity=f"sha256:{actual}")


def _other_ways(release: Release | None, facts: ReleaseFacts) -> str:
    """Return in words where verified sources of a release can be had."""
    ways = []
    if release is not None and release.sha256:
        address = facts.archive.format(tag=release.tag)
        ways.append(f"download {address} (sha256 {release.sha256}) and name the file")
    if release is not None and release.commit:
        ways.append(f"name git+{facts.git}@{release.commit}")
    ways.append("clone the repository, check the tag out and name the folder")
    return "; or ".join(ways)


def _take_commit(source: GitSource, wanted: _Wanted) -> SourceOrigin:
    """Take a commit of a repository; a known release's tag stands for the commit it should be."""
    name = source.name
    # A tag is only a name for the recipe's commit: what it points to upstream is not asked.
    release = next((each for each in wanted.facts.releases if each.tag == name), None)
    commit = release.commit if release is not None else name
    if not GitSource(source.url, commit).exact:
        raise UsageError(
            f"{source.url}: {name!r} is not a commit"
            if name
            else f"{source.url}: no commit is named",
            why="tags and branches can be moved, and upstream has moved a release's tag"
            if release is None
            else f"the recipe does not know which commit {name} has to be",
            hint=f"write git+{source.url}@ and the 40 hex digits of the commit "
            "(git ls-remote shows them)",
        )
    return _from_git(source.url, commit, release, wanted)


def _from_git(url: str, commit: str, release: Release | None, wanted: _Wanted) -> SourceOrigin:
    archive = commit_archive(
        url, commit, cache=wanted.store, prefix=PROJECT, offline=wanted.offline
    )
    version = _version_inside(archive)
    if release is not None and release.version != version:
        raise SourceError(f"{url}: commit {commit} is {version}, the recipe says {release.version}")
    return SourceOrigin(path=archive, version=version, identity=f"git:{commit}")


def _release(release: Release, wanted: _Wanted) -> SourceOrigin:
    """Take a release from the cache, or by its commit from upstream's repository."""
    archive = wanted.store / f"{PROJECT}-{release.version}.tar.gz"
    if release.sha256 and archive.is_file() and sha256_of(archive) == release.sha256:
        return SourceOrigin(
            path=archive, version=release.version, identity=f"sha256:{release.sha256}"
        )
    if not release.commit:
        raise SourceError(
            f"the sources of NCCL {release.version} cannot be verified: the recipe does not know "
            f"the commit of {release.tag}",
            hint=_other_ways(release, wanted.facts),
        )
    try:
        return _from_git(wanted.facts.git, release.commit, release, wanted)
    except (SourceError, StorageError, HostError) as error:
        raise type(error)(
            f"no sources of NCCL {release.version} could be had: {error.what}",
            why=error.why,
            hint=_other_ways(release, wanted.facts),
        ) from None


def _version_inside(archive: Path) -> Version:
    """Return the version in an archive's makefiles; check that it is one of NCCL, and safe."""
    with ScratchFolder() as folder:
        tree = unpack(archive, Path(folder) / PROJECT)
        try:
            return detect(tree, PROJECT).version
        except SourceError as error:
            what = error.what.replace(f"{tree}", str(archive))
            raise SourceError(what, why=error.why, hint="name an archive of NCCL") from None
