"""Load the files of fixes: modules below ``patchkit.recipes`` that define one ``FIX`` each.

What their claims rest on stands in ``evidence.toml``, beside ``recipe.toml``.
"""

import contextlib
import importlib
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from patchkit.errors import DriftError, PatchkitError, RecipeError
from patchkit.patching.fix import Evidence, Fix
from patchkit.records import read_toml
from patchkit.source.project import is_shipped

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
