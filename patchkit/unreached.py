"""Find the kernels that a release never calls on a device.

The rows of ``recipes/PROJECT/unreached.toml`` were derived from the sources of the releases. A fat
binary whose kernels are never called is left as upstream shipped it: the driver never compiles it.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from patchkit.frozen import Texts, frozen
from patchkit.records import RECIPES, read_toml
from patchkit.target import Target

_PROJECT = re.compile(r"[a-z0-9-]+")


@frozen
class Unreached:
    """Kernels that are never called; ``recipes/vllm/unreached.toml`` describes the fields."""

    name: str
    library: str
    ptx: str
    kernels: str
    targets: Texts
    source: str
    releases: dict[str, str]

    def is_known(self, version: str, target: Target) -> bool:
        return version in self.releases and target.name in self.targets

    def is_of(self, library: str) -> bool:
        """Return whether the row is about a library, which may be a path or a name alone."""
        return f"/{self.library}".endswith(f"/{library}")

    def covers(self, kernels: Collection[str]) -> bool:
        """Return whether the row covers all of these kernels. It covers no empty collection."""
        matches = (re.search(self.kernels, kernel) for kernel in kernels)
        return bool(kernels) and all(matches)


@frozen
class Dispatch:
    """The kernels that a release is known never to call on a device."""

    rows: tuple[Unreached, ...] = ()

    def knows(self, library: str) -> bool:
        return any(row.is_of(library) for row in self.rows)

    def never_calls(self, library: str, kernels: Collection[str]) -> Unreached | None:
        """Return the row that proves that none of these kernels is called, None if none does."""
        for row in self.rows:
            if row.is_of(library) and row.covers(kernels):
                return row
        return None

    def leaves(self, library: str, codes: Collection[str]) -> bool:
        """Return whether the names of its code show that a fat binary is never called.

        ``codes`` are these names: ``compute_90a``.
        """
        rows = (row for row in self.rows if row.is_of(library))
        return any(row.ptx in codes for row in rows)


NOTHING_READ = Dispatch()


def known_dispatch(project: str, version: object, target: Target) -> Dispatch:
    """Return the kernels that a release never calls on a target; no rows if that is not known.

    Versions are compared as texts without their local parts, since a node has no `packaging`.
    """
    place = RECIPES / project / "unreached.toml"
    if not _PROJECT.fullmatch(project) or not place.is_file():
        return NOTHING_READ

    release = str(version).partition("+")[0]
    rows = read_toml(tuple[Unreached, ...], place, key="unreached")
    known = [row for row in rows if row.is_known(release, target)]
    return Dispatch(rows=tuple(known))
