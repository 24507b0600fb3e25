"""Read what the packages of an environment ask for, and which of them are there twice."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from patchkit.runtime.python.distributions import distributions, headers, import_path

# Whose wishes matter when a rank starts; all others are asked for by one of them.
_ASKED = ("vllm", "torch", "flashinfer_python")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageWishes:
    """What packages ask for, as their METADATA has it, and what is there.

    ``versions`` are of the folders' names, ``twice`` the projects with more than one of them in a
    folder; ``python`` is ``3.12`` and ``machine`` as uname has it: conditions ask for both.
    """

    wishes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    twice: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    python: str = ""
    machine: str = ""


def package_wishes(venv: str) -> PackageWishes:
    """Return what the packages of an environment ask for; nothing for ``""``."""
    sites = import_path(venv)
    homes = distributions(sites)
    asked = {_name(name): homes[name][0] for name in _ASKED if name in homes}
    return PackageWishes(
        wishes={name: tuple(headers(home, "Requires-Dist")) for name, home in asked.items()},
        versions={_name(name): _version(found[0]) for name, found in homes.items()},
        twice={
            _name(name): tuple(map(_version, found))
            for name, found in homes.items()
            if len(found) > len({each.parent for each in found})
        },
        python=Path(sites[0]).parent.name.removeprefix("python") if sites else "",
        machine=os.uname().machine,
    )


def _name(project: str) -> str:
    return project.replace("_", "-")


def _version(home: Path) -> str:
    return home.name.removesuffix(".dist-info").rpartition("-")[2]
