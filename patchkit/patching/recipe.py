"""Load recipes. A recipe is everything that patchkit knows about one upstream project."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from patchkit.errors import SourceError
from patchkit.frozen import frozen
from patchkit.patching.fix import Evidence, Fix, Request
from patchkit.patching.fix_file import load_fixes
from patchkit.records import RECIPES, read_json, read_toml
from patchkit.source.detect import projects
from patchkit.source.releases import Bug

# Files that can change a plan: of one recipe, and of all recipes together.
_DECISIVE = (
    "recipe.toml",
    "*.csv",
    "*.tsv",
    "*.py",
    "*.cmake",
    "fixes/*.py",
    "moe_configs/*",
)
_SHARED = ("kit.py", "targets.toml", "toolchain.toml")


@frozen
class Refused:
    """Releases that patchkit does not patch, and the reasons."""

    versions: str
    reasons: tuple[str, ...]


@frozen
class BuildVariable:
    """The variable that names the archs for a build, and the template of its value.

    In ``value``, ``{list}`` is the arch list with suffixes, ``{plain}`` nvcc's name without suffix.
    """

    variable: str
    value: str

    def value_for(self, request: Request) -> str:
        plain = request.target.plain_arch(request.arch)
        return self.value.format(list=request.arch_list, plain=plain)

    def setting(self, request: Request) -> str:
        """Return ``VARIABLE=value`` for a command line."""
        return f"{self.variable}={self.value_for(request)}"


@frozen
class Recipe:
    """The content of ``recipe.toml``, and the fixes, in the order in which they are applied."""

    project: str
    home: Path
    releases: tuple[Version, ...]
    refused: tuple[Refused, ...]
    fixes: tuple[Fix, ...]
    build: BuildVariable
    bugs: tuple[Bug, ...]
    digest: str

    @property
    def newest(self) -> Version:
        return max(self.releases)

    def knows(self, version: Version) -> bool:
        """Return whether the recipe lists this release; a local label such as +cu130 is ignored."""
        return Version(version.public) in self.releases

    def check(self, version: Version) -> None:
        """Raise SourceError, with the reasons, for a release that is not supported."""
        if reasons := self.refusal(version):
            raise SourceError(
                f"{self.project} {version} is not supported",
                why="; ".join(reasons),
                hint=f"use one of {self.supported[0]} to {self.newest}",
            )

    @property
    def supported(self) -> list[Version]:
        """Known releases that are not refused, oldest first."""
        return sorted(v for v in self.releases if not self.refusal(v))

    def refusal(self, version: Version) -> tuple[str, ...]:
        """Return the reasons why a release is not supported, () if it is not refused."""
        for entry in self.refused:
            if SpecifierSet(entry.versions).contains(version, prereleases=True):
                return entry.reasons
        return ()

    def bugs_of(self, version: Version) -> tuple[Bug, ...]:
        """Return the bugs of a release that patchkit has no fix for."""
        return tuple(bug for bug in self.bugs if bug.covers(version))

    def fix(self, fix_id: str) -> Fix | None:
        return next((fix for fix in self.fixes if fix.id == fix_id), None)


@cache
def load_recipe(project: str = "vllm") -> Recipe:
    """Read a recipe that ships with patchkit."""
    home = RECIPES / project
    place = home / "recipe.toml"
    names = read_toml(list[str], place, key="fixes")
    table = read_toml(dict[str, Any], place)
    # `releases` is a list; else there is a [[release]] table each, of which those with read count.
    versions = table.get("releases")
    if versions is None:
        versions = [r["version"] for r in table["release"] if r.get("read", True)]
    bugs: tuple[Bug, ...] = ()
    if "bug" in table:
        bugs = read_toml(tuple[Bug, ...], place, key="bug")

    return Recipe(
        project=project,
        home=home,
        releases=tuple(map(Version, versions)),
        refused=read_toml(tuple[Refused, ...], place, key="refused"),
        fixes=load_fixes(home, names),
        build=read_toml(BuildVariable, place, key="build"),
        bugs=bugs,
        digest=_digest_of(home),
    )


def _digest_of(home: Path) -> str:
    """Return one sha256 over all files that can change a plan: facts, fixes, helpers, targets."""
    files: list[Path] = []
    for pattern in _DECISIVE:
        files += sorted(home.glob(pattern))
    files += [home.parent / name for name in _SHARED]

    # With the separator, moving text from one file to the next changes the digest.
    data = b"\0".join(file.read_bytes() for file in files)
    return hashlib.sha256(data).hexdigest()


def load_recipes() -> tuple[Recipe, ...]:
    """Return every recipe that ships with patchkit."""
    return tuple(map(load_recipe, projects()))


class SupportLevel(enum.StrEnum):
    """How much a release needs a fix, or why it does not need it."""

    REQUIRED = "required"
    RECOMMENDED = "recommended"
    OPTIONAL = "optional"
    UPSTREAM = "upstream"
    NOT_APPLICABLE = "not-applicable"


Support = Mapping[str, Mapping[str, Mapping[str, SupportLevel]]]
"""fix id → arch mode → release → level"""


@cache
def load_support(project: str = "vllm") -> Support:
    """Return the table ``support.json`` of a recipe, {} if the recipe has none."""
    place = RECIPES / project / "support.json"
    if not place.is_file():
        return {}
    text = place.read_text(encoding="utf-8")
    return read_json(dict[str, dict[str, dict[str, SupportLevel]]], text)


@frozen
class Claim:
    """Advice that guides give, with a verdict on it; ``folklore.toml`` describes the fields."""

    id: str
    says: str
    verdict: str
    versions: str
    why: str
    instead: str
    evidence: tuple[Evidence, ...]


@cache
def load_claims(project: str = "vllm") -> tuple[Claim, ...]:
    """Return the claims in ``folklore.toml`` of a recipe, in order; () if there is no such file."""
    place = RECIPES / project / "folklore.toml"
    if not place.is_file():
        return ()
    return read_toml(tuple[Claim, ...], place, key="claim")
