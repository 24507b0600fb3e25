"""Archs and targets. The table is NVIDIA's: what a cubin or PTX is built for decides where it runs.

https://docs.nvidia.com/cuda/blackwell-compatibility-guide/
https://docs.nvidia.com/cuda/cuda-c-programming-guide/#feature-set-compiler-targets
"""

import pytest

from patchkit.errors import UsageError
from patchkit.target import (
    Arch,
    Load,
    best_load,
    find_load,
    list_archs,
    parse_arch,
    targets,
)

SM80, SM121A = (
    "-gencode arch=compute_80,code=sm_80",
    "-gencode arch=compute_121a,code=sm_121a",
)
GB10, H100, THOR, B300 = (12, 1), (9, 0), (11, 0), (10, 3)


def test_parse_arch():
    for text, expected, name in (
        ("12.1a", Arch(12, 1, "a", False), "121a"),
        ("12.0f", Arch(12, 0, "f", False), "120f"),
        ("9.0", Arch(9, 0, "", False), "90"),
        ("10.3a+PTX", Arch(10, 3, "a", True), "103a"),
        ("8.9-virtual", Arch(8, 9, "", False, virtual=True), "89"),
    ):
        assert parse_arch(text) == expected
        assert parse_arch(text).gencode == name

    for text in (
        "",
        "12",
        "121a",
        "sm_121",
        "12.1af",
        "12.10",
        "12.1;9.0",
        "8.9+PTX-virtual",
    ):
        with pytest.raises(UsageError, match="is not an arch"):
            parse_arch(text)


def test_what_nvcc_makes_is_listed():
    archs = ("12.1a", "8.9+PTX", "8.0-virtual", "10.3f")
    codes = [code for arch in archs for code in parse_arch(arch).codes]
    assert codes == ["sm_121a", "sm_89", "compute_89", "compute_80", "sm_103f"]
    assert list_archs(codes) == archs


def test_other_names_that_nvcc_takes_for_code_are_listed_or_left_out():
    """An intermediate of nvcc is for its arch; ``native`` and the like name none."""
    assert list_archs(["lto_90a", "sm_121a"]) == ("9.0a", "12.1a")
    assert list_archs(["lto_89", "compute_89", "sm_89"]) == ("8.9+PTX",)
    assert list_archs(["native", "all-major", "sm_80", "sm_"]) == ("8.0",)


def test_load():
    for arch, capability, expected in (
        ("12.1a", GB10, Load.EXACT),
        ("12.1f", GB10, Load.EXACT),
        ("12.0f", GB10, Load.FAMILY),
        ("12.0", GB10, Load.COMPATIBLE),
        ("12.0a", GB10, Load.NONE),
        ("8.0+PTX", GB10, Load.JIT),
        ("9.0-virtual", H100, Load.JIT),
        ("12.0f-virtual", GB10, Load.JIT),
        ("12.0f-virtual", B300, Load.NONE),
        ("12.1", (12, 0), Load.NONE),
        ("10.0f", B300, Load.FAMILY),
        ("10.0f", THOR, Load.NONE),
        ("8.6", (8, 9), Load.COMPATIBLE),
        ("8.6", (8, 0), Load.NONE),
    ):
        assert find_load(parse_arch(arch), capability) is expected
    assert best_load((), GB10) is Load.NONE
    assert best_load(("8.0+PTX", "12.0", "9.0a"), GB10) is Load.COMPATIBLE


def test_a_target_reaches_its_own_device():
    for name, capability in (
        ("gb10", GB10),
        ("thor", THOR),
        ("h200", H100),
        ("rtx50", (12, 0)),
    ):
        target = targets()[name]
        assert (target.name, target.capability, target.major) == (
            name,
            capability,
            capability[0],
        )
        assert target.cuda_tag == "cu130"
        assert (
            find_load(parse_arch(target.arch_list("native")), capability) is Load.EXACT
        )
        assert (
            find_load(parse_arch(target.arch_list("family")), capability) >= Load.FAMILY
        )
        assert find_load(parse_arch(target.stock), capability) >= Load.COMPATIBLE


def test_gencode_flags():
    for arch_list, expected in (
        ("8.0;12.1a", f"{SM80} {SM121A}"),
        ("8.0+PTX 12.1a", f"{SM80} -gencode arch=compute_80,code=compute_80 {SM121A}"),
        # What torch's select_compute_arch.cmake answers on the device: "2.1" inside "12.1".
        ("Auto", "-gencode arch=compute_20,code=sm_121"),
    ):
        assert targets()["gb10"].gencode_flags(arch_list) == expected
