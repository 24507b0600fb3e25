"""`env check` of values that a release of vLLM takes or stops at."""

from __future__ import annotations

import pytest

from patchkit.runtime.lint.check import check

LATER = "leave it out: 0.16.0 to 0.23.0 take marlin"


@pytest.mark.parametrize(
    ("line", "version", "level", "hint"),
    [
        ("VLLM_NVFP4_GEMM_BACKEND=marlin", "0.12.0", "error", LATER),
        ("VLLM_NVFP4_GEMM_BACKEND=marlin", "0.16.0", "", ""),
        ("VLLM_NVFP4_GEMM_BACKEND=marlin", "", "", ""),
        ("VLLM_NVFP4_GEMM_BACKEND=", "0.16.0", "error", "write one of these, or leave "),
        ("VLLM_ATTENTION_BACKEND=FLASHINFR", "0.14.1", "error", "did you mean FLASHINFER?"),
        ("VLLM_FLOAT32_MATMUL_PRECISION=HIGH", "0.33.0", "", ""),
        ("VLLM_FLOAT32_MATMUL_PRECISION=tf32", "0.33.0", "error", "leave it out: 0.13.0 to 0.13.0"),
        ("VLLM_USE_DEEP_GEMM=false", "0.23.0", "error", "write VLLM_USE_DEEP_GEMM=0"),
        ("VLLM_ENGINE_READY_TIMEOUT_S=1h", "0.33.0", "error", "write a number, or leave "),
        ("VLLM_ENGINE_READY_TIMEOUT_S=3600", "0.33.0", "", ""),
        # Named by a type, and taken as it is.
        ("VLLM_RAY_DP_PACK_STRATEGY=wide", "0.33.0", "warning", "write one of these, or leave "),
        # Of other programs as well.
        ("VERBOSE=yes", "0.33.0", "", ""),
        # Unknown until it is read.
        ("VLLM_USE_DEEP_GEMM=<0 or 1>", "0.23.0", "", ""),
        ("VLLM_USE_DEEP_GEMM=${DEEP_GEMM}", "0.23.0", "", ""),
    ],
)
def test_a_value_that_stops_vllm_is_an_error(line, version, level, hint):
    findings = [
        each
        for each in check(f"{line}\n", "a.env", {"vllm": version} if version else {})
        if ": vLLM" in each.what
    ]
    assert [(str(each.level), each.about) for each in findings] == (
        [(level, line.partition("=")[0])] if level else []
    )
    assert all(each.hint.startswith(hint) for each in findings)
