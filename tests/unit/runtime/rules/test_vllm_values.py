"""Values of variables: how an envs.py says which it takes, and what a release takes of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchkit.errors import SourceError
from patchkit.runtime.rules.variables import values_by_release, vllm_values
from patchkit.runtime.rules.vllm_values import INTEGER, NAMED, NUMBER, ONE, SEVERAL, Takes

ENVS = """
import os
from typing import Literal
VLLM_SHAPE: Literal["round", "square"] | None = None
VLLM_MODE: Literal["a"] = "a"
VLLM_FREE: str = ""
environment_variables: dict[str, Callable[[], Any]] = {
    "VLLM_SHAPE": lambda: os.getenv("VLLM_SHAPE"),
    "VLLM_MODE": env_with_choices("VLLM_MODE", "a", ["a", "b"]),
    "VLLM_CASE": env_with_choices("VLLM_CASE", None, ["high"], case_sensitive=False),
    "VLLM_LABELS": env_set_with_choices("VLLM_LABELS", default=[], choices=["x", "y"]),
    "VLLM_KERNEL": env_with_choices("VLLM_KERNEL", None, lambda: list(
        __import__("vllm.v1.registry", fromlist=["Kernels"]).Kernels.__members__.keys())),
    "VLLM_OLD": deprecated_env("VLLM_OLD", "v9", "", env_with_choices("VLLM_OLD", None, ["z"])),
    "VLLM_SWITCH": lambda: bool(int(os.getenv("VLLM_SWITCH", "0"))),
    "VLLM_MAYBE": lambda: maybe_convert_bool(os.environ.get("VLLM_MAYBE", None)),
    "VLLM_SET": lambda: int(os.environ["VLLM_SET"]) if "VLLM_SET" in os.environ else None,
    "VLLM_SHARE": lambda: float(os.getenv("VLLM_SHARE", "0.5")),
    "VLLM_WORD": lambda: os.getenv("VLLM_WORD", "0").lower() in ("1", "true"),
    "VLLM_OTHER": lambda: int(os.getenv("OTHER", "0")),
    "VLLM_FREE": lambda: os.getenv("VLLM_FREE", ""),
}
"""
REGISTRY = """
class Kernels(enum.Enum):
    FLASH = "flash"
    TRITON = "triton"
"""
READ = {
    "VLLM_SHAPE": Takes(how=NAMED, words=("round", "square")),
    "VLLM_MODE": Takes(how=ONE, words=("a", "b")),
    "VLLM_CASE": Takes(how=ONE, words=("high",), any_case=True),
    "VLLM_LABELS": Takes(how=SEVERAL, words=("x", "y")),
    "VLLM_KERNEL": Takes(how=ONE, words=("FLASH", "TRITON")),
    "VLLM_OLD": Takes(how=ONE, words=("z",)),
    "VLLM_SWITCH": Takes(how=INTEGER),
    "VLLM_MAYBE": Takes(how=INTEGER),
    "VLLM_SET": Takes(how=INTEGER),
    "VLLM_SHARE": Takes(how=NUMBER),
}


@pytest.fixture
def home(tmp_path):
    (tmp_path / "envs.py").write_text(ENVS)
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1/registry.py").write_text(REGISTRY)
    return tmp_path


def test_an_installed_envs_py_says_what_it_takes(home):
    assert vllm_values("0.33.0", home) == READ


def test_choices_in_an_unknown_form_are_an_error(home):
    (home / "envs.py").write_text(ENVS.replace('["a", "b"]', "make()"))
    with pytest.raises(SourceError, match=r"envs\.py:9: choices in an unknown form"):
        vllm_values("0.33.0", home)


@pytest.mark.parametrize(
    ("takes", "right", "wrong"),
    [
        ("one of: a, b", ["a", "b"], ["A", "c", "", "a,b"]),
        ("one of, any case: high", ["high", "HIGH"], ["low", ""]),
        ("some of: x, y", ["x", "x,y", " y , x ", ""], ["z", "x,z", "X"]),
        ("integer", ["1", "0", "-3", " 7 "], ["true", "1.5", "", "0x10"]),
        ("number", ["1", "0.5", "1e3"], ["half", ""]),
        ("named: strict", ["strict"], ["wide"]),
    ],
)
def test_what_is_taken(takes, right, wrong):
    found = Takes.parse(takes)
    assert str(found) == takes
    assert [value for value in [*right, *wrong] if found.has(value)] == right


words = st.text("abcXYZ019_-", min_size=1, max_size=8)
chosen = st.builds(
    Takes,
    how=st.sampled_from([ONE, SEVERAL, NAMED]),
    words=st.lists(words, min_size=1, max_size=4, unique=True).map(tuple),
    any_case=st.booleans(),
)


@given(chosen, words)
def test_what_is_written_in_the_table_is_read_again(takes, word):
    assert Takes.parse(str(takes)) == takes
    assert all(map(takes.has, takes.words))
    assert takes.has(word) or word not in takes.words


@pytest.mark.parametrize(
    ("version", "name", "value", "taken"),
    [
        ("0.11.1", "VLLM_NVFP4_GEMM_BACKEND", "marlin", False),
        ("0.14.1", "VLLM_NVFP4_GEMM_BACKEND", "marlin", False),
        ("0.16.0", "VLLM_NVFP4_GEMM_BACKEND", "marlin", True),
        ("0.19.1", "VLLM_NVFP4_GEMM_BACKEND", "emulation", False),
        ("0.23.0", "VLLM_NVFP4_GEMM_BACKEND", "emulation", True),
        ("0.13.0", "VLLM_FLOAT32_MATMUL_PRECISION", "high", False),
        ("0.14.0", "VLLM_FLOAT32_MATMUL_PRECISION", "High", True),
        ("0.14.1", "VLLM_ATTENTION_BACKEND", "FLASH_ATTN_DIFFKV", True),
        ("0.28.1.dev3+g1a2b", "VLLM_KV_CACHE_LAYOUT", "BLHNC", False),
        ("0.33.0", "VLLM_KV_CACHE_LAYOUT", "BLHNC", True),
        ("", "VLLM_KV_CACHE_LAYOUT", "BLHNC", True),
        ("", "VLLM_KV_CACHE_LAYOUT", "HDN", False),
    ],
)
def test_values_by_release(version, name, value, taken):
    assert vllm_values(version)[name].has(value) is taken


def test_of_releases_before_the_table_nothing_is_known():
    assert vllm_values("0.10.2") == {}


def test_how_the_values_of_a_variable_changed():
    found = values_by_release("VLLM_FLOAT32_MATMUL_PRECISION")
    assert [(first, str(takes)) for first, _last, takes in found] == [
        ("0.13.0", "one of, any case: ieee, tf32"),
        ("0.14.0", "one of, any case: highest, high, medium"),
    ]
    assert values_by_release("VLLM_HOST_IP") == []
