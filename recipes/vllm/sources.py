"""Describe the CUDA sources of a build, and the archs that each of them is compiled for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from patchkit.target import (
    Arch,
    Load,
    Target,
    find_load,
    find_ptx_load,
    parse_arch,
    toolkits,
)

Codes = frozenset[tuple[str, Arch]]
"""The entries of one fat binary: kind ("sass" or "ptx") and arch of each."""

_NAME = re.compile(r"\b(sm|compute)_(\d{1,3})(\d)([af]?)\b")


@dataclass(frozen=True, slots=True)
class CudaSource:
    """A CUDA source, the library that it is linked into, and the codes it is compiled to."""

    source: str
    library: str
    codes: Codes

    @property
    def names(self) -> frozenset[str]:
        """Return the codes of the source as nvcc names them: ``sm_121a``, ``compute_89``."""
        prefixes = {"sass": "sm", "ptx": "compute"}
        return frozenset(
            f"{prefixes[kind]}_{arch.gencode}" for kind, arch in self.codes
        )

    def load(self, target: Target) -> Load:
        """Return the best way in which a code reaches a device, ``Load.NONE`` if none does."""
        ways = {"sass": find_load, "ptx": find_ptx_load}
        found = (ways[kind](arch, target.capability) for kind, arch in self.codes)
        return max(found, default=Load.NONE)


def codes_of(names: Iterable[str]) -> Codes:
    """Return the codes that texts name as nvcc does: ``sm_121a``, ``[sm_120f,compute_120f]``."""
    codes = set()
    for match in _NAME.finditer(" ".join(names)):
        prefix, major, minor, suffix = match.groups()
        kind = "sass" if prefix == "sm" else "ptx"
        arch = parse_arch(f"{major}.{minor}{suffix}")
        codes.add((kind, arch))

    return frozenset(codes)


@cache
def default_codes() -> Codes:
    """Return the codes to which nvcc compiles a source if its command line names no arch."""
    (codes,) = {row.default_codes for row in toolkits()}  # the same in every toolkit
    return codes_of(codes)
