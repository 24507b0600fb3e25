"""A recipe: everything known about one upstream project."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from patchkit.errors import SourceError
from patchkit.patching.fix import Fix
from patchkit.paths import RECIPES


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Releases that patchkit does not patch, and the reasons."""

    versions: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """``recipe.toml`` and the fixes beside it, in the order in which they are applied."""

    project: str
    home: Path
    releases: tuple[Version, ...]
    refused: tuple[Refused, ...]
    fixes: tuple[Fix, ...]
    digest: str

    @property
    def newest(self) -> Version:
        return max(self.releases)

    def knows(self, version: Version) -> bool:
        """Whether this very release is in the table (a local label such as +cu130 is ignored)."""
        return Version(version.public) in self.releases

    def check(self, version: Version) -> None:
        """Raise SourceError, with the reasons, for a release that is not supported."""
        for entry in self.refused:
            if SpecifierSet(entry.versions).contains(version, prereleases=True):
                raise SourceError(
                    f"{self.project} {version} is not supported",
                    why="; ".join(entry.reasons),
                    hint=f"use one of {self.supported[0]} to {self.newest}",
                )

    @property
    def supported(self) -> list[Version]:
        """Known releases that are not refused, oldest first."""
        return sorted(v for v in self.releases if not self._refused(v))

    def _refused(self, version: Version) -> bool:
        return any(SpecifierSet(e.versions).contains(version) for e in self.refused)

    def fix(self, fix_id: str) -> Fix | None:
        return next((fix for fix in self.fixes if fix.id == fix_id), None)


@cache
def load_recipe(project: str = "vllm") -> Recipe:
    """Read a recipe that ships with patchkit."""
    home = RECIPES / project
    table = tomllib.loads((home / "recipe.toml").read_text(encoding="utf-8"))
    order: list[str] = table["fixes"]
    return Recipe(
        project=project,
        home=home,
        releases=tuple(map(Version, table["releases"])),
        refused=tuple(
            Refused(versions=r["versions"], reasons=tuple(r["reasons"])) for r in table["refused"]
        ),
        fixes=tuple(_load_fix(home, name) for name in order),
        digest=_digest(home),
    )


def _load_fix(home: Path, name: str) -> Fix:
    module = _load_module(f"patchkit_recipe_{home.name}.{name}", home / "fixes" / f"{name}.py")
    fix = module.FIX
    assert isinstance(fix, Fix)
    return fix


def _load_module(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _digest(home: Path) -> str:
    """A digest of everything that decides a plan: facts, fixes and targets."""
    names = ("recipe.toml", "stock_archs.csv", "../targets.toml")
    folders = ("fixes/*.py", "moe_configs/*")
    files = [
        *(home / name for name in names),
        *(path for pattern in folders for path in sorted(home.glob(pattern))),
    ]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()
