"""Describe the nodes that a wheelhouse is for, and which wheels fit them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from packaging.tags import Tag, compatible_tags, cpython_tags

from patchkit.errors import UsageError

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
        newest = int(self.glibc.partition(".")[2])
        minor = max(known for known in _UV_KNOWS if known <= newest)
        return f"{self.machine}-manylinux_2_{minor}"

    def ranks(self) -> dict[Tag, int]:
        """Return the tags that fit; an installer takes the wheel with the lowest rank."""
        # Newest first, as pip ranks them: a tag of a newer glibc is the more specific one.
        names = []
        newest = int(self.glibc.partition(".")[2])
        for minor in range(newest, min(_OLD_NAMES) - 1, -1):
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
