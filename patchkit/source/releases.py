"""Read what recipes know about releases: locks, pins, sources and digests.

A lock is a TOML file with ``[[sdist]]`` or ``[[wheel]]`` tables, which names files of a project's
releases and their sha256. Releases without a file on a package index are in
``recipes/PROJECT/recipe.toml``; its comments describe the fields.
"""

import re
from collections.abc import Mapping
from dataclasses import field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Self

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from patchkit.digests import digest
from patchkit.errors import RecipeError, SourceError, UsageError
from patchkit.frozen import Texts, Values, frozen
from patchkit.records import Sha256, matching, read_toml, read_tsv
from patchkit.source.git import read_blob
from patchkit.source.project import Project, recipe_folder
from patchkit.source.tree import SourceTree
from patchkit.target import Target

# The name becomes part of a path in the cache, and must not lead out of the cache.
_Filename = Annotated[
    str, matching(r"[A-Za-z0-9][A-Za-z0-9._+!-]*", "the name of a file")
]
# manylinux_2_28_aarch64 (PEP 600), manylinux2014_x86_64, musllinux_1_2_x86_64, linux_x86_64.
_LINUX = r"\w*linux(?:\d+|_\d+_\d+)?_([a-z]\w*)"
_PIN = r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*==\s*([^\s=*;,]+)\s*"


ANY = "any"
"""The platform of a wheel for every CPU."""


class ExactPin(str):
    """An exact requirement, ``nvidia-nccl-cu13==2.30.7``, with the project's canonical name.

    Raises ValueError for another text.
    """

    __slots__ = ("project", "version")
    project: str
    version: Version

    def __new__(cls, text: str) -> Self:
        match = re.fullmatch(_PIN, text)
        if match is None:
            raise ValueError(f"is {text!r}, not PROJECT==VERSION")

        project = canonicalize_name(match[1])
        version = Version(match[2])
        pin = super().__new__(cls, f"{project}=={version}")
        pin.project = project
        pin.version = version
        return pin


def named_version(text: str, hint: str = "write it as MAJOR.MINOR.PATCH") -> Version:
    """Return a text as a version. Raises UsageError if it is no version (PEP 440)."""
    try:
        return Version(text)
    except InvalidVersion:
        raise UsageError(f"{text!r} is not a version", hint=hint) from None


@frozen
class LockEntry:
    """A file of a release in a lock: ``sha256`` in lower-case hex, ``size`` in bytes."""

    version: Annotated[str, Version]
    filename: _Filename
    sha256: Sha256
    size: int

    def row(self, kind: str) -> str:
        """Return the entry as a lock of ``kind`` (sdist or wheel) has it, in TOML."""
        return (
            f'[[{kind}]]\nversion = "{self.version}"\nfilename = "{self.filename}"\n'
            f'sha256 = "{self.sha256}"\nsize = {self.size}\n'
        )


def read_lock(path: Path) -> dict[str, LockEntry]:
    """Return version → entry of a lock of sdists.

    Raises SourceError, naming the file and the key, if it is malformed.
    """
    rows = read_toml(tuple[LockEntry, ...], path, SourceError, key="sdist")
    return {entry.version: entry for entry in rows}


def read_wheel_lock(path: Path) -> dict[str, dict[str, LockEntry]]:
    """Return CPU (``aarch64``, or ``any``) → version → entry of a lock of wheels.

    Raises as ``read_lock`` does.
    """
    cpus: dict[str, dict[str, LockEntry]] = {}
    for entry in read_toml(tuple[LockEntry, ...], path, SourceError, key="wheel"):
        for cpu in wheel_cpus(entry.filename):
            cpus.setdefault(cpu, {})[entry.version] = entry
    return cpus


def wheel_cpus(filename: str) -> list[str]:
    """Return the CPUs in the platform tags of a wheel: ``aarch64`` for ``manylinux_2_28_aarch64``.

    A wheel for every platform is for ``any``. Raises ValueError if ``filename`` is not the name
    of a wheel.
    """
    _name, _version, _build, tags = parse_wheel_filename(filename)
    cpus = set()
    for tag in tags:
        if match := re.fullmatch(_LINUX, tag.platform):
            cpus.add(match[1])
        elif tag.platform == ANY:
            cpus.add(ANY)
    return sorted(cpus)


@frozen
class Release:
    """A release in a ``recipe.toml``; a fact that is not known is "" or 0."""

    version: Version
    tag: str
    sha256: str = ""
    size: int = 0
    commit: str = ""
    figures: str = ""
    archs: Texts = ()
    read: bool = True


@frozen
class ForReleases:
    """A fact that holds for some releases; ``versions`` is a PEP 440 specifier."""

    versions: str

    def covers(self, version: Version) -> bool:
        # The base version is compared, since specifiers do not contain pre-releases by default.
        return version.base_version in SpecifierSet(self.versions)


@frozen
class Bug(ForReleases):
    """A bug of some releases, for which patchkit has no fix.

    ``take`` is a release to install instead of a pinned one with the bug, None if there is none.
    """

    says: str
    instead: str
    source: str
    take: Version | None = None


@frozen
class Refused:
    """Releases that patchkit does not patch, and the reasons."""

    versions: str
    reasons: Texts


@frozen
class BuildVariable:
    """The variable that names the archs for a build, and the template of its value.

    ``variable`` is "" if a build takes none. In ``value``, ``{list}`` is the arch list with
    suffixes, ``{plain}`` nvcc's name without suffix.
    """

    variable: str = ""
    value: str = ""

    def value_for(self, target: Target, arch: str) -> str:
        plain = target.plain_arch(arch)
        return self.value.format(list=target.arch_list(arch), plain=plain)


@frozen
class Upstream:
    """The URL of upstream's repository, and the template of the URL of an archive of a tag."""

    git: str = ""
    archive: str = ""


@frozen
class RecipeFacts:
    """The content of a project's ``recipe.toml``.

    ``listed`` may be left out: then ``releases`` are known, oldest first, or those of the lock.
    ``default`` is the release to build if nothing names one. ``torch`` maps a series of torch, such
    as ``2.11``, to the pin of this project in torch's wheels.
    """

    project: Project
    fixes: Texts
    listed: tuple[Version, ...] = field(default=(), metadata={"key": "releases"})
    releases: tuple[Release, ...] = field(default=(), metadata={"key": "release"})
    refused: tuple[Refused, ...] = ()
    bugs: tuple[Bug, ...] = field(default=(), metadata={"key": "bug"})
    build: BuildVariable = BuildVariable()
    default: Version = Version("0")
    upstream: Upstream = Upstream()
    torch: Mapping[str, ExactPin] = field(default_factory=dict)

    def refusal(self, version: Version) -> Texts:
        """Return the reasons why a release is not supported, () if it is not refused."""
        reasons = (
            entry.reasons
            for entry in self.refused
            if SpecifierSet(entry.versions).contains(version, prereleases=True)
        )
        return next(reasons, ())

    def release(self, version: Version) -> Release | None:
        releases = (entry for entry in self.releases if entry.version == version)
        return next(releases, None)

    def known(self, version: Version) -> Release:
        """Return the release of a version. Raises SourceError if the recipe does not have it."""
        if release := self.release(version):
            return release
        names = ", ".join(str(release.version) for release in self.releases)
        raise SourceError(
            f"{self.project.title} {version} is not among the releases that this patchkit knows",
            why="it is mistyped, or newer than the recipe",
            hint=f"known are {names}; others can be built from a folder, from an archive with "
            f"--sha256, or from git+{self.upstream.git}@COMMIT",
        )


@cache
def release_files(project: str) -> dict[str, dict[str, str]]:
    """Return release → path → first 16 hex digits of the sha256, for the files that fixes look at.

    The digits are "" if the release has no such file. Return {} for a project without the table
    ``release_files.tsv``.
    """
    place = recipe_folder(project) / "release_files.tsv"
    if not place.is_file():
        return {}

    names = read_toml(list[str], place.with_name("recipe.toml"), key="releases")
    files: dict[str, dict[str, str]] = {}
    for path, first, last, begins in read_tsv(place):
        stop = names.index(last) + 1
        for name in names[names.index(first) : stop]:
            files.setdefault(name, {})[path] = begins
    return files


def foreign_file(tree: SourceTree, seen: Values) -> str:
    """Return the first path in ``seen`` whose file is a fork's and not the release's, "" for none.

    ``seen`` maps a path to the sha256 of its file. In a git checkout, a file that differs from its
    commit was edited by hand, and does not count as a fork's.
    """
    releases = release_files(tree.project)
    files = releases.get(tree.version.public)
    if tree.kind not in ("git", "archive") or not files:
        return ""

    known_paths = set(chain.from_iterable(releases.values()))
    for path, sha256 in seen.items():
        if path not in known_paths or sha256[:16] == files.get(path):
            continue
        if _is_of_fork(tree, path, sha256):
            return path
    return ""


def _is_of_fork(tree: SourceTree, path: str, sha256: str) -> bool:
    """Return whether a file is as its commit has it; True if there is no git history."""
    if tree.kind != "git":
        return True
    committed = read_blob(tree.root, f"HEAD:{path}")
    return digest(committed) == (sha256 or digest(""))


@cache
def load_facts(project: str) -> RecipeFacts:
    """Return the content of a project's ``recipe.toml``. Raises RecipeError for a mistake in it."""
    return read_toml(RecipeFacts, recipe_folder(project) / "recipe.toml", RecipeError)
