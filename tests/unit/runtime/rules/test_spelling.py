"""Which names are one slip apart, and which are other names."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from patchkit.runtime.rules.spelling import Slips, is_slip
from patchkit.runtime.rules.variables import nccl_variables, vllm_variables

NAMES = Slips([*vllm_variables(""), *nccl_variables("")])


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("NCCL_IB_DISABLED", "NCCL_IB_DISABLE"),
        ("NCCL_P2P_DISABEL", "NCCL_P2P_DISABLE"),
        ("NCCL_SOCKET_IF_NAME", "NCCL_SOCKET_IFNAME"),
        ("NCCL_DISABLE_IB", "NCCL_IB_DISABLE"),
        ("nccl_ib_hca", ""),
        ("VLLM_LOGGING_LEVL", "VLLM_LOGGING_LEVEL"),
        # Words too few or too many, other words, other digits: other names.
        ("VLLM_HOST", ""),
        ("VLLM_USE_V2", ""),
        ("VLLM_TP_SIZE", ""),
        ("VLLM_" + "A" * 10_000, ""),
    ],
)
def test_the_name_that_was_meant(wrong, right):
    assert NAMES(wrong) == right


@given(st.text(st.sampled_from("AB_1"), max_size=6), st.text(st.sampled_from("AB_1"), max_size=6))
@example("A1A1", "A1_1")  # a separator in the place of a letter
def test_a_slip_is_one_in_both_directions(one, other):
    assert is_slip(one, other) == is_slip(other, one)
    assert not is_slip(one, one)
