"""Names of environment variables: of releases, of a file that is read, and misspelt."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from patchkit.errors import SourceError, UsageError
from patchkit.runtime.rules.releases import (
    nccl_variables,
    other_variables,
    variable_table,
    vllm_variables,
    within,
)
from patchkit.runtime.rules.spelling import Slips, is_slip, nearest_hint
from patchkit.runtime.rules.variable_values import AllowedValues, vllm_values
from tools.release_values import read_names, read_values

ENVS = """

import os
other: dict[str, str] = {"NOT_THIS": "one"}
environment_variables: dict[str, Callable[[], Any]] = {
    # A comment with "NO_NAME": in it
    "VLLM_HOST_IP": lambda: os.getenv("VLLM_HOST_IP", ""),
    "VLLM_PORT": get_vllm_port,
    "VLLM_TIMEOUT": lambda: int(os.environ.get("VLLM_TIMEOUT", "300")),
    "VLLM_BYTES": lambda: int(os.getenv("VLLM_BYTES", str(2 * 1024))),
    "VLLM_BACKEND": env_with_choices("VLLM_BACKEND", None, ["a", "b"]),
    "VLLM_METHOD": env_with_choices("VLLM_METHOD", "fork", lambda: ["x"], case_sensitive=False),
    "VLLM_OLD": deprecated_env("VLLM_OLD", "v9", "use that", lambda: os.getenv("VLLM_OLD", "7")),
    "VLLM_SAMPLER": lambda: bool(int(os.environ["VLLM_SAMPLER"]))
    if "VLLM_SAMPLER" in os.environ
    else True,
    "VLLM_LIST": lambda: []
    if "VLLM_LIST" not in os.environ
    else os.environ["VLLM_LIST"].split(","),
    "VLLM_TRACK": lambda: (os.environ.get("VLLM_TRACK") or os.getenv("TRACK", "5")) == "1",
    "MAX_JOBS": lambda: os.getenv("MAX_JOBS", None),
}
"""
UNSET = (
    "VLLM_HOST_IP",
    "VLLM_PORT",
    "VLLM_BACKEND",
    "VLLM_LIST",
    "VLLM_TRACK",
    "MAX_JOBS",
)
READ = {
    **dict.fromkeys(UNSET, ""),
    "VLLM_TIMEOUT": "300",
    "VLLM_BYTES": "str(2 * 1024)",
    "VLLM_METHOD": "fork",
    "VLLM_OLD": "7",
    "VLLM_SAMPLER": "1",
}


def test_an_installed_envs_py_is_read(tmp_path):
    (tmp_path / "envs.py").write_text(ENVS)
    assert read_names(tmp_path / "envs.py") == READ
    assert vllm_variables("0.33.0", tmp_path).keys() == READ.keys()


def test_what_is_not_understood_is_an_error(tmp_path):
    (tmp_path / "envs.py").write_text("x = {'A': 1}")
    with pytest.raises(
        SourceError, match=r"envs\.py: has no dict environment_variables"
    ):
        vllm_variables("0.33.0", tmp_path)
    choice = '"VLLM_X": env_with_choices("VLLM_X", "a", make()),'
    choices = f"environment_variables = {{\n    {choice}\n}}\n"
    (tmp_path / "envs.py").write_text(choices)
    with pytest.raises(SourceError, match=r"envs\.py:2: choices in an unknown form"):
        read_values(tmp_path)


VLLM = {
    "0.11.1": {
        "VLLM_USE_V1": None,
        "VLLM_ATTENTION_BACKEND": "",
        "VLLM_RPC_TIMEOUT": "10000",
    },
    # 0.15 was never supported: what 0.14.1 had.
    "0.15.0": {"VLLM_ATTENTION_BACKEND": "", "VLLM_ALLREDUCE_USE_FLASHINFER": None},
    "v0.21.0rc1+cu130": {"VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "1"},
    # A name that went and came back.
    "0.31.0": {"VLLM_ROCM_USE_AITER_FP4_ASM_GEMM": "False"},
    "0.33.1.dev12+g1a2b": {
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": None,
        "VLLM_HOST_IP": "",
    },
    "": {
        "VLLM_USE_V1": "",
        "VLLM_HOST_IP": "",
        "VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT": "True",
    },
}
NCCL = {
    "2.20.5": {"NCCL_IB_GID_INDEX": "0", "NCCL_CUDA_PATH": "", "NCCL_RAS_ENABLE": None},
    "2.21.5": {"NCCL_IB_GID_INDEX": "-1", "NCCL_CUDA_PATH": None},
    # Between two releases that were read.
    "2.28.9+cuda13.0": {
        "NCCL_NET_GDR_C2C": "1",
        "NCCL_DEBUG": "",
        "NCCL_DEBUG_FILE": "",
    },
    "2.30.7+gb10.1a2b": {"NCCL_IB_SUBNET_AWARE_ROUTING": "0", "NCCL_DEBUG_SUBSYS": ""},
    "": {
        "NCCL_CUDA_PATH": "",
        "NCCL_IB_SUBNET_AWARE_ROUTING": "0",
        "NCCL_USE_CMAKE": None,
    },
}


def test_names_by_release():
    for variables, releases in ((vllm_variables, VLLM), (nccl_variables, NCCL)):
        for version, names in releases.items():
            known = variables(version)
            assert {name: known.get(name) for name in names} == names
    assert nccl_variables("9.0") == nccl_variables(variable_table("nccl").newest)
    assert within(variable_table("nccl").newest, ">=2.30.7")
    with pytest.raises(UsageError, match="'new' is not a version"):
        nccl_variables("new")


def test_the_nearest_right_name():
    names = [*vllm_variables(""), *nccl_variables(""), *other_variables()]
    for wrong, right in (
        ("NCCL_SOCKET_IFACE", "NCCL_SOCKET_IFNAME"),
        ("NCLL_DEBUG", "NCCL_DEBUG"),
        ("RAY_MEMORY_MONITOR_REFRESH_MS", "RAY_memory_monitor_refresh_ms"),
        ("VLLM_FOO", ""),
        ("PATH", ""),
    ):
        assert nearest_hint(wrong, names, "") == (right and f"did you mean {right}?")


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
    found = AllowedValues.parse(takes)
    assert [value for value in [*right, *wrong] if found.allows(value)] == right


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
        assert vllm_values(version)[name].allows(value) is taken
    # Of releases outside of the table nothing is known.
    assert vllm_values("0.10.2") == vllm_values("9.0") == {}


NAMES = Slips([*vllm_variables(""), *nccl_variables("")])


def test_the_name_that_was_meant():
    for wrong, right in (
        ("NCCL_IB_DISABLED", "NCCL_IB_DISABLE"),
        ("NCCL_P2P_DISABEL", "NCCL_P2P_DISABLE"),
        ("NCCL_SOCKET_IF_NAME", "NCCL_SOCKET_IFNAME"),
        ("NCCL_DISABLE_IB", "NCCL_IB_DISABLE"),
        ("VLLM_LOGGING_LEVL", "VLLM_LOGGING_LEVEL"),
    ):
        assert NAMES.find_meant(wrong) == right
    # Words too few or too many, other words, other digits: other names.
    others = (
        "nccl_ib_hca",
        "VLLM_HOST",
        "VLLM_USE_V2",
        "VLLM_TP_SIZE",
        "VLLM_" + "A" * 10_000,
    )
    assert not any(map(NAMES.find_meant, others))


@given(
    st.text(st.sampled_from("AB_1"), max_size=6),
    st.text(st.sampled_from("AB_1"), max_size=6),
)
@example("A1A1", "A1_1")  # a separator in the place of a letter
def test_a_slip_is_one_in_both_directions(one, other):
    assert is_slip(one, other) == is_slip(other, one)
    assert not is_slip(one, one)
