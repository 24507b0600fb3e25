"""Pair the functions of network cards by their places on the bus."""

from __future__ import annotations

import pytest

from patchkit.runtime.host import hardware


def test_twins_of_boards_that_are_unknown():
    pair = {"0004:03:00.1": "p1", "0008:03:00.1": "p1"}
    assert {pci: (half.cage, half.twin) for pci, half in hardware.halves(pair).items()} == {
        "0004:03:00.1": (1, "0008:03:00.1"),
        "0008:03:00.1": (1, "0004:03:00.1"),
    }


@pytest.mark.parametrize(
    "functions",
    [
        {"0000:17:00.0": "p0", "0000:65:00.0": "p0"},  # two cards of a server
        {"0000:03:00.0": "p0", "0002:03:00.0": "p0", "0010:03:00.0": "p0"},  # three domains
        {"0004:03:00.0": "p0", "0008:03:00.0": "p1"},  # ports that disagree
        {"0004:03:00.0": "", "0008:03:00.0": ""},  # ports that are not told
    ],
)
def test_cards_that_share_no_cage(functions):
    assert hardware.halves(functions) == {}
