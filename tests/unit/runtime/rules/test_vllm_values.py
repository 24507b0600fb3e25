"""Values of variables: what a release takes of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchkit.runtime.rules.variable_values import (
    ONE,
    SEVERAL,
    Takes,
    values_by_release,
    vllm_values,
)


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


words = st.text("abcXYZ019_-", min_size=1, max_size=8)
chosen = st.builds(
    Takes,
    how=st.sampled_from([ONE, SEVERAL]),
    words=st.lists(words, min_size=1, max_size=4, unique=True).map(tuple),
    any_case=st.booleans(),
)


@given(chosen, words)
def test_what_is_written_in_the_table_is_read_again(takes, word):
    assert Takes.parse(str(takes)) == takes
    assert all(map(takes.has, takes.words))
    assert takes.has(word) or word not in takes.words


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


def test_how_the_values_of_a_variable_changed():
    found = values_by_release("VLLM_FLOAT32_MATMUL_PRECISION")
    assert [(first, str(takes)) for first, _last, takes in found] == [
        ("0.13.0", "one of, any case: ieee, tf32"),
        ("0.14.0", "one of, any case: highest, high, medium"),
    ]
    assert values_by_release("VLLM_HOST_IP") == []
