"""Values of variables: what a release takes of them."""

from __future__ import annotations

import pytest

from patchkit.runtime.rules.variable_values import Takes, vllm_values


@pytest.mark.parametrize(
    ("takes", "right", "wrong"),
    [
        ("one of: a, b", ["a", "b"], ["A", "c", "", "a,b"]),
        ("one of, any case: high", ["high", "HIGH"], ["low", ""]),
        ("some of: x, y", ["x", "x,y", " y , x ", ""], ["z", "x,z", "X"]),
        ("integer", ["1", "0", "-3", " 7 "], ["true", "1.5", "", "0x10"]),
        ("number", ["1", "0.5", "1e3"], ["half", ""]),
    ],
)
def test_what_is_taken(takes, right, wrong):
    found = Takes.parse(takes)
    assert str(found) == takes
    assert [value for value in [*right, *wrong] if found.has(value)] == right


def test_values_by_release():
    for version, name, value, taken in (
        ("0.14.1", "VLLM_NVFP4_GEMM_BACKEND", "marlin", False),
        ("0.16.0", "VLLM_NVFP4_GEMM_BACKEND", "marlin", True),
        ("0.13.0", "VLLM_FLOAT32_MATMUL_PRECISION", "high", False),
        ("0.14.0", "VLLM_FLOAT32_MATMUL_PRECISION", "High", True),
        ("0.14.1", "VLLM_ATTENTION_BACKEND", "FLASH_ATTN_DIFFKV", True),
        ("0.28.1.dev3+g1a2b", "VLLM_KV_CACHE_LAYOUT", "BLHNC", False),
        ("", "VLLM_KV_CACHE_LAYOUT", "BLHNC", True),
        ("", "VLLM_KV_CACHE_LAYOUT", "HDN", False),
    ):
        assert vllm_values(version)[name].has(value) is taken


def test_of_releases_outside_of_the_table_nothing_is_known():
    assert vllm_values("0.10.2") == vllm_values("9.0") == {}
