"""Judge answers as the proof under emulation does; run a program of another CPU, if possible."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from e2e.cross_proof import arm64
from e2e.cross_proof.operators import Loaded, differences
from e2e.cross_proof.wheels import Lock, read_pip_check, require_cpu
from e2e.proofs import fresh
from patchkit.cli import group
from patchkit.errors import ProofError, UsageError
from patchkit.records import record
from patchkit.wheel.file.name import wheel_name
from patchkit.wheel.wheelhouse.contents import add_wheel
from patchkit.wheel.wheelhouse.manifest import Kind, Manifest, ManifestEntry, Override
from support.needed import need
from support.wheels import write_wheel

ROOT = Path(__file__).parents[3]
ENV = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
C = "vllm/_C_stable_libtorch.abi3.so"
MLA = "_C::sm100_cutlass_mla_get_workspace_size"
MLA_SCHEMA = f"{MLA}(int max_seq_len, int num_batches, int sm_count, int num_kv_splits) -> int"
FACTS = {"version": "0.25.1", "target": "gb10", "extensions": "all", "without": []}


def compared(ours, upstream, **facts):
    found = differences([ours] if ours else [], [upstream], {**FACTS, **facts})
    return [(each.what, each.why) for each in found]


def loaded(path=C, **operators):
    return Loaded(path=path, operators={f"_C::{name}": text for name, text in operators.items()})


def test_the_same_operators_are_no_difference():
    library = loaded(silu_and_mul="_C::silu_and_mul(Tensor($0! -> ) result) -> () [CUDA]")
    assert compared(library, library) == []


def test_another_schema_is_never_explained():
    """Python that fits the one schema calls the other with wrong arguments."""
    ours = loaded(machete_mm="_C::machete_mm(Tensor A) -> Tensor [CUDA]")
    theirs = loaded(machete_mm="_C::machete_mm(Tensor A, Tensor B) -> Tensor [CUDA]")
    ((what, why),) = compared(ours, theirs)
    assert what.startswith(f"{C}: _C::machete_mm is _C::machete_mm(Tensor A) -> Tensor [CUDA], ")
    assert why == ""


@pytest.mark.parametrize(("target", "explained"), [("gb10", True), ("thor", False)])
def test_kernels_for_other_devices_may_be_missing(target, explained):
    """MLA_ARCHS has 11.0, a Thor, and not 12.1."""
    ours = Loaded(path=C, operators={MLA: f"{MLA_SCHEMA} []"})
    theirs = Loaded(path=C, operators={MLA: f"{MLA_SCHEMA} [CompositeExplicitAutograd]"})
    ((_what, why),) = compared(ours, theirs, target=target)
    assert bool(why) == explained


@pytest.mark.parametrize(("target", "explained"), [("gb10", True), ("thor", False)])
def test_an_operator_goes_with_the_source_that_declares_it(target, explained):
    name = "_C::mxfp4_experts_quant_supported"
    theirs = Loaded(path=C, operators={name: f"{name}(int a) -> bool [CompositeExplicitAutograd]"})
    ((_what, why),) = compared(Loaded(path=C), theirs, target=target)
    assert bool(why) == explained


def test_an_operator_that_is_missing_or_new_fails():
    one = loaded(silu="_C::silu() -> () [CUDA]")
    assert compared(loaded(), one)[0][1] == compared(one, loaded())[0][1] == ""


def test_a_kernel_of_every_device_must_not_be_missing():
    ours, theirs = (loaded(silu=f"_C::silu() -> () [{keys}]") for keys in ("CPU", "CPU CUDA"))
    assert compared(ours, theirs)[0][1] == ""


def test_a_library_that_is_not_built_is_explained_by_the_wheel_or_the_device():
    for path, facts, why in (
        ("vllm/_qutlass_C.abi3.so", {}, ""),
        ("vllm/_qutlass_C.abi3.so", {"without": ["qutlass"]}, "--without qutlass"),
        (
            "vllm/third_party/deep_gemm/_C.cpython-313-aarch64-linux-gnu.so",
            {"without": ["deepgemm"]},
            "--without deepgemm",
        ),
        ("vllm/_qutlass_C.abi3.so", {"extensions": ["spinloop"]}, "only spinloop were asked for"),
        ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", {}, "for other devices than NVIDIA DGX Spark"),
        ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", {"target": "h200"}, ""),
        ("vllm/_rust_tool_parser.abi3.so", {}, "written in Rust, which is not built"),
    ):
        ((what, said),) = compared(None, loaded(path), **facts)
        assert what == f"{path}: is not built"
        assert said.startswith(why)
        assert bool(said) == bool(why)


def entry(filename, kind=Kind.BUILT):
    return ManifestEntry(name=wheel_name(filename), sha256="0" * 64, size=1, facts={}, kind=kind)


NCCL_OVERRIDE = record(
    Override,
    {
        "takes": "nvidia-nccl-cu13==2.30.7",
        "pin": "nvidia-nccl-cu13==2.28.9",
        "by": "torch 2.11.0",
        "reason": "it deadlocks",
        "word": "the user",
    },
)
SAID = """\
flashinfer-python 0.6.13 requires flashinfer-cubin, which is not installed.
torch 2.11.0 has requirement nvidia-nccl-cu13==2.28.9; platform_system == "Linux", \
but you have nvidia-nccl-cu13 2.30.7.
nvidia-cusparselt-cu13 0.8.0 is not supported on this platform
"""


def test_pip_check_may_name_what_was_left_out_or_overridden_or_mislabelled():
    listed = Manifest(wheels=(entry("vllm-0.25.1-cp38-abi3-linux_aarch64.whl"),))
    lock = Lock(house=Path(), listed=listed, lines=(), left_out=("flashinfer-cubin",))
    assert len(read_pip_check(SAID, replace(lock, left_out=())).wrong) == 2
    overridden = replace(lock, listed=replace(listed, overrides=(NCCL_OVERRIDE,)))
    found = read_pip_check(SAID, overridden)
    assert found.wrong == ()
    assert found.foreign == ("nvidia-cusparselt-cu13",)
    ours = read_pip_check("vllm 0.25.1 is not supported on this platform\n", lock)
    assert ours.wrong == ("vllm 0.25.1 is not supported on this platform",)
    assert read_pip_check("No broken requirements found.\n", lock).wrong == ()


def test_ubuntu_keeps_other_cpus_elsewhere():
    deb822 = "Types: deb\nURIs: http://archive.ubuntu.com/ubuntu/\nSuites: noble noble-updates\n"
    assert f"URIs: {fresh.UBUNTU_PORTS}\nSuites: noble" in fresh.for_cpu(deb822)
    line = "deb [signed-by=/k.gpg] http://security.ubuntu.com/ubuntu noble-security main\n"
    ported = f"deb [signed-by=/k.gpg] {fresh.UBUNTU_PORTS} noble-security main\n"
    assert fresh.for_cpu(line) == ported
    debian = "Types: deb\nURIs: http://deb.debian.org/debian\n"
    assert fresh.for_cpu(debian) == debian


def test_programs_of_another_cpu_run_in_namespaces_and_nowhere_else(tmp_path):
    """Nothing is registered with the kernel for good, and everybody is who he is outside."""
    if found := arm64.no_programs():
        pytest.skip(found)
    need("aarch64-linux-gnu-gcc")
    source, program = tmp_path / "who.c", tmp_path / "who"
    source.write_text(
        "#include <stdio.h>\n#include <unistd.h>\n#include <sys/utsname.h>\n"
        'int main() { struct utsname u; uname(&u); printf("%s %d\\n", u.machine, getuid()); }\n'
    )
    build = ("aarch64-linux-gnu-gcc", "-static", str(source), "-o", str(program))
    subprocess.run(build, check=True)
    done = arm64.in_namespaces(f"chown 42 {tmp_path}; {program}")
    assert done.stdout == "aarch64 0\n", done.stderr
    assert tmp_path.stat().st_uid == 42


def test_wheels_for_another_cpu_are_refused_before_anything_is_unpacked(tmp_path):
    house = tmp_path / "house"
    wheel = write_wheel(tmp_path, "2.29.7", tag="py3-none-manylinux_2_17_x86_64")
    add_wheel(house, wheel, {"target": "gb10"})
    with pytest.raises(UsageError) as caught:
        require_cpu(house)
    assert f"{wheel.name}: is for x86_64" in caught.value.what
    dropping = re.search(r"patchkit (wheelhouse prune .*)", caught.value.hint)[1]
    CliRunner().invoke(group, shlex.split(dropping), standalone_mode=False)
    with pytest.raises(UsageError, match="no wheel in it was built by patchkit"):
        require_cpu(house)


def test_a_wheel_that_was_cut_short_ends_it_before_anything_is_unpacked(tmp_path):
    house = tmp_path / "house"
    wheel = add_wheel(
        house, write_wheel(tmp_path, "2.29.7", tag="py3-none-manylinux_2_17_aarch64"), {}
    )
    wheel.write_bytes(wheel.read_bytes()[:-100])
    command = [sys.executable, "-m", "e2e.cross_proof", str(house), "--json"]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True)
    assert done.returncode == ProofError.exit_code
    (step,) = json.loads(done.stdout)["steps"]
    assert (step["step"], step["state"]) == ("wheelhouse", "failed")
    assert f"{wheel.name}\n  has {wheel.stat().st_size} bytes, " in step["said"]
    assert "it was changed or cut short" in done.stderr
