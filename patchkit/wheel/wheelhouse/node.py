"""Describe the nodes that a wheelhouse is for: which wheels fit, and what they have already."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.version import Version

from patchkit.errors import UsageError
from patchkit.reading import read_text
from patchkit.versions import ExactPin
from patchkit.wheel.file.name import WheelName

_PYTHON = re.compile(r"3\.\d{1,2}(\.\d{1,2})?")
_GLIBC = re.compile(r"2\.\d{1,2}")
# By glibc 2.X; no wheel for aarch64 is older than the first.
_OLDEST, _OLD_NAMES = 17, {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
_UV_KNOWS = (_OLDEST, 28, *range(31, 41))  # its platforms manylinux_2_X


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlatform:
    """Platform that a node installs wheels for: CPU ``x86_64``, Python ``3.12``, glibc ``2.39``."""

    machine: str
    python: str
    glibc: str

    def __str__(self) -> str:
        return f"CPython {self.python} on {self.machine} with glibc {self.glibc}"

    def facts(self) -> dict[str, str]:
        return {"machine": self.machine, "python": self.python, "glibc": self.glibc}

    @property
    def uv_name(self) -> str:
        """The newest platform that uv knows and that the node has."""
        minor = max(known for known in _UV_KNOWS if known <= self._glibc_minor)
        return f"{self.machine}-manylinux_2_{minor}"

    @property
    def _glibc_minor(self) -> int:
        return int(self.glibc.partition(".")[2])

    def ranks(self) -> dict[Tag, int]:
        """Return the tags that fit; an installer takes the wheel with the lowest rank."""
        # Newest first, as pip ranks them: a tag of a newer glibc is the more specific one.
        names = []
        for minor in range(self._glibc_minor, min(_OLD_NAMES) - 1, -1):
            names += [f"manylinux_2_{minor}", *([_OLD_NAMES[minor]] if minor in _OLD_NAMES else [])]
        platforms = [f"{name}_{self.machine}" for name in (*names, "linux")]
        major, minor = map(int, self.python.split(".")[:2])
        native = cpython_tags((major, minor), platforms=platforms)
        others = compatible_tags((major, minor), f"cp{major}{minor}", platforms)
        return {tag: rank for rank, tag in enumerate((*native, *others))}


def node_platform(machine: str, python: str, glibc: str) -> NodePlatform:
    """Return what a node is said to be.

    Raises UsageError for what is no version of Python 3, or of a glibc that wheels are made for.
    """
    if not _PYTHON.fullmatch(python):
        raise UsageError(f"--python-version takes a version such as 3.12, not {python!r}")
    if not _GLIBC.fullmatch(glibc) or int(glibc[2:]) < _OLDEST:
        raise UsageError(f"--glibc takes a version such as 2.39, not {glibc!r}")
    return NodePlatform(machine=machine, python=python, glibc=glibc)


NodePackages = Mapping[str, Version]
"""Project → version, of what every node has."""


def read_packages(files: Sequence[Path]) -> NodePackages:
    """Return what all nodes have, of files with what `pip list --format=freeze` printed on each.

    Raises UsageError, naming the line, for what is not PROJECT==VERSION.
    """
    listed = [{*_pins(file)} for file in files]
    common = set.intersection(*listed) if listed else set()
    return {pin.project: pin.version for pin in common}


def is_met(packages: NodePackages, wheel: WheelName) -> bool:
    """Check whether a node has what a lock names: for pip, 2.11.0+cu130 is a 2.11.0."""
    version = packages.get(wheel.project)
    return version is not None and SpecifierSet(f"=={wheel.version}").contains(
        version, prereleases=True
    )


def _pins(file: Path) -> list[ExactPin]:
    pins = []
    hint = "on a node: pip list --format=freeze > FILE"
    for number, line in enumerate(read_text(file, hint=hint).splitlines(), 1):
        text = line.partition("#")[0].strip()
        try:
            pins += [ExactPin(text)] if text else []
        except ValueError as error:
            why = "pip freeze names no version of what came from a folder or a URL"
            raise UsageError(f"{file}:{number}: {error}", why=why, hint=hint) from None
    return pins
