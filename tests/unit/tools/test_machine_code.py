"""The listings are of tests/data/kernels/guards.cu: four kernels, compiled for 12.1a and 12.0f."""

from pathlib import Path

import pytest

from e2e.proofs.machine_code import likeness, read_sass, stubs, total
from patchkit.errors import ProofError

LISTINGS = Path(__file__).parents[2] / "data" / "kernels"
QMMA = "QMMA.16832.F32.E4M3.E4M3"
E2M1 = "F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C"


def kernels(name):
    return read_sass((LISTINGS / f"{name}.sass").read_text(encoding="utf-8"))


def test_a_listing_becomes_counts_per_kernel():
    family = kernels("family")
    assert {name: (len(kernel.instructions), kernel.tensor) for name, kernel in family.items()} == {
        "multiply": (26, {QMMA: 1}),
        "plain": (10, {}),
        "quantise": (13, {E2M1: 1}),
        "scale": (36, {}),
    }
    assert total(family) == {E2M1: 1, QMMA: 1}


def test_a_guard_that_only_knows_1200_leaves_stubs():
    native, family = kernels("native"), kernels("family")
    assert stubs(native, family) == {}
    assert likeness(native, family) == "the same instructions in the same order"
    assert stubs(kernels("guarded"), family) == {
        "multiply": f"without {QMMA}; ends in a trap",
        "quantise": f"without {E2M1}",
        "scale": "3 instructions instead of 36",
    }


def test_a_listing_without_kernels_is_refused():
    with pytest.raises(ProofError, match="no kernel"):
        read_sass("\t.target\tsm_121a\n")
