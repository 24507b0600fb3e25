"""The command line that goes with an env file: decided and explained."""

import math
from dataclasses import replace

import pytest

from patchkit.errors import DriftError, UsageError
from patchkit.patching.recipe import load_recipe
from patchkit.runtime.rules.presets import load_flag_rules, load_presets
from patchkit.runtime.rules.releases import vllm_variables, within
from patchkit.runtime.rules.rule import RuleChoice
from patchkit.runtime.serve.args import serve_args
from tools import serve_lines

HEAD = {
    "role": "head",
    "topology": "roce",
    "executor": "mp",
    "nodes": 2,
    "head": "10.0.0.1",
}


def ask(model="some/model", vllm="0.33.0", **asked):
    request = serve_lines.request(vllm, {"model": model, **asked})
    return serve_args(request, load_flag_rules())


def wanted(rule):
    return RuleChoice(wanted=frozenset({rule}))


def test_lines_are_the_golden_ones():
    assert serve_lines.text() == serve_lines.PLACE.read_text(encoding="utf-8")


@pytest.mark.parametrize("topology", ["roce", "ring", "socket"])
def test_each_node_has_one_part_of_the_model(topology):
    for nodes in range(2, 33):
        flags = {
            each.flag: int(each.value)
            for each in ask(**{**HEAD, "topology": topology, "nodes": nodes}).flags
            if each.flag.endswith("-parallel-size")
        }
        assert math.prod(flags.values()) == nodes, (nodes, flags)


# What is refused


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"model": ""}, "is not a model"),
        ({**HEAD, "nodes": 1}, "--role head needs two nodes or more"),
        ({**HEAD, "role": "worker", "head": ""}, "missing --head-ip"),
        (
            {**HEAD, "role": "worker", "rank": 2},
            "rank 2 of 2 nodes cannot be a worker's",
        ),
        (
            {**HEAD, "role": "worker", "rank": 1, "executor": "ray"},
            "under Ray serves nothing",
        ),
        ({"choice": wanted("magic")}, "no rule is called 'magic'"),
        (
            {"model": "gpt-oss-20b", "quantization": "fp8"},
            "gpt-oss-20b is mxfp4, not fp8",
        ),
        (
            {"model": "Qwen/Qwen3.6-27B-FP8", "vllm": "0.16.0"},
            "takes vLLM 0.17.0 or newer",
        ),
        ({"model": "GLM-5.3-Flash-NVFP4"}, "ambiguous preset 'GLM-5.3-Flash-NVFP4'"),
    ],
)
def test_requests_that_make_no_sense(asked, what):
    with pytest.raises(UsageError) as caught:
        ask(**asked)
    assert what in caught.value.what
    assert caught.value.hint


@pytest.mark.parametrize(
    ("place", "left_out"),
    [
        ({"target": "gb10"}, False),
        ({"target": "thor"}, True),
        ({"target": "rtx50"}, True),
        ({**HEAD, "topology": "hetero", "target": "gb10"}, True),
        ({**HEAD, "topology": "hetero", "target": "thor"}, True),
    ],
)
def test_a_gb10_s_attention_is_not_a_thor_s(place, left_out):
    served = ask("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", **place)
    assert ("--attention-backend" not in served.words) is left_out
    told = [
        note
        for note in served.notes
        if note.startswith("--attention-backend is left out")
    ]
    assert ["nobody tried it on a" in note for note in told] == [True] * left_out


def test_what_a_release_does_not_know_is_never_passed_on():
    rules = load_flag_rules()
    (rule,) = (rule for rule in rules.rules if rule.id == "nvfp4-moe")
    request = serve_lines.request("0.33.0", {"model": "a/b", "quantization": "nvfp4"})
    for slip, what in (
        ({"flag": "--hosts"}, "has no --hosts"),
        ({"value": "marlinn"}, "does not take --moe-backend marlinn"),
    ):
        with pytest.raises(DriftError, match=rf"^vLLM 0\.33\.0 {what} \(nvfp4-moe\)"):
            serve_args(request, replace(rules, rules=(replace(rule, **slip),)))


@pytest.mark.parametrize("preset", load_presets(), ids=lambda each: each.name)
def test_every_release_from_its_oldest_on_takes_a_preset(preset):
    asked = {"model": preset.id if "/" in preset.id else f"some/{preset.id}"}
    asked |= {} if preset.single else {**serve_lines.TWO, "nodes": preset.nodes}
    drifted = set()
    for version in map(str, load_recipe("vllm").supported):
        if within(version, f">={preset.min_vllm}"):
            assert set(preset.variables) <= set(vllm_variables(version))
            try:
                assert serve_lines.served(version, asked).words
            except DriftError:
                drifted.add(version)
    # A build may have what no release has.
    assert not drifted or preset.build


# What is told


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"model": "Qwen/Qwen3.6-27B-FP8"}, "must hold VLLM_USE_DEEP_GEMM=0"),
        (
            {
                "model": "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4",
                "vllm": "0.17.1",
            },
            "where yours fails, --without drafter. Measured with 0.28.0.",
        ),
        (
            {"model": "inclusionAI/Ling-3.0-flash-int4"},
            "not as upstream's recipe for a GB10: --gpu-memory-utilization; --explain says why",
        ),
        (
            {"model": "Qwen/Qwen3-Coder-Next-FP8", "vllm": "0.19.1"},
            "--load-format is left out: The package comes with vLLM from 0.20 on",
        ),
    ],
)
def test_notes(asked, told):
    assert any(told in note for note in ask(**asked).notes)


# The command


def test_one_line_on_standard_output(cli):
    done = cli("serve-args", "gpt-oss-20b", "--vllm", "0.25.1")
    begin = "vllm serve openai/gpt-oss-20b --host 127.0.0.1 --port 8000 --gpu-memory-utilization "
    assert done.stdout.startswith(begin)
    assert done.stdout.count("\n") == 1
    assert done.stderr == (
        "note it listens on 127.0.0.1, for this machine alone; --listen cable or lan opens it\n"
        "note no GPU is found here: sized for a Spark, with 119.7 GiB that CPU and GPU share\n"
        "note Small: two Sparks gain nothing.\n"
        "note at most 73.8 tok/s for one stream on one node: at least 3.7 GB of weights are read "
        "for each token, at 273 GB/s; its context's cache adds to that\n"
        "note FlashInfer compiles at the first start, if an earlier one did not: sampling; 3 "
        "units, up to 1.0 GiB for a compiler, about 1 min with 4 at once, as with MAX_JOBS of "
        "`patchkit env`; without it a compiler for each core\n"
        "next, once it serves: curl http://127.0.0.1:8000/v1/models\n"
    )


def test_explained(cli):
    assert "missing --vllm" in cli("serve-args", "a/b", rc=2).stderr
    done = cli(
        "serve-args", "a/b", "--vllm", "0.17.1", "--explain", "--quantization", "nvfp4"
    )
    rows = {row.split()[1]: row for row in done.stdout.splitlines()}
    assert rows["--moe-backend"].startswith("✓")
    assert "Marlin reads FP4" in rows["--moe-backend"]
    assert rows["--swap-space"].startswith("-")
    assert "without effect since the V1 engine" in rows["--swap-space"]
    assert rows["--enforce-eager"].startswith("-")
    assert "14 of 30" in done.stderr
