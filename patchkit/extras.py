"""Find which libraries of patchkit are missing, and the command that installs them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import util
from pathlib import Path

from patchkit import __version__
from patchkit.errors import HostError
from patchkit.quoting import quoted

# Not the name of the package: `patchkit` on the package index is another project.
DISTRIBUTION = "patchkit-gb10"
BUILD = ("auditwheel", "build", "ninja", "pyproject_hooks", "scikit_build_core")
"""Import names of what the extra ``build`` brings."""
BASE = (
    "cmake",
    "libcst",
    "packaging",
    "platformdirs",
    "pypi_simple",
    "uv",
    "yaml",
)
"""Import names of what a plain installation brings beside click, and `pip --no-deps` does not."""


def require_base() -> None:
    """Raise HostError unless all that a plain installation brings is there."""
    _require(BASE, "", "patchkit was installed with --no-deps, which serves what a node runs")


def require_build() -> None:
    """Raise HostError unless all that the extra ``build`` brings is there."""
    _require(BUILD, "[build]", "patchkit was installed without its extra 'build'")


def missing_library(name: str) -> HostError:
    """Return the error for a library that an import did not find."""
    if others := namesakes():
        return HostError(
            f"{name} cannot be imported",
            why=f"{' and '.join(others)} is installed, too: another project with the same package",
            hint=quoted(sys.executable, "-m", "pip", "uninstall", *others)
            + "; then install this one again",
        )
    return _missing([name], "", "patchkit was installed without all that it depends on")


def namesakes() -> list[str]:
    """Return the other installed distributions that bring a package ``patchkit``."""
    from importlib import metadata  # 20 ms, and more to read what is installed

    owners = metadata.packages_distributions().get("patchkit", [])
    return sorted({name for name in owners if name.lower().replace("_", "-") != DISTRIBUTION})


def _require(names: Iterable[str], extra: str, why: str) -> None:
    specs = {name: util.find_spec(name) for name in names}
    # A folder build/ has a spec without an origin.
    if missing := [name for name, spec in specs.items() if spec is None or spec.origin is None]:
        raise _missing(missing, extra, why)


def _missing(names: list[str], extra: str, why: str) -> HostError:
    return HostError(
        f"not installed: {', '.join(names)}",
        why=why,
        hint=quoted(sys.executable, "-m", "pip", "install", f"{_own_file()}{extra}"),
    )


def _own_file() -> str:
    """Return what pip installs patchkit from: the checkout, or the file of the wheel.

    Never a bare name, since `patchkit` on the package index is another project.
    """
    checkout = Path(__file__).parents[1]
    if (checkout / "pyproject.toml").is_file():
        return str(checkout)
    import json  # this and what follows take 20 ms, and are for errors alone
    from importlib import metadata
    from urllib.parse import unquote

    try:  # what pip installed it from (PEP 610), a wheel or a folder, if still there
        origin = metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}"
    except metadata.PackageNotFoundError:
        origin = "{}"
    scheme, _, path = json.loads(origin).get("url", "").partition("://")
    if scheme == "file" and (found := Path(unquote(path))).exists():
        return str(found)
    return f"{DISTRIBUTION.replace('-', '_')}-{__version__}-py3-none-any.whl"
