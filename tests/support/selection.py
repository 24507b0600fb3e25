"""Which releases and arch modes a run asks about: a selection, or all with PATCHKIT_ALL_RELEASES=1.

`nox -s matrix` sets it. The selection takes one release at least of each code path, and of two arch
modes or several alterations of one thing as many as find what differs in structure.
"""

import itertools
import os

import pytest

from patchkit.patching.recipe import load_recipe

WHOLE = os.environ.get("PATCHKIT_ALL_RELEASES") == "1"
SUPPORTED = tuple(map(str, load_recipe("vllm").supported))
# SM100 lists (0.11.1), the old guard (to 0.14), the families of 0.19, the last with the guard
# (0.21), DeepGEMM (0.24), the newest.
SELECTED = ("0.11.1", "0.14.1", "0.19.1", "0.21.0", "0.24.0", SUPPORTED[-1])
RELEASES = SUPPORTED if WHOLE else SELECTED
# The default run asks the oldest form, the one with most fixes in Python, and the newest; what is
# parametrized with another `version` is marked e2e by conftest.py.
DAILY = ("0.11.1", "0.24.0", SUPPORTED[-1])
MODES = ("native", "family")

in_turns = pytest.mark.parametrize(
    ("version", "arch"),
    [*itertools.product(RELEASES, MODES)]
    if WHOLE
    else [*zip(SELECTED, itertools.cycle(MODES[::-1]), strict=False)],
)
"""Both modes of every release, or one of each selected release by turns, the newest as native."""
