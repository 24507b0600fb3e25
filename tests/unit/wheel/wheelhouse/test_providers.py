"""Wheels of FlashInfer modules in a wheelhouse: whole, for the device, and for the right vLLM."""

import pytest
from packaging.version import Version

from patchkit.errors import SourceError, UsageError
from patchkit.wheel.wheelhouse.overrides import wanted_release
from patchkit.wheel.wheelhouse.storage import add_wheel
from patchkit.wheel.wheelhouse.verify import verify_wheelhouse
from support.vllm_wheels import LIBRARIES
from support.wheels import write_wheel

ARM = "py3-none-manylinux_2_35_aarch64"
FACTS = {"project": "flashinfer", "target": "gb10", "machine": "aarch64"}
FOLDER = "flashinfer_jit_cache/jit_cache"
RELEASE = "0.7.2.post1"
LABEL = "+cu130.gb10.a1b2c3d4e5"


@pytest.fixture
def provided(tmp_path, house):
    """Put a wheel of modules into the wheelhouse: ``provided({path: library})``."""

    def make(files, version=RELEASE, tag=ARM, **facts):
        content = {
            path: (LIBRARIES / f"{name}.so")
            .read_bytes()
            .replace(b"$ORIGIN/../lib:/opt/nccl", b"$ORIGIN/../lib\0/opt/nccl")
            for path, name in files.items()
        }
        stated = FACTS | facts
        wheel = write_wheel(
            tmp_path / "made",
            version + LABEL,
            project="flashinfer-jit-cache",
            tag=tag,
            files=content,
            requires=[f"flashinfer-python=={version}"],
            facts=stated,
        )
        return add_wheel(house, wheel, stated)

    return make


def faults(house):
    findings = verify_wheelhouse(house).findings
    return [(finding.kind.exit_code, finding.what) for finding in findings]


@pytest.mark.parametrize(
    ("files", "facts", "code", "says"),
    [
        ({"page/page.so": "stock"}, {}, 5, "page.so is not exact for NVIDIA DGX Spark"),
        ({"page/page.so": "gb10"}, {"machine": "x86_64"}, 5, "is for aarch64, not for"),
        ({"a/page/page.so": "gb10"}, {}, 3, "a/page/page.so: no library belongs there"),
        ({"page/other.so": "gb10"}, {}, 3, "page/other.so: no library belongs there"),
        ({"page.so": "gb10"}, {}, 3, "page.so: no library belongs there"),
        ({"../extra.so": "gb10"}, {}, 4, "leads out of the wheel"),
        ({}, {}, 5, "holds no library"),
    ],
)
def test_hostile_providers(provided, house, files, facts, code, says):
    paths = {f"{FOLDER}/{path}": name for path, name in files.items()}
    if "leads out" in says:
        with pytest.raises(SourceError, match=says):
            provided(paths)
        return
    provided(paths, **facts)
    found = faults(house)
    assert [each for each in found if says in each[1]], found
    assert code in {each[0] for each in found}


def test_a_provider_for_another_cpu_than_its_name(provided, house):
    provided({f"{FOLDER}/page/page.so": "gb10"}, tag=ARM.replace("aarch64", "x86_64"))
    assert "aarch64" in faults(house)[0][1]


def test_a_provider_is_held_against_the_pin_of_vllm(provided, house, tmp_path):
    provided({f"{FOLDER}/page/page.so": "gb10"})
    assert faults(house) == []

    facts = {"project": "vllm", "libraries": {}, "target": "gb10"}
    for pinned in (RELEASE, "0.6.13"):
        wheel = write_wheel(
            tmp_path / pinned,
            "0.25.1",
            project="vllm",
            tag=ARM,
            requires=[f"flashinfer-python=={pinned}"],
            facts=facts,
        )
        add_wheel(house, wheel, facts)
        found = [fault for fault in faults(house) if "FlashInfer" in fault[1]]
        says = f"is for FlashInfer {RELEASE}; vllm 0.25.1 pins {pinned}"
        assert found == ([] if pinned == RELEASE else [(2, says)])


def test_the_release_that_the_wheels_pin(house, tmp_path):
    house.mkdir(exist_ok=True)
    with pytest.raises(UsageError, match="pin no release of FlashInfer"):
        wanted_release(house, None)
    assert wanted_release(house, "0.6.13") == Version("0.6.13")

    requires = [f"flashinfer-python=={RELEASE}"]
    facts = {"project": "vllm", "libraries": {}, "target": "gb10"}
    options = {"project": "vllm", "tag": ARM, "requires": requires, "facts": facts}
    add_wheel(house, write_wheel(tmp_path / "made", "0.33.0", **options), facts)
    assert wanted_release(house, None) == Version(RELEASE)
    with pytest.raises(UsageError, match=r"pin 0\.7\.2\.post1 of FlashInfer"):
        wanted_release(house, "0.6.13")
