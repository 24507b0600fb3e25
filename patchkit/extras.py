"""Find which libraries of patchkit are missing, and the command that installs them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import util
from pathlib import Path

from patchkit.errors import HostError
from patchkit.quoting import quoted

BUILD = ("auditwheel", "build", "ninja", "pyproject_hooks", "scikit_build_core")
"""Import names of what the extra ``build`` brings."""
BASE = ("cmake", "libcst", "packaging", "platformdirs", "pypi_simple", "uv", "yaml")
"""Import names of what a plain installation brings beside click, and `pip --no-deps` does not."""


def require_base() -> None:
    """Raise HostError unless all that a plain installation brings is there."""
    _require(BASE, "", "patchkit was installed with --no-deps, which serves what a node runs")


def require_build() -> None:
    """Raise HostError unless all that the extra ``build`` brings is there."""
    _require(BUILD, "[build]", "patchkit was installed without its extra 'build'")


def missing_library(name: str) -> HostError:
    """Return the error for a library that an import did not find."""
    return _missing([name], "", "patchkit was installed without all that it depends on")


def _require(names: Iterable[str], extra: str, why: str) -> None:
    specs = {name: util.find_spec(name) for name in names}
    # A folder build/ has a spec without an origin.
    if missing := [name for name, spec in specs.items() if spec is None or spec.origin is None]:
        raise _missing(missing, extra, why)


def _missing(names: list[str], extra: str, why: str) -> HostError:
    # Never a bare name: `patchkit` on the package index is another project.
    checkout = Path(__file__).parents[1]
    is_here = (checkout / "pyproject.toml").is_file()
    command = quoted(
        sys.executable, "-m", "pip", "install", f"{checkout if is_here else '.'}{extra}"
    )
    return HostError(
        f"not installed: {', '.join(names)}",
        why=why,
        hint=command if is_here else f"in a clone of patchkit: {command}",
    )
