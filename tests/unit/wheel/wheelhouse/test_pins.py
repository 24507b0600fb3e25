"""Wheels of a wheelhouse against each other and their device; which NCCL is built for them."""

from dataclasses import replace

import pytest
from packaging.version import Version

from patchkit.errors import UsageError
from patchkit.source.releases import ExactPin
from patchkit.wheel.file.wheelfile import WheelName
from patchkit.wheel.wheelhouse.overrides import (
    choose_override,
    default_version,
    lift_override,
    record_override,
    require_wanted,
)
from patchkit.wheel.wheelhouse.storage import (
    Kind,
    ManifestEntry,
    add_wheel,
    load_manifest,
    write_documents,
)
from patchkit.wheel.wheelhouse.verify import verify_wheelhouse
from support.vllm_wheels import LIBRARIES
from support.wheels import write_wheel

ARM = "py3-none-manylinux_2_35_aarch64"
NCCL = {"project": "nccl", "target": "gb10", "machine": "aarch64"}
VLLM = {"project": "vllm", "target": "gb10", "machine": "aarch64"}
CORE = ("vllm/_C_stable_libtorch.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so")


def library(name, path="nvidia/nccl/lib/libnccl.so.2"):
    """A real library, without the folder that its RPATH names."""
    content = (LIBRARIES / f"{name}.so").read_bytes()
    return {
        path: content.replace(b"$ORIGIN/../lib:/opt/nccl", b"$ORIGIN/../lib\0/opt/nccl")
    }


@pytest.fixture
def built(tmp_path, house):
    def make(project, version, facts, **more):
        names = {"project": project, "tag": ARM, "facts": facts}
        return add_wheel(
            house, write_wheel(tmp_path / "made", version, **names, **more), facts
        )

    return make


def found(house):
    findings = verify_wheelhouse(house).findings
    return [
        (each.where.partition("-")[0], each.kind.exit_code, each.what)
        for each in findings
    ]


def nccl(built, version="2.28.9+gb10.a1", name="gb10", **more):
    return built(
        "nvidia-nccl-cu13", version, files=library(name), facts={**NCCL, **more}
    )


def vllm(built, libraries=CORE, name="gb10", facts=VLLM):
    files = {
        path: content
        for each in libraries
        for path, content in library(name, each).items()
    }
    return built(
        "vllm", "0.25.1", facts, requires=["torch==2.11.0", "numpy"], files=files
    )


def test_an_nccl_that_the_torch_does_not_pin(built, house):
    nccl(built, "2.29.7+gb10.a1")
    vllm(built)
    pinned = "is for torch 2.11.0, which pins NCCL 2.28.9"
    assert found(house) == [
        ("vllm", 2, f"{pinned}; here is nvidia-nccl-cu13==2.29.7+gb10.a1")
    ]
    (each,) = verify_wheelhouse(house).findings
    assert each.hint == (
        f"patchkit wheelhouse prune --dir {house} --drop nvidia-nccl-cu13 && "
        f"patchkit build nccl --version 2.28.9 --dir {house}; or, to keep it: "
        f"patchkit wheelhouse override --dir {house} nvidia-nccl-cu13==2.29.7"
    )


def test_an_override_lets_one_wheel_pass_and_nothing_else(built, house):
    nccl(built, "2.30.7+gb10.a1")
    vllm(built)
    assert len(found(house)) == 1
    record_override(house, choose_override(house, ExactPin("nvidia-nccl-cu13==2.30.7")))
    done = verify_wheelhouse(house)
    assert (done.findings, done.offers) == ((), ())
    assert [str(each.takes) for each in done.overrides] == ["nvidia-nccl-cu13==2.30.7"]
    name = WheelName("torch-2.10.0-cp312-cp312-manylinux_2_28_aarch64.whl")
    facts = {"python": "3.12", "machine": "aarch64", "glibc": "2.39"}
    locked = ManifestEntry(
        name=name, sha256="0" * 64, size=0, facts=facts, kind=Kind.LOCKED
    )
    listed = load_manifest(house)
    after = replace(listed, wheels=(*listed.wheels, locked))
    for name, text in write_documents(after).items():
        (house / name).write_text(text)
    assert [what for _, _, what in found(house)] == [
        "needs torch==2.11.0; here is torch==2.10.0",
        "needs numpy, which is not in the lock",
    ]


def test_a_wheel_that_is_not_what_an_override_takes(built, house):
    vllm(built)
    record_override(house, choose_override(house, ExactPin("nvidia-nccl-cu13==2.30.7")))
    nccl(built, "2.29.7+gb10.a1")
    ((_, _, what),) = found(house)
    assert what == "is 2.29.7+gb10.a1, and the override takes nvidia-nccl-cu13==2.30.7"
    lift_override(house, "nvidia-nccl-cu13")
    (offer,) = verify_wheelhouse(house).offers
    project = "nvidia-nccl-cu13"
    assert (str(offer.takes), str(offer.pin)) == (
        f"{project}==2.30.7",
        f"{project}==2.28.9",
    )


@pytest.mark.parametrize(
    ("name", "facts", "says"),
    [
        (
            "stock",
            {},
            "nvidia/nccl/lib/libnccl.so.2 is not exact for NVIDIA DGX Spark (GB10)",
        ),
        ("gb10", {"target": "thor"}, "is not exact for NVIDIA Jetson AGX Thor"),
        ("gb10", {"machine": "x86_64"}, "is for aarch64, not for x86_64"),
        (
            "gb10",
            {"target": "h100"},
            "patchkit.json in it names no known target: 'h100'",
        ),
        ("archs", {}, "libnccl.so.2 is for x86_64"),
    ],
)
def test_an_nccl_that_is_not_for_its_device(name, facts, says, built, house):
    nccl(built, name=name, **facts)
    ((_, code, what),) = found(house)
    assert says in what
    assert code == (5 if "exact" in says or "not for" in says else 3)


def test_a_vllm_that_lacks_what_it_cannot_do_without(built, house):
    vllm(built, facts={**VLLM, "target": "thor"}, libraries=CORE[:1])
    says = (
        f"{CORE[0]} does not load: vLLM does not start",
        f"{CORE[1]} is missing: MoE",
    )
    for (name, code, what), words in zip(found(house), says, strict=True):
        assert (name, code, what.startswith(words)) == ("vllm", 5, True), what


def test_wheels_for_two_devices(built, house):
    nccl(built)
    vllm(built, facts={**VLLM, "target": "h200"}, name="stock")
    (said,) = [what for _, _, what in found(house)]
    assert said.startswith(
        "wheels for aarch64 are made for several devices: gb10: nvidia_nccl"
    )


def wheel(folder, name, *requirements):
    project, version, tag = name.removesuffix(".whl").split("-", 2)
    write_wheel(folder, version, project=project, tag=tag, requires=requirements)


EMPTY_ZIP = b"PK\5\6" + bytes(18)
VLLM_33 = "vllm-0.33.0-cp38-abi3-linux_aarch64.whl"
TORCH_12 = "torch-2.12.1-cp312-cp312-linux_aarch64.whl"


@pytest.mark.parametrize(
    ("wheels", "version", "reason"),
    [
        ({}, "2.30.7", "default"),
        ({VLLM_33: ["torch==2.14.0"]}, "2.30.7", "torch==2.14.0"),
        (
            {VLLM_33: ["torch==2.11.0", 'torch==2.14.0; extra == "x"']},
            "2.28.9",
            "torch==2.11.0",
        ),
        (
            {VLLM_33: ["torch==2.14.0"], TORCH_12: ["nvidia_nccl_cu13 (==2.29.7)"]},
            *("2.29.7", TORCH_12),
        ),
        ({VLLM_33: ["torch>=2.11"]}, "2.30.7", "default"),
        ({"numpy-2.0-py3-none-any.whl": ["torch==2.11"]}, "2.30.7", "default"),
    ],
)
def test_the_nccl_that_the_torch_in_the_wheelhouse_pins(
    tmp_path, wheels, version, reason
):
    for name, requirements in wheels.items():
        wheel(tmp_path, name, *requirements)
    found = default_version(tmp_path)
    assert str(found[0]) == version
    assert reason in found[1]


def test_another_nccl_than_the_wheels_ask_for(tmp_path):
    """It was compiled without a word, and refused by `verify` in the end."""
    require_wanted(tmp_path / "absent", Version("2.30.7"))
    wheel(tmp_path, VLLM_33, "torch==2.11.0")
    require_wanted(tmp_path, Version("2.28.9+gb10.a1"))
    with pytest.raises(
        UsageError, match=r"are for NCCL 2\.28\.9, and 2\.30\.7 is to be"
    ) as caught:
        require_wanted(tmp_path, Version("2.30.7"))
    line = f"patchkit wheelhouse override --dir {tmp_path} nvidia-nccl-cu13==2.30.7;"
    assert line in caught.value.hint
    with pytest.raises(UsageError, match="is to be built") as caught:
        require_wanted(tmp_path, Version("2.27.7"))
    assert "leave --version out" in caught.value.hint
    wheel(tmp_path / "old", VLLM_33, "torch==2.10.0")
    with pytest.raises(UsageError, match=r"are for NCCL 2\.27\.5") as caught:
        require_wanted(tmp_path / "old", Version("2.30.7"))
    assert (
        "override" not in caught.value.hint
    )  # it pins nvidia-nccl-cu12, another package


@pytest.mark.parametrize("content", [b"PK", EMPTY_ZIP])
def test_wheels_that_cannot_be_read_or_disagree(tmp_path, content):
    (tmp_path / TORCH_12).write_bytes(content)
    with pytest.raises(UsageError, match="cannot be read"):
        default_version(tmp_path)
    wheel(tmp_path, TORCH_12, "nvidia-nccl-cu13==2.29.7")
    wheel(tmp_path, TORCH_12.replace("2.12.1", "2.14.0"), "nvidia-nccl-cu13==2.30.7")
    with pytest.raises(UsageError, match="2 versions of NCCL"):
        default_version(tmp_path)
