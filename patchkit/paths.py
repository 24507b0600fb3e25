"""Where patchkit's own data lies: inside an installed package, or beside it in a checkout."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
RECIPES = next(
    (path for path in (_PACKAGE / "recipes", _PACKAGE.parent / "recipes") if path.is_dir()),
    _PACKAGE / "recipes",
)
