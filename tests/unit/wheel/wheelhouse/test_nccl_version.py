"""Which NCCL is built: the one that the torch in the wheelhouse pins, or the recipe's default."""

from __future__ import annotations

import pytest
from packaging.version import Version

from patchkit.errors import UsageError
from patchkit.wheel.wheelhouse.overrides import default_version, require_wanted
from support.wheels import write_wheel


def wheel(folder, name, *requirements):
    project, version, tag = name.removesuffix(".whl").split("-", 2)
    write_wheel(folder, version, project=project, tag=tag, requires=requirements)


EMPTY_ZIP = b"PK\5\6" + bytes(18)
VLLM, TORCH = (
    "vllm-0.33.0-cp38-abi3-linux_aarch64.whl",
    "torch-2.12.1-cp312-cp312-linux_aarch64.whl",
)


@pytest.mark.parametrize(
    ("wheels", "version", "reason"),
    [
        ({}, "2.30.7", "default"),
        ({VLLM: ["torch==2.14.0"]}, "2.30.7", "torch==2.14.0"),
        ({VLLM: ["torch==2.11.0", 'torch==2.14.0; extra == "x"']}, "2.28.9", "torch==2.11.0"),
        ({TORCH: ['nvidia-nccl-cu13==2.29.7; platform_system == "Linux"']}, "2.29.7", "cu13==2.29"),
        ({VLLM: ["torch==2.14.0"], TORCH: ["nvidia_nccl_cu13 (==2.29.7)"]}, "2.29.7", TORCH),
        ({VLLM: ["torch>=2.11"]}, "2.30.7", "default"),
        ({"numpy-2.0-py3-none-any.whl": ["torch==2.11"]}, "2.30.7", "default"),
    ],
)
def test_the_nccl_that_the_torch_in_the_wheelhouse_pins(tmp_path, wheels, version, reason):
    for name, requirements in wheels.items():
        wheel(tmp_path, name, *requirements)
    found = default_version(tmp_path)
    assert str(found[0]) == version
    assert reason in found[1]


def test_wheels_that_disagree(tmp_path):
    wheel(tmp_path, TORCH, "nvidia-nccl-cu13==2.29.7")
    wheel(tmp_path, TORCH.replace("2.12.1", "2.14.0"), "nvidia-nccl-cu13==2.30.7")
    with pytest.raises(UsageError, match="2 versions of NCCL"):
        default_version(tmp_path)


def test_another_nccl_than_the_wheels_ask_for(tmp_path):
    """It was compiled without a word, and refused by `verify` in the end."""
    require_wanted(tmp_path / "absent", Version("2.30.7"))
    wheel(tmp_path, VLLM, "torch==2.11.0")
    require_wanted(tmp_path, Version("2.28.9+gb10.a1"))
    with pytest.raises(UsageError, match=r"are for NCCL 2\.28\.9, and 2\.30\.7 is to be") as caught:
        require_wanted(tmp_path, Version("2.30.7"))
    line = f"patchkit wheelhouse override --dir {tmp_path} nvidia-nccl-cu13==2.30.7;"
    assert line in caught.value.hint
    with pytest.raises(UsageError, match="is to be built") as caught:
        require_wanted(tmp_path, Version("2.27.7"))
    assert "leave --version out" in caught.value.hint
    wheel(tmp_path / "old", VLLM, "torch==2.10.0")
    with pytest.raises(UsageError, match=r"are for NCCL 2\.27\.5") as caught:
        require_wanted(tmp_path / "old", Version("2.30.7"))
    assert "override" not in caught.value.hint  # it pins nvidia-nccl-cu12, another package


@pytest.mark.parametrize("content", [b"PK", b"", EMPTY_ZIP, EMPTY_ZIP.replace(b"\5\6", b"\5\7")])
def test_a_wheel_that_cannot_be_read(tmp_path, content):
    (tmp_path / TORCH).write_bytes(content)
    with pytest.raises(UsageError, match="cannot be read"):
        default_version(tmp_path)
