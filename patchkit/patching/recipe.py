"""Load recipes. A recipe is everything that patchkit knows about one upstream project.

The files of its fixes are modules below patchkit.recipes that define one FIX each. What their
claims rest on stands in evidence.toml, beside recipe.toml.
"""

import contextlib
import hashlib
import importlib
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from packaging.version import Version

from patchkit.errors import DriftError, PatchkitError, RecipeError, SourceError
from patchkit.frozen import Values, frozen
from patchkit.patching.fix import Evidence, Fix
from patchkit.records import RECIPES, read_json, read_toml
from patchkit.source.project import (
    is_shipped,
    projects,
    recipe_folder,
    recipe_folders,
)
from patchkit.source.releases import Bug, RecipeFacts, load_facts, read_lock

_PACKAGE = "patchkit.recipes"


def load_fixes(home: Path, names: Sequence[str]) -> tuple[Fix, ...]:
    """Import the fixes of the recipe in ``home``, in the order of its ``recipe.toml``.

    Raises RecipeError, with file and line, if a module cannot be imported or has no ``FIX``.
    """
    if not is_shipped(home):
        _add_to_packages(home)

    place = home / "evidence.toml"
    evidence: dict[str, tuple[Evidence, ...]] = {}
    if place.is_file():
        evidence = read_toml(dict[str, tuple[Evidence, ...]], place, RecipeError)

    fixes = []
    for name in names:
        fix = _load_fix(home, name)
        rows = evidence.pop(name, ())
        fixes.append(replace(fix, id=fix.id or name, evidence=(*fix.evidence, *rows)))

    for name in evidence:
        what = f"{place}: the recipe has no fix {name}"
        raise RecipeError(what, hint=f"the fixes are {', '.join(names)}")
    return tuple(fixes)


def _add_to_packages(home: Path) -> None:
    """Let the modules of a recipe outside patchkit be imported as ``patchkit.recipes.NAME``."""
    package = f"{_PACKAGE}.{home.name}"
    folders = {_PACKAGE: home.parent, package: home, f"{package}.fixes": home / "fixes"}
    for name, folder in folders.items():
        paths = importlib.import_module(name).__path__
        if str(folder) not in paths:
            paths.append(str(folder))


def _load_fix(home: Path, name: str) -> Fix:
    try:
        module = importlib.import_module(f"{_PACKAGE}.{home.name}.fixes.{name}")
        fix = module.FIX
        if not isinstance(fix, Fix):
            raise TypeError(f"FIX is a {type(fix).__name__}, not a Fix")
    except (OSError, MemoryError):
        raise
    except Exception as error:
        file = (home / "fixes" / f"{name}.py").resolve()
        hint = "correct it, or install patchkit again"
        raise _mistake_of(file, error, hint) from error
    return fix


@contextlib.contextmanager
def explain_failure(fix: Fix) -> Iterator[None]:
    """Raise RecipeError, with file and line, if the code of a fix fails inside the block.

    RecursionError becomes a DriftError: a file of the tree is nested too deeply. PatchkitError,
    OSError and MemoryError pass unchanged.
    """
    try:
        yield
    except (PatchkitError, OSError, MemoryError):
        raise
    except Exception as error:
        if any(isinstance(cause, RecursionError) for cause in _causes_of(error)):
            raise DriftError(
                f"{fix.id}: a file that it looks at is nested too deeply to be compared",
                why="no release has such code: it was edited by hand, or made to do harm",
                hint="restore the files from the release, or leave it out with "
                f"--without {fix.id}",
            ) from None

        file = Path(fix.look.__code__.co_filename).resolve()
        hint = f"leave it out with --without {fix.id}, and report it"
        raise _mistake_of(file, error, hint) from error


def _causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes: libcst raises another error while one is handled."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _mistake_of(file: Path, error: Exception, hint: str) -> RecipeError:
    """Return the error for a file whose code fails.

    It names the line of the file that is the last in the traceback, or line 1 if none is in it.
    """
    if isinstance(error, SyntaxError):
        # A SyntaxError names its file, which may be a helper that this file imports.
        place = f"{error.filename}:{error.lineno}"
        problem = error.msg
    else:
        steps = traceback.extract_tb(error.__traceback__)
        lines = [step.lineno for step in steps if Path(step.filename).resolve() == file]
        place = f"{file}:{[1, *lines][-1]}"
        problem = f"{type(error).__name__}: {error}"
    return RecipeError(
        f"{place}: {problem}",
        why="the file was edited by hand, or belongs to another version of patchkit",
        hint=hint,
    )


# Files that can change a plan: of one recipe, and of all recipes together.
_DECISIVE = (
    "recipe.toml",
    "stand_ins.toml",
    "*.csv",
    "*.tsv",
    "*.py",
    "*.cmake",
    "fixes/*.py",
    "moe_configs/*",
)
_SHARED = ("kit.py", "targets.toml", "toolchain.toml")


@frozen
class Recipe:
    """The facts of ``recipe.toml``, and the fixes, in the order in which they are applied.

    ``added`` are the folders outside patchkit that the recipe or a part of it comes from.
    """

    project: str
    home: Path
    facts: RecipeFacts
    releases: tuple[Version, ...]
    fixes: tuple[Fix, ...]
    digest: str
    added: tuple[Path, ...]

    @property
    def newest(self) -> Version:
        return max(self.releases)

    def knows(self, version: Version) -> bool:
        """Return whether the recipe lists this release; a local label such as +cu130 is ignored."""
        return Version(version.public) in self.releases

    def following(self, version: Version) -> Version:
        """Return the release that a pre-release leads to; the version itself for any other."""
        later = []
        if version.is_prerelease and not self.knows(version):
            later = [release for release in self.releases if release > version]
        return min(later, default=Version(version.base_version))

    def check(self, version: Version) -> None:
        """Raise SourceError, with the reasons, for a release that is not supported."""
        if reasons := self.facts.refusal(version):
            raise SourceError(
                f"{self.project} {version} is not supported",
                why="; ".join(reasons),
                hint=f"use one of {self.supported[0]} to {self.newest}",
            )

    @property
    def supported(self) -> list[Version]:
        """Known releases that are not refused, oldest first."""
        return sorted(v for v in self.releases if not self.facts.refusal(v))

    def bugs_of(self, version: Version) -> tuple[Bug, ...]:
        """Return the bugs of a release that patchkit has no fix for."""
        return tuple(bug for bug in self.facts.bugs if bug.covers(version))

    def fix(self, fix_id: str) -> Fix | None:
        return next((fix for fix in self.fixes if fix.id == fix_id), None)


@cache
def load_recipe(project: str) -> Recipe:
    """Read the recipe of a project, with the fixes that a user's folders add to it.

    Raises RecipeError for a mistake in it.
    """
    folders = recipe_folders(project)
    home = folders[0]
    facts = load_facts(project)
    fixes: list[Fix] = []
    for folder in folders:
        names = read_toml(list[str], folder / "recipe.toml", RecipeError, key="fixes")
        fixes += load_fixes(folder, names)
    for fix_id, count in Counter(fix.id for fix in fixes).items():
        if count > 1:
            raise RecipeError(
                f"{folders[-1] / 'recipe.toml'}: the fix {fix_id} is there already",
                why="patchkit or another folder of recipes has a fix of this id",
                hint="give the new one another id",
            )

    return Recipe(
        project=project,
        home=home,
        facts=facts,
        releases=_known_releases(facts, home),
        fixes=tuple(fixes),
        digest=_digest_of(folders),
        added=tuple(folder for folder in folders if not is_shipped(folder)),
    )


def _known_releases(facts: RecipeFacts, home: Path) -> tuple[Version, ...]:
    if facts.listed:
        return facts.listed
    if facts.releases:
        return tuple(release.version for release in facts.releases if release.read)
    lock = home / "lock.toml"
    return tuple(map(Version, read_lock(lock))) if lock.is_file() else ()


def _digest_of(folders: Sequence[Path]) -> str:
    """Return one sha256 over all files that can change a plan: facts, fixes, helpers, targets."""
    files: list[Path] = []
    for folder in folders:
        for pattern in _DECISIVE:
            files += sorted(folder.glob(pattern))
    files += [RECIPES / name for name in _SHARED]

    # With the separator, moving text from one file to the next changes the digest.
    data = b"\0".join(file.read_bytes() for file in files)
    return hashlib.sha256(data).hexdigest()


def load_recipes() -> tuple[Recipe, ...]:
    """Return the recipe of every project."""
    return tuple(map(load_recipe, projects()))


Support = Mapping[str, Mapping[str, Values]]
"""Id of a fix → arch mode → release → level of support."""


@cache
def load_support(project: str) -> Support:
    """Return the table ``support.json`` of a recipe, {} if the recipe has none."""
    place = recipe_folder(project) / "support.json"
    if not place.is_file():
        return {}
    text = place.read_text(encoding="utf-8")
    return read_json(dict[str, dict[str, Values]], text)


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
def load_claims(project: str) -> tuple[Claim, ...]:
    """Return the claims in ``folklore.toml`` of a recipe, in order; () if there is no such file."""
    place = recipe_folder(project) / "folklore.toml"
    if not place.is_file():
        return ()
    return read_toml(tuple[Claim, ...], place, key="claim")
