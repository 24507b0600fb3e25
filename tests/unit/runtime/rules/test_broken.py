"""Releases that are broken for a model: one table for command lines, presets and symptoms."""

from dataclasses import replace

import pytest

from patchkit.doctor.symptoms.diagnosis import read_log
from patchkit.doctor.symptoms.symptom import symptoms
from patchkit.errors import HostError
from patchkit.runtime.rules.presets import broken_for, load_broken, load_flag_rules
from patchkit.runtime.serve.args import serve_args
from support.hub import checkpoint
from tools import serve_lines

GEMMA, LIBERTAI = "nvidia/Gemma-4-26B-A4B-NVFP4", "LibertAIDAI/GLM-5.3-Flash-NVFP4"


def told(model, vllm, **versions):
    return {row.id for row in broken_for([model], (), {"vllm": vllm, **versions})}


@pytest.mark.parametrize(
    ("model", "vllm", "versions", "faults"),
    [
        (GEMMA, "0.27.1", {}, {"gemma4-head-dim"}),
        (GEMMA, "0.27.1", {"transformers": "5.15.0"}, {"gemma4-head-dim"}),
        (GEMMA, "0.27.1", {"transformers": "5.14.1"}, set()),
        (GEMMA, "0.28.0", {"transformers": "5.16.1"}, set()),
        (GEMMA, "0.24.0", {}, {"gemma4-head-dim", "gemma4-26b-on-024"}),
        ("google/gemma-3-27b-it", "0.27.1", {}, set()),
        (
            "someone/DeepSeek-V4-Flash-FP8",
            "0.27.0",
            {},
            {"deepseek-v4-hyper-connections"},
        ),
        (LIBERTAI, "0.33.0", {}, {"glm53-libertaidai"}),
        ("RedHatAI/GLM-5.3-Flash-NVFP4", "0.33.0", {}, set()),
    ],
)
def test_a_release_that_is_broken_for_a_model(model, vllm, versions, faults):
    assert told(model, vllm, **versions) == faults


def request_of(model, vllm, transformers="", **asked):
    request = serve_lines.request(vllm, {"model": model, **asked})
    versions = {**request.node.versions, "transformers": transformers}
    return replace(request, node=replace(request.node, versions=versions))


def test_serve_args_warns_refuses_or_says_nothing():
    rules = load_flag_rules()
    (advice, *_) = serve_args(request_of(GEMMA, "0.27.1"), rules).advice
    assert "does not start with transformers 5.15 or later" in advice.says
    assert "0.28 or later, or transformers below 5.15" in advice.instead

    with pytest.raises(
        HostError, match=r"and transformers 5\.15\.0 is installed here"
    ) as caught:
        serve_args(request_of(GEMMA, "0.27.1", "5.15.0"), rules)
    assert "`python3 -m pip install 'transformers<5.15'`" in caught.value.hint

    served = serve_args(request_of(GEMMA, "0.27.1", "5.14.1"), rules)
    assert "gemma4-head-dim" not in {row.id for row in served.advice}


def test_a_folder_is_known_by_its_config(tmp_path):
    header = {"layers.0.a": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}
    config = {"num_hidden_layers": 1, "num_experts": 1, "num_experts_per_tok": 1}
    config |= {"architectures": ["Gemma4ForConditionalGeneration", 5]}
    here = checkpoint(tmp_path, header, config)
    asked = request_of(str(tmp_path), "0.27.0", checkpoint=here, folder_gib=1.0)
    assert "gemma4-head-dim" in {
        row.id for row in serve_args(asked, load_flag_rules()).advice
    }


def test_a_symptom_has_the_cause_of_the_table():
    named = {name: entry for entry in symptoms().values() for name in entry.broken}
    assert {*named} <= {*load_broken()}
    for name, entry in named.items():
        row = load_broken()[name]
        cause = next(cause for cause in entry.cause if cause.id == name)
        assert (cause.cause, cause.cure, cause.when) == (row.cause, row.cure, row.when)

    text = (
        "INFO 08-18 12:46:45 [api_utils.py:345] version 0.27.1\n"
        "transformers.integrations.heterogeneity.configuration_utils."
        "AmbiguousGlobalPerLayerAttributeError: 'head_dim' is a per-layer attribute and may vary "
        "across layers. Access it via the individual layer configs instead.\n"
    )
    for known in ({"vllm": "0.27.1"}, {}):
        (diagnosis,) = read_log([text.encode()], known).diagnoses
        assert diagnosis.symptom.id == "transformers-per-layer-attribute"
        assert diagnosis.causes[0].id == "gemma4-head-dim"
