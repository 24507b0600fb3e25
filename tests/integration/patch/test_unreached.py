"""Kernels that stay PTX since a release's own dispatch never calls them, asked of its sources."""

import hashlib
import re

import pytest
from packaging.version import Version

from patchkit.doctor.first_use import count_loads
from patchkit.recipes.vllm.fixes.int8_azp import dispatched
from patchkit.target import Load, targets
from patchkit.unreached import known_dispatch
from support.selection import RELEASES

pytestmark = pytest.mark.releases
LIBRARY = "vllm/_C_stable_libtorch.abi3.so"
KERNEL = "_ZN7cutlass7Kernel2I19enable_sm89_to_sm90INS_4gemm6kernel22DefaultGemm"
# What upstream's wheels are built with, for 9.0a, 10.0a and 12.0a.
SWITCHES = {f"SCALED_MM_{name}" for name in ("SM90", "SM100", "SM120", "C2X")}
OLDER = re.compile(r"cutlass_scaled_mm(_azp)?_sm(75|80|89)\b")
READ = [name for name in RELEASES if Version(name) >= Version("0.24")]


@pytest.mark.parametrize("target", targets().values(), ids=lambda target: target.name)
@pytest.mark.parametrize("version", READ)
def test_what_the_dispatch_never_calls(version, target, release):
    (path,) = release(version).rglob("w8a8/cutlass/scaled_mm_entry.cu")
    number = int("{}{}".format(*target.capability))
    called = {
        dispatched(str(path), path.read_text(), name, SWITCHES, number)
        for name in ("cutlass_scaled_mm", "cutlass_scaled_mm_azp")
    }
    assert "" not in called
    assert not [name for name in called if OLDER.search(name)]
    row = known_dispatch("vllm", Version(version), target).never_calls(
        LIBRARY, [KERNEL]
    )
    assert row is not None
    assert (
        hashlib.sha256(path.read_bytes()).hexdigest().startswith(row.releases[version])
    )
    assert path.as_posix().endswith(row.source)


@pytest.mark.parametrize("version", READ)
def test_nothing_else_calls_them(version, release):
    sources = [path for path in release(version).rglob("csrc/**/*") if path.is_file()]
    callers = {
        path.name for path in sources if OLDER.search(path.read_text(errors="replace"))
    }
    assert callers == {"scaled_mm_c2x.cu", "scaled_mm_entry.cu"}


@pytest.mark.parametrize(
    ("version", "library", "kernels"),
    [
        ("0.23.0", LIBRARY, [KERNEL]),  # which nobody read
        ("0.34.0", LIBRARY, [KERNEL]),
        ("0.33.0", "vllm/_moe_C_stable_libtorch.abi3.so", [KERNEL]),
        ("0.33.0", LIBRARY, [KERNEL, "_Z5otherv"]),
        ("0.33.0", LIBRARY, []),
    ],
)
def test_nothing_else_is_taken_for_unreached(version, library, kernels):
    dispatch = known_dispatch("vllm", Version(version), targets()["gb10"])
    assert dispatch.never_calls(library, kernels) is None


@pytest.mark.parametrize(
    ("version", "compiled"),
    [
        ("0.33.0", 1),
        ("0.33.0+cu130.gb10.61ce3e4b58", 1),
        ("0.23.0", 2),  # which nobody read
        ("", 2),
    ],
)
def test_doctor_does_not_wait_for_what_is_never_called(version, compiled):
    """By the headers alone, as a node tells them."""
    held = {"sm_80 sm_87 compute_89 sm_89": 1, "compute_80": 1}
    loads = count_loads({"_C_stable_libtorch.abi3.so": held}, "12.1", version)
    assert loads["_C_stable_libtorch.abi3.so"][Load.JIT] == compiled
