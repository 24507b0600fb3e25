"""Judge answers as the proof under emulation does; run a program of another CPU, if possible."""

from dataclasses import replace
from pathlib import Path

import pytest

from e2e.cross_proof.operators import Loaded, differences
from e2e.cross_proof.wheels import Lock, read_pip_check
from patchkit.records import record
from patchkit.wheel.file.wheelfile import wheel_name
from patchkit.wheel.wheelhouse.storage import Kind, Manifest, ManifestEntry, Override

C = "vllm/_C_stable_libtorch.abi3.so"
MLA = "sm100_cutlass_mla_get_workspace_size"
FACTS = {"version": "0.25.1", "target": "gb10", "extensions": "all", "without": []}


def compared(ours, upstream, **facts):
    return [*differences([ours] if ours else [], [upstream], {**FACTS, **facts})]


@pytest.mark.parametrize(
    ("ours", "upstream", "facts", "explained"),
    [
        # Python that fits the one schema calls the other with wrong arguments.
        ("machete_mm(Tensor A) [CUDA]", "machete_mm(Tensor A, Tensor B) [CUDA]", {}, False),
        # MLA_ARCHS has 11.0, a Thor, and not 12.1.
        (f"{MLA}() []", f"{MLA}() [CUDA]", {}, True),
        (f"{MLA}() []", f"{MLA}() [CUDA]", {"target": "thor"}, False),
        ("silu() [CPU]", "silu() [CPU CUDA]", {}, False),
    ],
)
def test_kernels_for_other_devices_may_be_missing(ours, upstream, facts, explained):
    sides = (
        Loaded(path=C, operators={f"_C::{text.partition('(')[0]}": text})
        for text in (ours, upstream)
    )
    ((what, why),) = compared(*sides, **facts)
    assert what.startswith(f"{C}: _C::")
    assert bool(why) == explained


def test_a_library_that_is_not_built_is_explained_by_the_wheel_or_the_device():
    for path, facts, why in (
        ("vllm/_qutlass_C.abi3.so", {}, ""),
        ("vllm/_qutlass_C.abi3.so", {"without": ["qutlass"]}, "left out when it was built"),
        ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", {}, "for other devices than NVIDIA DGX Spark"),
        ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", {"target": "h200"}, ""),
        ("vllm/_rust_tool_parser.abi3.so", {}, "written in Rust, which is not built"),
    ):
        ((what, said),) = compared(None, Loaded(path=path), **facts)
        assert what == f"{path}: is not built"
        assert said.startswith(why)
        assert bool(said) == bool(why)


PINS = {"takes": "nvidia-nccl-cu13==2.30.7", "pin": "nvidia-nccl-cu13==2.28.9"}
WHY = {"by": "torch 2.11.0", "reason": "it deadlocks", "word": "the user"}
NCCL_OVERRIDE = record(Override, {**PINS, **WHY})
SAID = """\
flashinfer-python 0.6.13 requires flashinfer-cubin, which is not installed.
torch 2.11.0 has requirement nvidia-nccl-cu13==2.28.9; platform_system == "Linux", \
but you have nvidia-nccl-cu13 2.30.7.
nvidia-cusparselt-cu13 0.8.0 is not supported on this platform
"""


def test_pip_check_may_name_what_was_left_out_or_overridden_or_mislabelled():
    name = wheel_name("vllm-0.25.1-cp38-abi3-linux_aarch64.whl")
    built = ManifestEntry(name=name, sha256="0" * 64, size=1, facts={}, kind=Kind.BUILT)
    listed = Manifest(wheels=(built,))
    lock = Lock(house=Path(), listed=listed, lines=(), left_out=("flashinfer-cubin",))
    assert len(read_pip_check(SAID, replace(lock, left_out=()))[1]) == 2
    overridden = replace(lock, listed=replace(listed, overrides=(NCCL_OVERRIDE,)))
    assert read_pip_check(SAID, overridden) == (SAID.splitlines(), [])
    ours = "vllm 0.25.1 is not supported on this platform"
    assert read_pip_check(f"{ours}\n", lock) == ([], [ours])
    assert read_pip_check("No broken requirements found.\n", lock) == ([], [])
