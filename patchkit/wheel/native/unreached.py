"""Know which kernels of a release its own dispatch never calls on a device.

Each row of ``recipes/PROJECT/unreached.toml`` was read from the sources of its releases. What such
a fat binary holds stays as upstream shipped it: nobody waits for the driver to compile it.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase

from packaging.version import Version

from patchkit.records import RECIPES, read_toml
from patchkit.source.detect import projects
from patchkit.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreached:
    """Kernels that are never called; ``recipes/vllm/unreached.toml`` describes the fields."""

    name: str
    library: str
    kernels: str
    targets: tuple[str, ...]
    source: str
    releases: dict[str, str]

    def is_known(self, version: Version, target: Target) -> bool:
        return version.public in self.releases and target.name in self.targets

    def covers(self, kernels: Collection[str]) -> bool:
        """Check whether all of these kernels are never called."""
        return bool(kernels) and all(re.search(self.kernels, kernel) for kernel in kernels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """What a release of a project calls on a device, as far as somebody has read it."""

    rows: tuple[Unreached, ...] = ()

    def knows(self, library: str) -> bool:
        return any(fnmatchcase(library, row.library) for row in self.rows)

    def never_calls(self, library: str, kernels: Collection[str]) -> Unreached | None:
        """Return what proves that none of these kernels of a library is called; None if nothing."""
        of_library = (row for row in self.rows if fnmatchcase(library, row.library))
        return next((row for row in of_library if row.covers(kernels)), None)


NOTHING_READ = Dispatch()


def known_dispatch(project: str, version: Version, target: Target) -> Dispatch:
    """Return what was read of a release; a release that nobody read has no rows."""
    place = RECIPES / project / "unreached.toml"
    if project not in projects() or not place.is_file():
        return NOTHING_READ
    rows = read_toml(tuple[Unreached, ...], place, key="unreached")
    return Dispatch(rows=tuple(row for row in rows if row.is_known(version, target)))
