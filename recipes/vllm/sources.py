"""Describe the CUDA sources of a build, and the archs that each of them is compiled for."""

from __future__ import annotations

import re
from collections.abc import Iterable

from patchkit.frozen import positional
from patchkit.target import Load, Target, best_load, list_archs, toolkits

_NAME = re.compile(r"\b(?:sm|compute)_\d{2,4}[af]?\b")


@positional
class CudaSource:
    """A CUDA source, the library that it is linked into, and the codes it is compiled to.

    ``names`` are the codes as nvcc names them: ``sm_121a``, ``compute_89``.
    """

    source: str
    library: str
    names: frozenset[str]

    def load(self, target: Target) -> Load:
        """Return the best way in which a code reaches a device, ``Load.NONE`` if none does."""
        return best_load(list_archs(self.names), target.capability)


def code_names(texts: Iterable[str]) -> frozenset[str]:
    """Return the codes in texts: ``sm_121a``, ``[sm_120f,compute_120f]``."""
    return frozenset(_NAME.findall(" ".join(texts)))


def default_names() -> frozenset[str]:
    """Return the codes to which nvcc compiles a source if its command line names no arch."""
    return frozenset(toolkits()[0].default_codes)  # the same in every toolkit
