"""The files of fixes: each a module below ``patchkit.recipes`` that holds one ``FIX``."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import re
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from patchkit.errors import PatchkitError, RecipeError
from patchkit.patching.fix import Evidence, Example, Fix, Need

_FIELDS = {kind.__name__: [f.name for f in fields(kind)] for kind in (Evidence, Example, Fix, Need)}
# CPython's words of the TypeError; they name the class and the mistyped field.
_UNKNOWN = re.compile(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'")


def load_fixes(home: Path, names: Sequence[str]) -> tuple[Fix, ...]:
    """Import the fixes of the recipe in ``home``, in the order of its ``recipe.toml``.

    Raises RecipeError, with file and line, unless there is a file for each name and a name for each
    file, and every file runs and holds the fix of its name.
    """
    table = (home / "recipe.toml").resolve()
    files = {file.stem: file.resolve() for file in sorted((home / "fixes").glob("[!_]*.py"))}
    for name in names:
        if name not in files:
            raise _mistake_at(
                table, _line_of(rf'\s*"{name}"', table), f"no fixes/{name}.py is there"
            )
    for name, file in files.items():
        if name not in names:
            raise _mistake_at(file, 1, f"the fix is not in the list of {table}")
    fixes = []
    for name in names:
        file = files[name]
        try:
            module = importlib.import_module(f"patchkit.recipes.{home.name}.fixes.{name}")
        except Exception as error:
            raise _stumbled(file, error) from error
        fix = getattr(module, "FIX", None)
        if not isinstance(fix, Fix):
            other = next((n for n, value in vars(module).items() if isinstance(value, Fix)), "FIX")
            problem = "holds no fix" if other == "FIX" else f"the fix is called {other}"
            line = _line_of(rf"{other}\b", file)
            raise _mistake_at(file, line, f"{problem}, expected FIX = kit.Fix(…)")
        if fix.id != name:
            line = _line_of(r"\s+id=", file)
            raise _mistake_at(file, line, f"the id is {fix.id!r}, not {name!r}")
        fixes.append(fix)
    return tuple(fixes)


@contextlib.contextmanager
def mistakes_shown(fix: Fix) -> Iterator[None]:
    """Raise RecipeError, with file and line, for a mistake in the functions of a fix."""
    try:
        yield
    except PatchkitError:
        raise
    except Exception as error:
        # The last frame decides: an error raised in patchkit's own code is no mistake of the fix.
        *_, step = traceback.extract_tb(error.__traceback__)
        if step.filename == fix.look.__code__.co_filename:
            raise _stumbled(Path(step.filename).resolve(), error) from error
        raise


def _stumbled(file: Path, error: Exception) -> RecipeError:
    """Return the error for a file that does not run, with the line in it that is at fault."""
    if isinstance(error, SyntaxError):
        # A SyntaxError may be of a helper that the fix imports: it names that file itself.
        return _mistake_at(Path(error.filename or file), error.lineno or 1, f"{error.msg}")
    steps = traceback.extract_tb(error.__traceback__)
    lines = [step.lineno or 1 for step in steps if Path(step.filename).resolve() == file] or [1]
    if unknown := _UNKNOWN.search(str(error)):
        owner, name = unknown.groups()
        close = difflib.get_close_matches(name, _FIELDS.get(owner, ()), n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        return _mistake_at(
            file, _line_of(rf".*\b{name}=", file), f"{owner} has no field {name!r}{meant}"
        )
    return _mistake_at(file, lines[-1], f"{type(error).__name__}: {error}")


def _line_of(pattern: str, file: Path) -> int:
    """Return the first line of a file that begins with ``pattern``, 1 if none does."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return next((number for number, line in enumerate(lines, 1) if re.match(pattern, line)), 1)


def _mistake_at(file: Path, line: int, problem: str) -> RecipeError:
    return RecipeError(
        f"{file}:{line}: {problem}",
        why="the file was edited by hand, or belongs to another version of patchkit",
        hint="correct it, or install patchkit again",
    )
