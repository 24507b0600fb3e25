"""The pure parts of patchkit tune: what is asked, what is believed, what goes into the file."""

from __future__ import annotations

import json
import math
import re

import pytest

from patchkit.errors import DriftError, UsageError
from patchkit.measure.tune.tune import (
    BENCHMARK,
    GRID,
    Job,
    Row,
    Tuned,
    check_benchmark,
    file_text,
    untuned_config,
)

SMALL = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 4,
}
LARGE = {**SMALL, "BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128}
TOO_LARGE = {**SMALL, "BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 256}
CALLS = """\
def benchmark_config(config, num_tokens, num_experts, shard_intermediate_size, hidden_size, topk,
                     dtype, use_fp8_w8a8, use_int8_w8a16, {extra}num_iters=100,
                     block_quant_shape=None, use_deep_gemm=False):
    pass


def get_configs_compute_bound(use_fp16, block_quant_shape):
    pass
"""


def job(**changes):
    return Job(**{"experts": 128, "intermediate": 768, "hidden": 2048, "topk": 8, **changes})


def row(untuned=(2.0, 2.1, 2.2), tuned=(1.0, 1.1, 1.2), batch_size=64):
    return Row(
        batch_size=batch_size,
        source="default",
        untuned=SMALL,
        tuned=LARGE,
        untuned_times=untuned,
        tuned_times=tuned,
        measured=9,
        complete=True,
    )


def facts(**changes):
    defaults = dict.fromkeys(GRID, SMALL)
    known = {"shared_memory": 101_376, "triton": "3.6.0", "defaults": defaults, "shipped": {}}
    return {**known, **changes}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"topk": 129}, "--topk at most --experts"),
        ({"hidden": 0}, "positive"),
        ({"batch_sizes": (1, 0)}, "positive"),
        ({"batch_sizes": (8, 8)}, "named twice"),
        ({"dtype": "int4"}, "no dtype 'int4'"),
        ({"dtype": "auto", "block_shape": (128, 128)}, "is for --dtype fp8_w8a8"),
    ],
)
def test_a_job_that_makes_no_sense(changes, says):
    with pytest.raises(UsageError, match=says):
        job(**changes).check()


def test_weights_of_qwen3_30b():
    assert job().weight_bytes() == 128 * 3 * 768 * 2048 * 3
    assert job(dtype="auto").weight_bytes() == 128 * 3 * 768 * 2048 * 2


@pytest.mark.parametrize(
    ("untuned", "tuned", "faster", "ratio"),
    [
        ((2.0, 2.1, 2.2), (1.0, 1.1, 1.2), True, 2.1 / 1.1),
        # The median of one lies inside the spread of the other: not believed.
        ((2.0, 2.1, 2.2), (1.9, 2.05, 2.06), False, 2.1 / 2.05),
        ((1.0, 1.1, 1.2), (2.0, 2.0, 2.0), False, 1.1 / 2.0),
        ((), (1.0, 1.1, 1.2), True, math.inf),
        ((1.0, 1.1, 1.2), (), False, 0.0),
    ],
)
def test_what_is_believed(untuned, tuned, faster, ratio):
    found = row(untuned, tuned)
    assert (found.faster, found.ratio) == (faster, pytest.approx(ratio))
    assert found.chosen == (LARGE if faster else SMALL)


def test_untuned_is_the_nearest_row_of_the_packaged_file():
    assert untuned_config(facts(), 64) == ("default", SMALL)
    assert untuned_config(facts(shipped={1: SMALL, 256: LARGE}), 200) == ("shipped", LARGE)


def test_the_file_has_a_row_for_every_size_that_serving_meets():
    rows = json.loads(file_text(Tuned(facts(), [row()]), 1))
    assert rows.pop("triton_version") == "3.6.0"
    assert list(rows) == [str(size) for size in GRID]
    assert rows.pop("64") == LARGE
    assert all(entry == SMALL for entry in rows.values())


def test_the_file_keeps_the_rows_of_the_packaged_one():
    shipped = {24: SMALL, 96: SMALL}
    rows = json.loads(file_text(Tuned(facts(shipped=shipped), [row()]), 1))
    assert list(rows) == ["triton_version", "24", "64", "96"]


def test_no_row_asks_for_more_shared_memory_than_the_device_has():
    defaults = {**dict.fromkeys(GRID, SMALL), 4096: TOO_LARGE}
    rows = json.loads(file_text(Tuned(facts(defaults=defaults), [row()]), 1))
    assert "4096" not in rows
    assert "2048" in rows


@pytest.mark.parametrize("extra", ["", "use_int4_w4a16=False, "])
def test_a_benchmark_that_can_be_called(make_tree, extra):
    tree = make_tree("0.25.1", {BENCHMARK: CALLS.format(extra=extra)})
    assert check_benchmark(tree) == tree.root / BENCHMARK


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (CALLS.format(extra="group, "), r"benchmark_config\(.*new: group; gone: nothing"),
        (CALLS.format(extra="").replace("num_tokens", "m"), "new: m; gone: num_tokens"),
        ("", "defines no benchmark_config"),
        (CALLS.split("\n\n\n")[0].format(extra=""), "defines no get_configs_compute_bound"),
    ],
)
def test_a_benchmark_that_upstream_reworked(make_tree, text, says):
    with pytest.raises(DriftError) as caught:
        check_benchmark(make_tree("0.25.1", {BENCHMARK: text}))
    assert re.search(says, str(caught.value), re.DOTALL)


def test_an_installed_vllm_has_no_benchmark(make_tree):
    with pytest.raises(UsageError, match="an installed vLLM has no benchmarks/") as caught:
        check_benchmark(make_tree("0.25.1", {}, kind="installed"))
    assert "--vllm-src vllm==0.25.1" in caught.value.hint
