"""The files of fixes: each a module below ``patchkit.recipes`` that holds one ``FIX``."""

from __future__ import annotations

import contextlib
import importlib
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from patchkit.errors import DriftError, PatchkitError, RecipeError
from patchkit.patching.fix import Fix


def load_fixes(home: Path, names: Sequence[str]) -> tuple[Fix, ...]:
    """Import the fixes of the recipe in ``home``, in the order of its ``recipe.toml``.

    Raises RecipeError, with the file, unless there is a file for each name and a name for each
    file, and every file runs and holds the fix of its name.
    """
    files = {file.stem: file.resolve() for file in (home / "fixes").glob("[!_]*.py")}
    for name in sorted(files.keys() ^ set(names)):
        table = (home / "recipe.toml").resolve()
        problem = f"its list and fixes/ differ: {name} is in one of them alone"
        raise _mistake_at(table, problem)

    fixes = []
    for name in names:
        try:
            module = importlib.import_module(
                f"patchkit.recipes.{home.name}.fixes.{name}"
            )
        except (OSError, MemoryError):
            raise
        except Exception as error:
            raise _mistake_of(files[name], error) from error
        fix = getattr(module, "FIX", None)
        if not isinstance(fix, Fix) or fix.id != name:
            raise _mistake_at(files[name], f'holds no FIX = kit.Fix(id="{name}", …)')

        fixes.append(fix)
    return tuple(fixes)


@contextlib.contextmanager
def explain_failure(fix: Fix) -> Iterator[None]:
    """Raise RecipeError, with file and line, where a fix's own code fails on a tree.

    A file that is nested too deeply is a DriftError; what the system refuses stays as it is.
    """
    try:
        yield
    except (PatchkitError, OSError, MemoryError):
        raise
    except Exception as error:
        causes = list(_causes_of(error))
        if any(isinstance(cause, RecursionError) for cause in causes):
            raise _too_deep(fix) from None

        file = Path(fix.look.__code__.co_filename).resolve()
        mistake = _mistake_of(file, error)
        mistake.hint = f"leave it out with --without {fix.id}, and report it"
        raise mistake from error


def _causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes: a `finally` of libcst hides the error that it follows."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _too_deep(fix: Fix) -> DriftError:
    return DriftError(
        f"{fix.id}: a file that it looks at is nested too deeply to be compared",
        why="no release has such code: it was edited by hand, or made to do harm",
        hint=f"restore the files from the release, or leave it out with --without {fix.id}",
    )


def _mistake_of(file: Path, error: Exception) -> RecipeError:
    """Return the error for a file that does not run, with the line in it that is at fault."""
    if isinstance(error, SyntaxError):
        # The file may import a helper that is at fault: a SyntaxError names its file itself.
        place = Path(error.filename or file)
        return _mistake_at(place, f"{error.msg}", error.lineno or 1)

    line = 1
    for step in traceback.extract_tb(error.__traceback__):
        if Path(step.filename).resolve() == file:
            line = step.lineno or 1
    return _mistake_at(file, f"{type(error).__name__}: {error}", line)


def _mistake_at(file: Path, problem: str, line: int = 1) -> RecipeError:
    return RecipeError(
        f"{file}:{line}: {problem}",
        why="the file was edited by hand, or belongs to another version of patchkit",
        hint="correct it, or install patchkit again",
    )
