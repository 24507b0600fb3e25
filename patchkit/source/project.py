"""Describe upstream projects.

A project has a folder with its recipe: ``recipes/NAME``, or a folder that a user names.
"""

import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from packaging.utils import canonicalize_name

from patchkit.errors import RecipeError, UsageError
from patchkit.frozen import Texts, frozen
from patchkit.quoting import quoted
from patchkit.records import RECIPES, RECIPES_VARIABLE, read_toml

_NAME = r"[a-z][a-z0-9_]*"
_SOURCES = (
    "an unpacked archive, a git checkout, an archive file, an installed package, "
    "a git URL with a commit, or a release such as {}"
)


@frozen
class VersionFile:
    """The file of a tree that tells its version.

    ``numbers`` are regular expressions with one group each; the version is the texts of the groups,
    joined by dots. ``suffix`` is one for a text that follows without a dot, such as ``rc1``; it
    need not match.
    """

    path: str
    numbers: Texts
    suffix: str = ""


@frozen
class Project:
    """An upstream project: the table ``[project]`` of its ``recipe.toml``.

    A folder that has all the files ``markers`` is a tree of the project; an error names the first
    two. ``example`` is a release: ``vllm==0.33.0``. ``distribution`` is the project's
    name on a package index, ``package`` the folder that its wheel installs. ``parts`` are the paths
    from which it is built, empty for all: of a user's patch, only these are applied. ``version`` is
    the file that tells the version of a tree, None if PKG-INFO and git tags tell it.
    ``build_options`` are the options that `patchkit build` takes for it, None if it cannot be
    built. Projects with a lower ``rank`` are listed first.
    """

    title: str
    markers: Texts
    distribution: str = ""
    package: str = ""
    example: str = ""
    parts: Texts = ()
    version: VersionFile | None = None
    build_options: Texts | None = None
    rank: int = 9

    @property
    def version_variable(self) -> str:
        """Return the variable of setuptools-scm by which a user names the version of a checkout.

        Its value overrides any tag, in patchkit and in the build.
        """
        name = canonicalize_name(self.distribution).replace("-", "_").upper()
        return f"SETUPTOOLS_SCM_PRETEND_VERSION_FOR_{name}"


def example(project: str) -> str:
    """Return an example of a release as options take it: ``vllm==0.33.0``."""
    return projects()[project].example or f"{project}==X.Y.Z"


def first_example() -> str:
    """Return a release of the first project."""
    return example(next(iter(projects())))


def describe_sources(project: str) -> str:
    """Return, in words for a hint, what an option for the sources of a project may name."""
    return _SOURCES.format(example(project))


def recipe_folders(project: str) -> tuple[Path, ...]:
    """Return the folders of a project's recipe: patchkit's first, then those that a user names."""
    folders = [parent / project for parent in (RECIPES, *user_recipes())]
    return tuple(folder for folder in folders if (folder / "recipe.toml").is_file())


def recipe_folder(project: str) -> Path:
    """Return the first folder of a project's recipe, the one that describes the project."""
    return recipe_folders(project)[0]


def is_shipped(folder: Path) -> bool:
    """Return whether a recipe's folder is part of patchkit."""
    return folder.parent == RECIPES


@cache
def user_recipes() -> tuple[Path, ...]:
    """Return the folders of recipes that a user names. Raises UsageError if one has no recipe."""
    texts = os.environ.get(RECIPES_VARIABLE, "").split(os.pathsep)
    folders = tuple(Path(text).resolve() for text in texts if text)
    for folder in folders:
        if not any(folder.glob("*/recipe.toml")):
            raise UsageError(
                f"{folder}: holds no recipe",
                why="a folder of recipes has a folder for each project, with a recipe.toml",
                hint=f"{quoted('ls', folder)}; --recipes and {RECIPES_VARIABLE} name such folders",
            )
    return folders


@cache
def projects() -> Mapping[str, Project]:
    """Return name → project for every project, in the order of their ranks."""
    by_rank = sorted(_read_projects(), key=lambda item: (item[1].rank, item[0]))
    return dict(by_rank)


def _read_projects() -> Iterator[tuple[str, Project]]:
    """Yield each project and its name.

    Raises RecipeError if the name of a folder is no name for a project, or its table is malformed.
    """
    parents = (RECIPES, *user_recipes())
    places = [place for parent in parents for place in parent.glob("*/recipe.toml")]
    for name in {place.parent.name for place in places}:
        place = recipe_folder(name) / "recipe.toml"
        if not re.fullmatch(_NAME, name):
            raise RecipeError(
                f"{place.parent}: no name for a project",
                why="an option and a Python package have this name",
                hint="name it with lower-case letters, digits and _, as in sglang",
            )
        yield name, read_toml(Project, place, RecipeError, key="project")


def project_named(name: str) -> str:
    """Return the project with this name or distribution, in any spelling; "" if there is none."""
    wanted = canonicalize_name(name)
    for project, facts in projects().items():
        if wanted in (project, canonicalize_name(facts.distribution)):
            return project
    return ""
