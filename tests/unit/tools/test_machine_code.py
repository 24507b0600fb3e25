"""The listings are of tests/data/kernels/guards.cu: four kernels, compiled for 12.1a and 12.0f."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from e2e.proofs.machine_code import Kernel, idle, likeness, read_sass, stubs, total
from patchkit.errors import ProofError
from patchkit.paths import RECIPES
from patchkit.source.lock import read_lock

LISTINGS = Path(__file__).parents[2] / "data" / "kernels"
QMMA = "QMMA.16832.F32.E4M3.E4M3"
E2M1 = "F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C"


def kernels(name):
    return read_sass((LISTINGS / f"{name}.sass").read_text(encoding="utf-8"))


def test_a_listing_becomes_counts_per_kernel():
    family = kernels("family")
    assert {name: (kernel.size, kernel.tensor) for name, kernel in family.items()} == {
        "multiply": (26, {QMMA: 1}),
        "plain": (10, {}),
        "quantise": (13, {E2M1: 1}),
        "scale": (36, {}),
    }
    assert family["plain"].opcodes == {
        "LDC": 1,
        "S2R": 1,
        "LDC.64": 1,
        "LDCU.64": 1,
        "IMAD.WIDE.U32": 1,
        "LDG.E": 1,
        "FADD": 1,
        "STG.E": 1,
        "EXIT": 1,
        "BRA": 1,
    }
    assert total(family) == {E2M1: 1, QMMA: 1}


def test_a_guard_that_only_knows_1200_leaves_stubs():
    assert stubs(kernels("guarded"), kernels("family")) == {
        "multiply": f"without {QMMA}; ends in a trap",
        "quantise": f"without {E2M1}",
        "scale": "3 instructions instead of 36",
    }


def test_a_guard_that_knows_the_family_leaves_none():
    native, family = kernels("native"), kernels("family")
    assert stubs(native, family) == {}
    assert likeness(native, family) == "the same instructions in the same order"
    assert native["plain"].instructions[:2] == ("LDC R1, c[0x0][0x37c]", "S2R R5, SR_TID.X")


def test_a_kernel_that_was_not_generated_is_a_stub():
    family = kernels("family")
    native = {name: kernel for name, kernel in kernels("native").items() if name != "multiply"}
    assert stubs(native, family) == {"multiply": "missing"}
    assert stubs({}, family) == dict.fromkeys(family, "missing")


def test_more_in_the_native_build_is_no_stub():
    assert stubs(kernels("native"), kernels("guarded")) == {}


def test_two_stubs_that_agree_are_idle():
    guarded = kernels("guarded")
    assert stubs(guarded, guarded) == {}
    assert "multiply" in idle(guarded, "QMMA")
    assert idle(kernels("native"), "QMMA").keys() == {"plain", "quantise", "scale"}


def test_how_far_kernels_agree():
    for native, verdict in (
        (f"{QMMA} R4; FADD R1; @P0 FADD R2", "the same instructions in the same order"),
        (f"{QMMA} R8; @!UP0 FADD R1; FADD R2", "every opcode equally often"),
        (f"{QMMA} R4; FADD R1", "equal tensor-core instructions, others differ"),
        (
            f"{QMMA} R4; {QMMA} R8; FADD R1",
            "same kinds of tensor-core instructions, not equally many",
        ),
    ):
        family = {"gemm": Kernel((f"{QMMA} R4", "FADD R1", "@P0 FADD R2"))}
        other = {"gemm": Kernel(tuple(native.split("; ")))}
        assert stubs(other, family) == {}
        assert likeness(other, family) == verdict


def test_what_counts_as_tensor_core_work():
    for opcode, tensor in (
        ("HMMA.16816.F32", True),
        ("IMMA.16832.S8.S8", True),
        ("OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X", True),
        (E2M1, True),
        ("F2FP.F16.E4M3.UNPACK_B", True),
        ("F2FP.BF16.F32.PACK_AB", False),
        ("HFMA2", False),
        ("FFMA", False),
        ("IMAD", False),
    ):
        assert Kernel((f"@!P1 {opcode} R4, R2",)).tensor == ({opcode: 1} if tensor else {})


def test_a_listing_without_kernels_is_refused():
    with pytest.raises(ProofError, match="no kernel"):
        read_sass("\t.target\tsm_121a\n")


def test_the_data_of_the_proof_fits_together():
    table = tomllib.loads((RECIPES / "vllm" / "kernels.toml").read_text(encoding="utf-8"))
    folders = {wheel["folder"] for wheel in table["wheel"]}
    used = {include.split("/")[0] for each in table["release"] for include in each["include"]}
    assert folders == used | {"cuda"}
    assert {each["version"] for each in table["release"]} <= read_lock(
        RECIPES / "vllm" / "lock.toml"
    ).keys()
    programs = {"x86_64": set(), "aarch64": set()}
    for wheel in table["wheel"]:
        assert len(wheel["sha256"]) == 64
        if "machine" in wheel:
            assert wheel["machine"] in wheel["filename"]
            programs[wheel["machine"]].add((wheel["project"], wheel["version"]))
    assert programs["x86_64"] == programs["aarch64"] != set()
