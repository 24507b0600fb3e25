"""The calls of FlashInfer's generators, by release and device."""

from collections import Counter

import pytest

from patchkit.runtime.serve.command_notes import MODULES


def count(release, major, *names):
    calls = MODULES.calls(release, major, names)
    functions = Counter(call.function.partition(":")[2] for call in calls)
    assert len({str(call) for call in calls}) == len(calls)
    return dict(functions)


PREFILL = "gen_batch_prefill_module"
PRIMARY = "_gen_batch_prefill_primary_module"
SAMPLING = "gen_sampling_module"


@pytest.mark.parametrize(
    ("release", "major", "names", "functions"),
    [
        ("0.6.13", 9, ["sampling"], {SAMPLING: 1}),
        ("0.6.13", 12, ["batch_prefill_fp8", "sinks"], {PREFILL: 3}),
        ("0.7.2.post1", 12, ["batch_prefill_fp8"], {PRIMARY: 3}),
        ("0.7.2.post1", 11, ["xqa_fp8", "fused_moe_120", "sampling"], {SAMPLING: 1}),
        (
            "0.7.2.post1",
            12,
            ["small"],
            {
                SAMPLING: 1,
                PRIMARY: 6,
                "gen_batch_prefill_attention_sink_module": 2,
                "gen_xqa_module": 31,
            },
        ),
    ],
)
def test_calls(release, major, names, functions):
    assert count(release, major, *names) == functions


def test_arguments_are_single_values():
    calls = MODULES.calls("0.6.16.post3", 12, ["batch_prefill_fp8"])
    heads = [call.arguments["head_dim_vo"] for call in calls]
    assert heads == [call.arguments["head_dim_qk"] for call in calls] == [64, 128, 256]
    assert {call.arguments["dtype_o"] for call in calls} == {"torch.bfloat16"}
    assert {call.gib for call in calls} == {1.5}


def test_every_module_has_its_generators():
    ids = {row.id for row in MODULES.generator}
    for row in MODULES.module:
        assert row.generators
        assert ids.issuperset(row.generators)
