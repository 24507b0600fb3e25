"""Describe upstream projects. A project is a folder: ``recipes/NAME``, or one that a user names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from packaging.utils import canonicalize_name

from patchkit.errors import RecipeError, UsageError
from patchkit.frozen import frozen
from patchkit.quoting import quoted
from patchkit.records import RECIPES, read_toml

RECIPES_VARIABLE = "PATCHKIT_RECIPES"
"""A variable with folders of recipes outside the package, separated as in PATH."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_SPELLING = (
    "an unpacked sdist, a git checkout, an sdist file, an installed package, "
    "or a release such as {}"
)


@frozen
class VersionFile:
    """The file of a tree that tells its version.

    ``numbers`` are patterns with one group each; the version is what they find, joined by dots.
    ``suffix`` is the pattern of what follows without a dot, such as ``rc1``; it may find nothing.
    """

    path: str
    numbers: tuple[str, ...]
    suffix: str = ""


@frozen
class Project:
    """One upstream project: the table ``[project]`` of its ``recipe.toml``.

    A folder with all ``markers`` is a tree of the project; ``where`` names some of them in an
    error, ``spelling`` says what an option for sources may name, and ``example`` is a release.
    ``distribution`` is its name on a package index, ``package`` the folder that a wheel of it
    installs. ``parts`` are the paths of which it is built (all, if empty): a patch is taken of them
    alone. ``version`` is the file that tells a tree's version; without it PKG-INFO and git tags
    tell it. `patchkit build` makes a wheel of a tree, and takes the options ``build_options``, if
    these are not None. Projects with a lower ``rank`` are listed first.
    """

    title: str
    markers: tuple[str, ...]
    distribution: str = ""
    package: str = ""
    where: str = ""
    spelling: str = ""
    example: str = ""
    parts: tuple[str, ...] = ()
    version: VersionFile | None = None
    build_options: tuple[str, ...] | None = None
    rank: int = 9

    @property
    def version_variable(self) -> str:
        """Return the variable of setuptools-scm that names the version of a checkout.

        Its value precedes any tag, here and in the build.
        """
        name = canonicalize_name(self.distribution).replace("-", "_").upper()
        return f"SETUPTOOLS_SCM_PRETEND_VERSION_FOR_{name}"


def example(project: str) -> str:
    """Return a release as an option names it: ``vllm==0.33.0``."""
    return projects()[project].example or f"{project}==X.Y.Z"


def describe_sources(project: str) -> str:
    """Return what an option for the sources of a project may name."""
    return projects()[project].spelling or _SPELLING.format(example(project))


def recipe_folders(project: str) -> tuple[Path, ...]:
    """Return the folders of a project's recipe: patchkit's first, then those that a user names."""
    folders = [parent / project for parent in (RECIPES, *user_recipes())]
    return tuple(folder for folder in folders if (folder / "recipe.toml").is_file())


def recipe_folder(project: str) -> Path:
    """Return the folder of a project's recipe that describes the project."""
    return recipe_folders(project)[0]


def is_shipped(folder: Path) -> bool:
    """Return whether a recipe's folder is part of patchkit."""
    return folder.parent == RECIPES


@cache
def user_recipes() -> tuple[Path, ...]:
    """Return the folders of recipes that a user names. Raises UsageError if one is missing."""
    value = os.environ.get(RECIPES_VARIABLE, "")
    folders = tuple(Path(text).resolve() for text in value.split(os.pathsep) if text)
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
    """Return every project by name, in the order of their ranks."""
    by_rank = sorted(_read_projects(), key=lambda item: (item[1].rank, item[0]))
    return dict(by_rank)


def _read_projects() -> Iterator[tuple[str, Project]]:
    """Yield name and record of each project. Raises RecipeError if a folder describes none."""
    names = set()
    for parent in (RECIPES, *user_recipes()):
        names |= {place.parent.name for place in parent.glob("*/recipe.toml")}

    for name in names:
        place = recipe_folder(name) / "recipe.toml"
        if not _NAME.fullmatch(name):
            raise RecipeError(
                f"{place.parent}: no name for a project",
                why="an option and a Python package have this name",
                hint="name it with lower-case letters, digits and _, as in sglang",
            )
        project = read_toml(Project, place, RecipeError, key="project")
        yield name, project


def project_named(name: str) -> str:
    """Return the project with this name or distribution, in any spelling; "" if none has it."""
    wanted = canonicalize_name(name)
    for project, facts in projects().items():
        if wanted in (project, canonicalize_name(facts.distribution)):
            return project
    return ""
