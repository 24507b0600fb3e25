"""Take what upstream's own wheel of a release gives in the place of another project's source."""

from __future__ import annotations

import zipfile

import pytest
from packaging.version import Version

from patchkit.errors import ProofError, UsageError
from patchkit.recipes.vllm.build import by_option
from patchkit.target import targets
from patchkit.wheel.file.wheelfile import WheelFile
from patchkit.wheel.vllm.upstream_parts import parts_of, prove_parts
from support.vllm_wheels import HOPPER, LOST

VERSION = Version("0.25.1")
GB10, H200 = targets()["gb10"], targets()["h200"]
FA = "vllm/vllm_flash_attn"
MEMBERS = {
    f"{FA}/__init__.py": b"# vLLM's own\n",
    f"{FA}/_vllm_fa2_C.abi3.so": LOST,  # with PTX, and linked with CUDA 13
    f"{FA}/_vllm_fa3_C.abi3.so": HOPPER,
    f"{FA}/cute/interface.py": b"import vllm.vllm_flash_attn.cute.utils\n",
    f"{FA}/layers/rotary.py": b"rotary = 1\n",
    "vllm/_flashmla_C.abi3.so": HOPPER,
    "vllm/_qutlass_C.abi3.so": HOPPER,
    "vllm/third_party/triton_kernels/a/b.py": b"b = 1\n",
}


@pytest.fixture
def wheel(tmp_path):
    """Make a wheel of these members: ``with wheel() as opened``."""

    def make(members=MEMBERS, name="vllm-0.25.1-cp38-abi3-manylinux_2_28_aarch64.whl"):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for path, data in members.items():
                archive.writestr(path, data)
        return WheelFile(tmp_path / name)

    return make


def known(option):
    return by_option([option])[0]


def filled(parts, folder):
    parts.fill(folder)
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_what_is_of_the_project_and_of_use_on_the_device(wheel, tmp_path):
    with wheel() as opened:
        parts = parts_of(opened, known("flash-attn"), GB10)
        python = parts_of(opened, known("triton-kernels"), GB10)
        digest = opened.sha256
    kept = ("_vllm_fa2_C.abi3.so", "cute/interface.py", "layers/rotary.py")
    assert filled(parts, tmp_path / "parts") == {f"{FA}/{n}": MEMBERS[f"{FA}/{n}"] for n in kept}
    codes = "sm_90, sm_100a, sm_120, sm_120a, compute_120"
    assert parts.identity == (
        f"vllm==0.25.1, sha256:{digest}; as upstream compiled it: _vllm_fa2_C ({codes})"
    )
    (name,) = filled(python, tmp_path / "python")
    assert name == "vllm/third_party/triton_kernels/a/b.py"
    said = "as upstream's wheel has it installed"
    assert python.identity == f"vllm==0.25.1, sha256:{digest}; {said}"


@pytest.mark.parametrize(
    ("option", "error", "says", "hint"),
    [
        (
            "tml-fa4",
            UsageError,
            "holds nothing of tml-fa4",
            "it holds parts of flash-attn, flashmla, qutlass, triton-kernels",
        ),
        ("flashmla", UsageError, "for other devices than NVIDIA DGX Spark", "--without flashmla"),
        ("qutlass", ProofError, "no code that NVIDIA DGX Spark", "--source qutlass=FOLDER"),
    ],
)
def test_what_does_not_serve_the_device_is_refused(wheel, option, error, says, hint):
    with wheel() as opened, pytest.raises(error, match=says) as caught:
        parts_of(opened, known(option), GB10)
    assert hint in caught.value.hint


def test_the_wheel_is_proved_to_have_them(wheel, tmp_path):
    with wheel() as opened:
        parts_of(opened, known("flash-attn"), GB10).fill(tmp_path / "parts")
        said = prove_parts(opened, tmp_path / "parts", "flash-attn")
    assert said == "flash-attn: 3 files are those of upstream's wheel"
    other = {**MEMBERS, f"{FA}/cute/interface.py": b"other\n"}
    less = {name: data for name, data in MEMBERS.items() if "rotary" not in name}
    for members, lost in ((other, "cute/interface.py"), (less, "layers/rotary.py")):
        opened = wheel(members, "vllm-1-py3-none-linux_aarch64.whl")
        with opened, pytest.raises(ProofError, match=f"{lost} of flash-attn is not in the wheel"):
            prove_parts(opened, tmp_path / "parts", "flash-attn")
