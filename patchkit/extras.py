"""Find which libraries that patchkit needs are missing, and the command that installs them."""

import sys
from collections.abc import Iterable
from importlib import util
from pathlib import Path

from patchkit.errors import HostError
from patchkit.quoting import quoted

BUILD = (
    "auditwheel",
    "build",
    "filelock",
    "jinja2",
    "ninja",
    "scikit_build_core",
    "tvm_ffi",
)
"""Import names of the libraries that the extra ``build`` installs."""
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
"""Import names of the libraries that every installation has, except click."""


def require_libraries(names: Iterable[str], extra: str = "") -> None:
    """Raise HostError unless these libraries are installed.

    ``extra`` is the extra of patchkit that installs them, "" for its own requirements.
    """
    if missing := lacking(names):
        raise missing_libraries(missing, extra)


def lacking(names: Iterable[str]) -> list[str]:
    """Return the libraries among ``names`` that are not installed."""
    specs = {name: util.find_spec(name) for name in names}
    # A mere folder called build/ also has a spec, but one without an origin.
    return [name for name, spec in specs.items() if spec is None or spec.origin is None]


def missing_libraries(names: list[str], extra: str = "") -> HostError:
    """Return the error for missing libraries, with the command that installs them."""
    # The command names a folder: `patchkit` on the package index is another project.
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
