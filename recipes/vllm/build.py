"""Read what ``recipes/vllm/build.toml`` knows about building vLLM; it describes the fields."""

import re
from collections.abc import Iterable
from dataclasses import field, replace
from functools import cache
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from patchkit.errors import DriftError, SourceError, UsageError
from patchkit.frozen import Fields, Texts, Values, frozen, positional
from patchkit.recipes.vllm.external import External
from patchkit.records import RECIPES, read_toml, record
from patchkit.source.releases import ForReleases
from patchkit.source.tree import SourceTree

_FILE = RECIPES / "vllm" / "build.toml"
_REQUIREMENTS = RECIPES / "vllm" / "requirements"
_TORCH = r"""["']torch *== *([\w.]+)["']"""
WITHOUT_RUST = (
    "Rust parts are left out: the front end, which VLLM_USE_RUST_FRONTEND=1 asks for, and from "
    "0.24 to 0.31 a parser for the tool calls of MiniMax M3"
)


@frozen
class Pin:
    """The commit or tag ``pin`` of a source that vLLM fetches, from the release ``since`` on.

    ``commit`` is the commit that a tag names, "" if unknown; ``vouched`` says who states this.
    ``url`` is where the source is fetched from, "" for the URL of the source.
    """

    since: Version = field(metadata={"key": "from"})
    pin: str
    url: str = ""
    commit: str = ""
    vouched: str = ""


@frozen
class Indispensable(ForReleases):
    """Releases that cannot run without a source, and why."""

    reason: str


@frozen
class Define(ForReleases):
    """A CMake variable that takes the folder of a source, and the releases that read it."""

    variable: str


@frozen
class Served:
    """The major compute capabilities on which vLLM uses a source, from the release ``since`` on."""

    since: Version = field(metadata={"key": "from"})
    majors: tuple[int, ...]


@frozen
class KnownSource:
    """What ``build.toml`` says about an external source; it describes the fields."""

    name: str
    option: str
    title: str
    files: Texts
    url: str
    pins: tuple[Pin, ...]
    folder: str = ""
    submodules: Texts | None = None
    file: str = ""
    targets: Texts = ()
    installed: Texts = ()
    majors: tuple[int, ...] = ()
    later: tuple[Served, ...] = ()
    unused: Values = field(default_factory=dict)
    native: str = ""
    ready: str = "<0"
    compiled: str = ""
    cost: str = ""
    source: str = ""
    refused: tuple[Indispensable, ...] = ()
    define: Define | None = None

    @property
    def optional(self) -> bool:
        return bool(self.file)

    def pin_of(self, version: Version) -> Pin | None:
        """Return the pin that holds for a release, None for a release before the first pin."""
        base = Version(version.base_version)
        return next((pin for pin in reversed(self.pins) if pin.since <= base), None)

    def is_ready(self, version: Version) -> bool:
        """Return whether a build takes the source from the release's wheel by default, compiled."""
        return version.base_version in SpecifierSet(self.ready)

    def serves(self, major: int, version: Version) -> bool:
        """Return whether a release uses the source on devices with this major capability."""
        base = Version(version.base_version)

        majors = self.majors
        for served in self.later:
            if served.since <= base:
                majors = served.majors
        return not majors or major in majors


@positional
class Wanted:
    """A source that a tree fetches.

    ``external`` is what the tree's CMake files say, ``known`` what ``build.toml`` says.
    """

    external: External
    known: KnownSource
    commit: str  # "" if only a tag is known

    @property
    def submodules(self) -> Texts | None:
        """Return the paths of the submodules that a build reads, None for all submodules."""
        if self.known.submodules is not None:
            return self.known.submodules
        return self.external.submodules


@frozen
class Across:
    """How the locked build environment is divided if the build is for another CPU.

    ``target`` and ``stays`` are patterns of package names.
    """

    target: Texts
    stays: Texts
    download: str


@frozen
class Needs:
    """What a release needs to be built; ``recipes/vllm/build.toml`` describes the fields."""

    torch: str
    python: str
    standard: int
    gcc: str
    patch: bool
    rust: str


def read_needs(tree: SourceTree) -> Needs:
    """Return the recorded needs of a tree's release, but with the torch that the tree pins.

    If the tree's pyproject.toml pins no torch, the recorded one is kept.
    """
    needs = recorded_needs(tree.version)
    torch = re.search(_TORCH, tree.find("pyproject.toml") or "")
    return replace(needs, torch=torch[1]) if torch else needs


def recorded_needs(version: Version) -> Needs:
    """Return what ``build.toml`` says that a release needs.

    A release that is not in the file has the needs of the newest release before it.
    """
    base = Version(version.base_version)
    needs: Fields = {}

    # The entries go from the oldest release to the newest, and each one has only what changed.
    for entry in read_toml(tuple[Fields, ...], _FILE, key="needs"):
        since = Version(entry.pop("from"))
        if since <= base:
            needs |= entry
    return record(Needs, needs)


def locked_requirements(torch: str, file: Path | None = None) -> Path:
    """Return the requirements file that locks the build environment for a release of torch.

    If the user names a ``file``, return that. Raises SourceError if patchkit has no file for this
    torch, since the package index does not have it for CUDA 13.
    """
    if file is not None:
        return file

    path = _REQUIREMENTS / f"torch-{torch}.txt"
    if path.is_file():
        return path
    raise SourceError(
        f"torch {torch} for CUDA 13 is not on the package index, so nothing is locked for it",
        why="up to 2.10 the index has torch for CUDA 12 or for CPUs alone, or this is none that a "
        "supported release takes",
        hint="the index that the PyTorch project keeps for cu130 has it: lock it there with "
        "`uv pip compile --generate-hashes` and name the file with --requirements; vLLM 0.20.0 and "
        "later take a torch that is locked here",
    )


@cache
def across() -> Across:
    """Return how ``build.toml`` divides the build environment when building for another CPU."""
    return read_toml(Across, _FILE, key="across")


@cache
def known_externals() -> tuple[KnownSource, ...]:
    """Return every external source that some release fetches."""
    sources = read_toml(tuple[KnownSource, ...], _FILE, key="external")
    known = []
    for source in sources:
        pins = [replace(pin, url=pin.url or source.url) for pin in source.pins]
        known.append(replace(source, pins=tuple(pins)))
    return tuple(known)


def by_option(names: Iterable[str]) -> tuple[KnownSource, ...]:
    """Return the sources that options such as ``--without flash-attn`` name, without duplicates.

    Raises UsageError for a name that is no source.
    """
    by_name = {source.option: source for source in known_externals()}
    chosen = {}
    for name in names:
        if name not in by_name:
            raise UsageError(
                f"no source or extension is called {name!r}",
                hint=f"there are: {', '.join(sorted(by_name))}",
            )
        chosen[name] = by_name[name]

    return tuple(chosen.values())


def wanted(
    externals: Iterable[External],
    version: Version,
    *,
    release: bool,
) -> tuple[Wanted, ...]:
    """Return the sources that a tree fetches, each with its entry in ``build.toml``.

    ``release`` says that the tree is a release with recorded pins: then each pin in the tree's
    files must be the recorded one. Raises DriftError if ``build.toml`` does not have a source, or
    if a pin differs.
    """
    by_name = {source.name: source for source in known_externals()}
    checked = []
    for external in externals:
        source = by_name.get(external.name)
        if source is None:
            problem = f"fetches {external.name}, which patchkit does not know"
            raise _drift(external, problem)

        if release:
            _require_pin(external, source.pin_of(version))
        checked.append(Wanted(external, source, _commit_of(external, source)))
    return tuple(checked)


def _require_pin(external: External, pin: Pin | None) -> None:
    if pin is None or not _is_pin_of(pin, external):
        expected = f"{pin.url} at {pin.pin}" if pin else "nothing"
        problem = f"fetches {external.url} at {external.pin} instead of {expected}"
        raise _drift(external, problem)


def _commit_of(external: External, source: KnownSource) -> str:
    """Return the commit of a source, "" if only a tag is known."""
    if external.is_commit:
        return external.pin

    commits = (pin.commit for pin in source.pins if _is_pin_of(pin, external))
    return next(commits, "")


def _is_pin_of(pin: Pin, external: External) -> bool:
    return (pin.url, pin.pin) == (external.url, external.pin)


def _drift(external: External, problem: str) -> DriftError:
    return DriftError(
        f"{external.where}: {problem}",
        why="the tree is not the release that it says it is, or upstream changed what it needs",
        hint="compare it with the release; what is known stands in recipes/vllm/build.toml",
    )
