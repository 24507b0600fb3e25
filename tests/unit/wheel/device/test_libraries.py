"""The table of vLLM's libraries, and what a library is on a device."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.version import Version

from patchkit.errors import ProofError
from patchkit.patching.recipe import load_recipe
from patchkit.target import targets
from patchkit.wheel.device.inspect import inspect_wheel
from patchkit.wheel.device.libraries import (
    Use,
    judge_libraries,
    library_table,
    require_loading,
)
from patchkit.wheel.file.wheelfile import WheelFile
from support.vllm_wheels import HOPPER, KERNELS, LOST, VERSION, vllm_wheel

GB10, THOR, H200 = (targets()[name] for name in ("gb10", "thor", "h200"))


def judged(folder, target, libraries=KERNELS):
    with WheelFile(vllm_wheel(folder, libraries=libraries)) as wheel:
        return judge_libraries(inspect_wheel(wheel), target, Version(VERSION))


def test_every_release_has_one_of_each_library_that_it_needs():
    for version in load_recipe().supported:
        names = [k.file for k in library_table().library if k.covers(version) and k.required]
        cores = {re.sub(r"_stable_libtorch|\.abi3\.so|vllm/", "", name) for name in names}
        assert cores == {"_C", "_moe_C"}, version


@pytest.mark.parametrize(
    ("target", "use"),
    [
        (GB10, {"_C": Use.PARTLY, "_moe_C": Use.LOADS, "_vllm_fa3_C": Use.OTHER}),
        (H200, {"_C": Use.LOADS, "_moe_C": Use.LOADS, "_vllm_fa3_C": Use.LOADS}),
        (THOR, {"_C": Use.LOST, "_moe_C": Use.LOST, "_vllm_fa3_C": Use.OTHER}),
    ],
)
def test_what_a_library_is(tmp_path, target, use):
    found = {Path(each.name).name.partition(".")[0]: each.use for each in judged(tmp_path, target)}
    assert {name: found[name] for name in use} == use


def test_only_what_cannot_be_done_without_is_fatal(tmp_path):
    kept = {"vllm/_C.abi3.so": LOST, "vllm/_C_stable_libtorch.abi3.so": HOPPER}
    with pytest.raises(ProofError) as caught:
        require_loading(judged(tmp_path, GB10, kept), GB10, Version(VERSION))
    assert [line.split(":")[0].strip() for line in caught.value.what.splitlines()[1:]] == [
        "vllm/_C_stable_libtorch.abi3.so",
        "vllm/_moe_C.abi3.so",
    ]
    require_loading(judged(tmp_path, GB10), GB10, Version(VERSION))


def test_the_way_around_lost_kernels_is_among_the_fixes():
    assert set(library_table().around) <= {fix.id for fix in load_recipe().fixes}
