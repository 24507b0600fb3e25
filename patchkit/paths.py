"""Name the folder of patchkit's own data."""

from __future__ import annotations

from pathlib import Path

# In a checkout a link to the folder beside the package; in a wheel the folder itself.
RECIPES = Path(__file__).resolve().parent / "recipes"
