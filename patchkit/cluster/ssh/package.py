"""Pack what a node runs, so that it can be sent: the ground and the rooms of `runtime` it needs."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from patchkit.paths import RECIPES

_HOME = Path(__file__).resolve().parents[2]  # the package itself
# Python's standard library is all that these import when they run on a node.
_ROOMS = (
    *("durable", "runtime/host", "runtime/python", "cluster/agent", "cluster/health"),
    *("cluster/models", "cluster/openai", "doctor/smoke"),
)
_WINGS = ("runtime", "cluster", "doctor")
_REMOTE = "cluster/ssh"
_DATA = ("hardware.toml", "network.toml")  # of recipes/env
_WHEN = (1980, 1, 1, 0, 0, 0)  # zip's first day: the same bytes for the same package


@cache
def package() -> bytes:
    """Return a zip of the package, the same bytes for the same files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, path in sorted(_members()):
            entry = zipfile.ZipInfo(name, _WHEN)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _members() -> Iterator[tuple[str, Path]]:
    rooms = (_HOME / room for room in (*_ROOMS, _REMOTE))
    files = [*_HOME.glob("*.py"), *(_HOME / room / "__init__.py" for room in _WINGS)]
    files += [path for room in rooms for path in room.glob("*.py")]
    for path in files:
        yield f"patchkit/{path.relative_to(_HOME)}", path
    for name in _DATA:
        yield f"patchkit/recipes/env/{name}", RECIPES / "env" / name
