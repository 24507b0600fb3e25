"""Read what is known about building vLLM; ``recipes/vllm/build.toml`` describes the fields."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from patchkit.errors import DriftError, UsageError
from patchkit.paths import RECIPES
from patchkit.recipes.vllm.external import External
from patchkit.records import read_toml
from patchkit.target import Target

BUILD_FILE = RECIPES / "vllm" / "build.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """What is fetched from a release on; ``commit`` is the one that a tag names, "" if unknown."""

    since: Version = field(metadata={"key": "from"})
    pin: str
    url: str = ""  # that of the source
    commit: str = ""
    vouched: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Indispensable:
    """Releases (a PEP 440 specifier) that cannot run without a source, and why."""

    versions: str
    reason: str

    def covers(self, version: Version) -> bool:
        return SpecifierSet(self.versions).contains(version.base_version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Define:
    """A CMake variable that takes the folder of a source, and the releases that read it."""

    versions: str
    variable: str

    def covers(self, version: Version) -> bool:
        return SpecifierSet(self.versions).contains(version.base_version)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownSource:
    """An external source as patchkit knows it."""

    name: str
    option: str
    title: str
    files: tuple[str, ...]
    url: str
    pins: tuple[Pin, ...]
    folder: str = ""
    submodules: tuple[str, ...] | None = None
    file: str = ""
    targets: tuple[str, ...] = ()
    majors: tuple[int, ...] = ()
    cost: str = ""
    source: str = ""
    refused: tuple[Indispensable, ...] = ()
    define: Define | None = None

    @property
    def optional(self) -> bool:
        return bool(self.file)

    def pin_of(self, version: Version) -> Pin | None:
        """Return the newest pin that is not newer than the release; None for older releases."""
        base = Version(version.base_version)
        return next((pin for pin in reversed(self.pins) if pin.since <= base), None)

    def defined(self, version: Version) -> str:
        """Return the CMake variable that takes the folder, "" where the environment does."""
        return self.define.variable if self.define and self.define.covers(version) else ""

    def serves(self, major: int) -> bool:
        """Return whether it has code for devices of this major capability."""
        return not self.majors or major in self.majors

    def cost_on(self, target: Target) -> str:
        """Return in a line what a build for a device loses without it."""
        if self.serves(target.major):
            return f"{self.option}: {self.cost}"
        return f"{self.option}: nothing on {target.name}, for which it has no code"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A source that a release fetches: as the release says, as patchkit knows, and the commit."""

    external: External
    known: KnownSource
    commit: str  # "" where only a tag is known

    @property
    def submodules(self) -> tuple[str, ...] | None:
        """Paths of the submodules that a build reads; None for all that the source has."""
        if self.known.submodules is not None:
            return self.known.submodules
        return self.external.submodules


@cache
def known_externals() -> tuple[KnownSource, ...]:
    """Return every external source that some release fetches."""
    return tuple(
        replace(each, pins=tuple(replace(pin, url=pin.url or each.url) for pin in each.pins))
        for each in read_toml(tuple[KnownSource, ...], BUILD_FILE, key="external")
    )


def by_option(names: Iterable[str]) -> tuple[KnownSource, ...]:
    """Return what options such as ``--without flash-attn`` name. Raises UsageError."""
    known = {each.option: each for each in known_externals()}
    names = tuple(dict.fromkeys(names))
    for name in names:
        if name not in known:
            raise UsageError(
                f"no source or extension is called {name!r}",
                hint=f"there are: {', '.join(sorted(known))}",
            )
    return tuple(known[name] for name in names)


def wanted(found: Iterable[External], version: Version, *, release: bool) -> tuple[Wanted, ...]:
    """Return what a tree fetches, each source compared with what is known.

    ``release`` says whether the version is in the table, so that its pins are known; those of
    another tree are what its files say. Raises DriftError for an unknown source, or another pin.
    """
    known = {each.name: each for each in known_externals()}
    return tuple(
        _wanted(external, known.get(external.name), version, release) for external in found
    )


def _wanted(
    external: External, known: KnownSource | None, version: Version, release: bool
) -> Wanted:
    if known is None:
        raise _drift(external, f"fetches {external.name}, which patchkit does not know")
    if release:
        pin = known.pin_of(version)
        if pin is None or (pin.url, pin.pin) != (external.url, external.pin):
            expected = f"{pin.url} at {pin.pin}" if pin else "nothing"
            problem = f"fetches {external.url} at {external.pin} instead of {expected}"
            raise _drift(external, problem)
    if external.is_commit:
        return Wanted(external, known, external.pin)
    pins = (pin for pin in known.pins if (pin.url, pin.pin) == (external.url, external.pin))
    return Wanted(external, known, next((pin.commit for pin in pins), ""))


def _drift(external: External, problem: str) -> DriftError:
    return DriftError(
        f"{external.where}: {problem}",
        why="the tree is not the release that it says it is, or upstream changed what it needs",
        hint="compare it with the release; what is known stands in recipes/vllm/build.toml",
    )
