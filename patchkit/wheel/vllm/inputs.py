"""Bring the sources of other projects that a build of vLLM takes, each in a folder.

Where a source comes from, in this order:

1. what is given (``--source OPTION=WHAT``): a folder; an archive; ``git+URL@COMMIT``; or
   upstream's own wheel of the release that is built (``vllm==VERSION``), as it is installed
2. git, which fetches the one commit and those that it names for its submodules.

A commit proves itself, as git checks every object. A folder or an archive is recorded by the digest
of what is in it, as not compared with the pin.
"""

from __future__ import annotations

import platform
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from packaging.version import Version

from patchkit.digests import sha256_of, tree_digest
from patchkit.errors import SourceError, StorageError, UsageError, translated
from patchkit.quoting import quoted
from patchkit.reading import LARGEST_IN_TREE, read_bytes
from patchkit.recipes.vllm.build import Wanted, by_option
from patchkit.source.archive import unpack
from patchkit.source.fetch import Progress, cache_dir
from patchkit.source.git import commit_archive, parse_git, submodules
from patchkit.target import Target
from patchkit.wheel.vllm.upstream_parts import FoundSource, is_upstream, upstream_parts

_NAMES = re.compile(r"(LICEN[CS]E|COPYING|NOTICE)([.-].*)?", re.IGNORECASE)
_SPDX = re.compile(
    r"SPDX-License-Identifier:[ \t]*([\w.+-]+(?: (?:AND|OR|WITH) [\w.+-]+)*)"
)
_COMMENT = re.compile(r"/\*(?P<text>.*?)\*/", re.DOTALL)
_EDGE = re.compile(r"^[ \t]*\*+[ \t]?|\*+[ \t]*$", re.MULTILINE)
_ARCHIVES = (".tar.gz", ".tgz", ".tar.xz", ".tar")
_ASIDE = shutil.ignore_patterns(".git", "__pycache__")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSource:
    """A source in its folder: its ``identity``, and whether that was ``verified`` to be the pin.

    ``notices`` are its licences: file name → text.
    """

    option: str
    folder: Path
    identity: str
    verified: bool
    notices: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """The sources, and where they lie: in variables of the environment and of CMake (``-D``).

    ``installed`` are those whose folder holds what is installed: nothing of them is compiled.
    """

    environment: Mapping[str, str]
    defines: Mapping[str, str]
    sources: tuple[InputSource, ...]
    installed: tuple[Wanted, ...] = ()

    @property
    def licenses(self) -> dict[str, str]:
        """Return option → SPDX expression, of the sources whose files name just one."""
        found = {}
        for each in self.sources:
            texts = each.notices.values()
            names = {match[1] for text in texts for match in _SPDX.finditer(text)}
            # The files do not say how several combine (AND, OR).
            if len(names) == 1:
                found[each.option] = names.pop()
        return found


def parse_given(texts: Sequence[str]) -> dict[str, str]:
    """Read ``OPTION=WHAT`` of ``--source``. Raises UsageError for another form or option."""
    given = {}
    for text in texts:
        option, equals, what = text.partition("=")
        if not equals or not what:
            raise UsageError(
                f"--source {text}: not OPTION=WHAT",
                hint="for example --source cutlass=FOLDER",
            )
        by_option([option])
        given[option] = what
    return given


def check_given(
    wanted: Sequence[Wanted], version: Version, given: Mapping[str, str]
) -> None:
    """Raise UsageError for an option that names what a release does not fetch.

    Also for the wheel of another release of vLLM, before anything is downloaded.
    """
    if idle := sorted(set(given) - {each.known.option for each in wanted}):
        raise UsageError(
            f"--source {idle[0]}: this build takes no {idle[0]}",
            why=f"vLLM {version} does not fetch it, or it is left out with --without",
        )
    for option, what in given.items():
        if is_upstream(what) and what.partition("==")[2].strip() != version.public:
            raise UsageError(
                f"--source {option}={what}: this build is of vLLM {version.public}",
                why="parts of another release are made for other Python, and perhaps another torch",
                hint=quoted("--source", f"{option}=vllm=={version.public}"),
            )


def gather_sources(
    wanted: Sequence[Wanted],
    version: Version,
    *,
    given: Mapping[str, str],
    dest: Path,
    cpu: str,
    target: Target,
    offline: bool = False,
    progress: Progress | None = None,
) -> Gathered:
    """Bring every source that a release fetches below ``dest``, which keeps them between builds.

    ``cpu`` and ``target`` are those of the wheel that is built.
    Raises UsageError for a name that the build does not use; SourceError, HashMismatchError,
    StorageError and HostError for what cannot be had.
    """
    check_given(wanted, version, given)
    with translated("the sources are not complete", dest):
        dest.mkdir(parents=True, exist_ok=True)
    environment: dict[str, str] = {}
    defines: dict[str, str] = {}
    sources: list[InputSource] = []
    installed: list[Wanted] = []
    for each in wanted:
        what = given.get(each.known.option, "")
        if is_upstream(what):
            found = upstream_parts(each.known, version, cpu, target, offline, progress)
        else:
            found = _find_source(each, what, version, offline=offline)
        if each.known.native and cpu != platform.machine() and not found.installed:
            option = each.known.option
            upstreams = quoted("--source", f"{option}=vllm=={version.public}")
            raise UsageError(
                f"{option} cannot be compiled for {cpu} on {platform.machine()}",
                why=each.known.native,
                hint=f"take upstream's: {upstreams}; or {quoted('--without', option)}",
            )
        folder = _keep_source(dest, each, found)
        sources.append(
            InputSource(
                option=each.known.option,
                folder=folder,
                identity=found.identity,
                verified=found.verified,
                notices=notices(folder, each.known.files),
            )
        )
        if found.installed:
            installed.append(each)
            environment[each.external.variable] = str(folder)
            continue
        define, taken = each.known.define, str(folder / each.known.folder)
        if define and define.covers(version):
            defines[define.variable] = taken
        else:
            environment[each.external.variable] = taken
    return Gathered(
        environment=environment,
        defines=defines,
        sources=tuple(sources),
        installed=tuple(installed),
    )


def _find_source(
    wanted: Wanted, given: str, version: Version, *, offline: bool
) -> FoundSource:
    """Find what was named, by default the commit that upstream pins."""
    if not given:
        known = wanted.known
        needed = not known.optional or any(
            refused.covers(version) for refused in known.refused
        )
        without = "" if needed else f"--without {known.option}"
        return _commit_input(wanted, wanted.external.url, "", without, offline=offline)
    place, option = Path(given).expanduser(), wanted.known.option
    if place.is_dir():
        # What CMake takes may be a folder within the source, and that may be what was named.
        inner, place = wanted.known.folder, place.absolute()
        within = inner if inner and not (place / inner).is_dir() else ""

        def fill(dest: Path) -> None:
            shutil.copytree(place, dest / within, symlinks=True, ignore=_ASIDE)

        return FoundSource(f"folder, tree sha256:{tree_digest(place)}", False, fill)
    if place.is_file() and given.endswith(_ARCHIVES):
        identity = f"archive {place.name}, sha256:{sha256_of(place)}"
        return FoundSource(identity, False, partial(unpack, place.absolute()))
    git = parse_git(given)
    if git and git.exact:
        return _commit_input(wanted, git.url, git.name, "", offline=offline)
    if git:
        raise UsageError(
            f"--source {option}={given}: not a full commit id",
            why="names of tags and branches can be moved",
            hint=f"write git+{git.url}@COMMIT, 40 hexadecimal digits",
        )
    raise UsageError(
        f"--source {option}={given}: there is no such folder or archive",
        why=f"the path is mistyped, or the file has another ending than {', '.join(_ARCHIVES)}",
    )


def notices(source: Path, files: Iterable[str]) -> dict[str, str]:
    """Return file name → text of the licence files of a source, sorted.

    A source without one, as a wheel carries it, states its licence at the top of its ``files``.
    """

    own = [path for path in sorted(source.iterdir()) if _NAMES.fullmatch(path.name)]
    own = [path for path in own if path.is_file()]
    paths = own or [
        path for path in (source / name for name in files) if path.is_file()
    ]
    texts = {
        path: read_bytes(path, limit=LARGEST_IN_TREE).decode(errors="replace")
        for path in paths
    }
    if own:
        return {path.name: text for path, text in texts.items()}
    for text in texts.values():
        match = _COMMENT.match(text.lstrip())
        if match and "Copyright" in match["text"]:
            lines = _EDGE.sub("", match["text"]).strip().splitlines()
            return {"LICENSE": "".join(f"{line.rstrip()}\n" for line in lines)}
    return {}


def _commit_input(
    wanted: Wanted, url: str, commit: str, without: str, *, offline: bool
) -> FoundSource:
    chosen, external = commit or wanted.commit, wanted.external
    if not chosen:
        raise SourceError(
            f"{wanted.known.option}: which commit {external.pin} names is not known",
            why="a tag can be moved, so it does not say what would be fetched",
            hint=quoted("--source", f"{wanted.known.option}=git+{url}@COMMIT"),
        )

    def checkout(
        url: str, commit: str, dest: Path, modules: tuple[str, ...] | None = None
    ) -> None:
        """Write a commit and its submodules (all, unless some are named), and theirs."""
        try:
            archive = commit_archive(
                url, commit, cache=cache_dir(), prefix=dest.name, offline=offline
            )
        except (SourceError, StorageError) as error:
            error.hint += (
                f"; or leave it out: {without}; {wanted.known.cost}" if without else ""
            )
            raise
        try:
            unpack(archive, dest)
        finally:
            archive.unlink(missing_ok=True)  # the objects stay in the cache
        inside = {
            each.path: each for each in submodules(url, commit, cache=cache_dir())
        }
        for path in inside if modules is None else modules:
            if path not in inside:
                raise SourceError(
                    f"{external.url}@{commit} has no submodule {path}",
                    why="the release names it, so the commit is not the one that it means",
                )
            checkout(inside[path].url, inside[path].commit, dest / path)

    fill = partial(checkout, url, chosen, modules=wanted.submodules)
    # Upstream's URL even from elsewhere: the commit says what it is, wherever it lay.
    return FoundSource(f"{external.url}@{chosen}", not commit, fill)


def _keep_source(dest: Path, wanted: Wanted, found: FoundSource) -> Path:
    """Return the folder of a source below ``dest``, written anew only if it is another source.

    Files that are written again are newer, and what includes them would be compiled again.
    """
    folder, stamp = dest / wanted.known.option, dest / f"{wanted.known.option}.identity"
    if (
        folder.is_dir()
        and stamp.is_file()
        and stamp.read_text("utf-8") == found.identity
    ):
        return folder
    with translated("the source is not complete", folder):
        # First to go and last to come: a folder without its stamp is not taken for whole.
        stamp.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".source.", dir=dest) as scratch:
            fresh = Path(scratch) / wanted.known.option
            found.fill(fresh)
            for name in () if found.installed else wanted.known.files:
                if not (fresh / name).is_file():
                    raise SourceError(
                        f"--source {wanted.known.option}: {name} is missing in it",
                        why=f"it is not {wanted.external.url}, or its submodules were not checked "
                        "out",
                        hint="git submodule update --init --recursive; in the folder that is named",
                    )
            fresh.rename(folder)
        stamp.write_text(found.identity, encoding="utf-8")
    return folder
