"""Read which packages an environment has, and which of them are there twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from patchkit.runtime.python.distributions import distributions, import_path


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageVersions:
    """Versions of packages, and in ``twice`` those of projects with more than one in a folder."""

    versions: Mapping[str, str] = field(default_factory=dict)
    twice: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def package_versions(venv: str) -> PackageVersions:
    """Return what an environment has, by the names of its folders; nothing for ``""``."""
    homes = {
        name.replace("_", "-"): found for name, found in distributions(import_path(venv)).items()
    }
    return PackageVersions(
        versions={name: _folder_version(found[0]) for name, found in homes.items()},
        twice={
            name: tuple(map(_folder_version, found))
            for name, found in homes.items()
            if len(found) > len({home.parent for home in found})
        },
    )


def _folder_version(home: Path) -> str:
    return home.name.removesuffix(".dist-info").rpartition("-")[2]
