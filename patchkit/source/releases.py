"""Releases that have no file on a package index: where their sources come from, and by what they
are known. The facts are those of ``recipes/PROJECT/recipe.toml``, which describes the fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from patchkit.errors import SourceError
from patchkit.records import RECIPES, read_toml
from patchkit.versions import ExactPin


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One release; ``""`` and 0 where a figure is not known."""

    version: Version
    tag: str
    sha256: str = ""
    size: int = 0
    commit: str = ""
    figures: str = ""
    archs: tuple[str, ...] = ()
    read: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """A bug of some releases that no fix of patchkit mends.

    ``take`` is the release to override the pin of such a one by, None where none is offered.
    """

    versions: str
    says: str
    instead: str
    source: str
    take: Version | None = None

    def covers(self, version: Version) -> bool:
        return SpecifierSet(self.versions).contains(version.base_version)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseFacts:
    """Everything known about the releases of one project, oldest first.

    ``torch`` maps a series of torch, ``2.11``, to what its wheels pin.
    """

    default: Version
    releases: tuple[Release, ...]
    git: str
    archive: str
    torch: Mapping[str, ExactPin]

    def release(self, version: Version) -> Release | None:
        return next((each for each in self.releases if each.version == version), None)

    def known(self, version: Version) -> Release:
        """Return the release of a version. Raises SourceError, naming those that are known."""
        if found := self.release(version):
            return found
        names = ", ".join(str(each.version) for each in self.releases)
        raise SourceError(
            f"NCCL {version} is not among the releases that this patchkit knows",
            why="it is mistyped, or newer than the recipe",
            hint=f"known are {names}; others can be built from a folder, from an archive with "
            f"--sha256, or from {self.git}@COMMIT",
        )

    def pin_of_torch(self, torch: str) -> ExactPin | None:
        """Return what the wheels of a torch pin, None if the recipe does not know it."""
        return self.torch.get(".".join(torch.split(".")[:2]))


@cache
def load_facts(project: str = "nccl") -> ReleaseFacts:
    """Return the facts that ship with a recipe."""
    place = RECIPES / project / "recipe.toml"
    upstream = read_toml(dict[str, str], place, key="upstream")
    return ReleaseFacts(
        default=read_toml(Version, place, key="default"),
        releases=read_toml(tuple[Release, ...], place, key="release"),
        git=upstream["git"],
        archive=upstream["archive"],
        torch=read_toml(dict[str, ExactPin], place, key="torch"),
    )
