"""Find which libraries of patchkit are missing, and the command that installs them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import util
from pathlib import Path

from patchkit.errors import HostError
from patchkit.quoting import quoted

BUILD = ("auditwheel", "build", "ninja", "pyproject_hooks", "scikit_build_core")
"""Import names of the libraries in the extra ``build``."""
BASE = (
    "cmake",
    "libcst",
    "lz4",
    "packaging",
    "platformdirs",
    "pypi_simple",
    "uv",
    "yaml",
    "zstandard",
)
"""Import names of the libraries that patchkit always depends on, except click."""


def require_libraries(names: Iterable[str], extra: str = "") -> None:
    """Raise HostError unless these libraries of an extra, or of patchkit itself, are installed."""
    if missing := lacking(names):
        raise missing_libraries(missing, extra)


def lacking(names: Iterable[str]) -> list[str]:
    """Return which of these libraries are not installed."""
    specs = {name: util.find_spec(name) for name in names}
    # A folder build/ has a spec without an origin.
    return [name for name, spec in specs.items() if spec is None or spec.origin is None]


def missing_libraries(names: list[str], extra: str = "") -> HostError:
    """Return the error for libraries that are not installed."""
    # Never a bare name: `patchkit` on the package index is another project.
    checkout = Path(__file__).parents[1]
    is_here = (checkout / "pyproject.toml").is_file()
    place = str(checkout) if is_here else "."
    without = "all that it depends on, as by --no-deps"
    if extra:
        place += f"[{extra}]"
        without = f"its extra {extra!r}"

    command = quoted(sys.executable, "-m", "pip", "install", place)
    return HostError(
        f"not installed: {', '.join(names)}",
        why=f"patchkit was installed without {without}",
        hint=command if is_here else f"in a clone of patchkit: {command}",
    )
