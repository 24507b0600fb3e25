"""Recipes of others: what is taken over, what is named, and what is refused."""

import json

import pytest

from patchkit.errors import SourceError, UsageError
from patchkit.runtime.serve.recipe_files import read_recipe

EUGR = """\
model: a/b
container: x
mods: [mods/y]
cluster_only: true
defaults: {port: 8000, tensor_parallel: 2, share: 0.95, tokens: 3}
env: {VLLM_X: 1, LD_PRELOAD: /x}
command: |
  vllm serve a/b -tp {tensor_parallel} --port {port} --enforce-eager \\
    --gpu-memory-utilization {share} --made-up 1 \\
    --speculative-config '{{"method":"mtp","num_speculative_tokens":{tokens}}}'; rm -rf /
"""
SPARKRUN = """\
model: a/b
runtime: vllm
defaults: {max_model_len: 9, enable_prefix_caching: true, speculative_config: {method: ngram}}
"""
GEMMA = """\
meta: {hardware: {}}
model:
  model_id: nvidia/Gemma-4-26B-A4B-NVFP4
  min_vllm_version: 0.25.0
  architecture: moe
features:
  spec_decoding:
    args:
    - --speculative-config
    - '{"method":"mtp","model":"google/gemma-4-26B-A4B-it-assistant","num_speculative_tokens":4,\
"moe_backend":"triton"}'
variants:
  default:
    precision: nvfp4
    supported_hardware: [dgx_spark_gb10]
    hardware_overrides:
      dgx_spark_gb10:
        extra_args: [--gpu-memory-utilization, '0.8', --max-num-seqs, '8',
          --max-num-batched-tokens, '8192', --performance-mode, interactivity,
          --max-model-len, '262144', --enable-prefix-caching, --reasoning-parser, gemma4,
          --tool-call-parser, gemma4, --enable-auto-tool-choice]
        extra_env: {VLLM_USE_V2_MODEL_RUNNER: '1'}
"""
GPT_OSS = """\
meta: {hardware: {}}
model:
  model_id: openai/gpt-oss-20b
  min_vllm_version: 0.10.1
  architecture: moe
variants:
  default:
    precision: mxfp4
    supported_hardware: [dgx_spark_gb10]
    hardware_overrides:
      dgx_spark_gb10:
        extra_args: [--gpu-memory-utilization, '0.50', --max-num-seqs, '8',
          --performance-mode, interactivity, --max-model-len, '131072',
          --reasoning-parser, openai_gptoss, --tool-call-parser, openai,
          --enable-auto-tool-choice]
"""


@pytest.fixture
def read(tmp_path):
    def from_text(text, model=""):
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return read_recipe(path, model)

    return from_text


def test_commands_and_defaults_are_translated(read):
    preset, untold = read(EUGR)
    assert preset.settings == {
        "--enforce-eager": "",
        "--gpu-memory-utilization": "0.95",
        "--made-up": "1",
        "--speculative-config": '{"method":"mtp","num_speculative_tokens":3}',
        "VLLM_X": "1",
    }
    assert (preset.id, preset.nodes, preset.single) == ("a/b", 2, False)
    told = (
        "container is",
        "mods is",
        "of its command,",
        "--tensor-parallel-size, --port: of",
    )
    told += ("LD_PRELOAD: the dynamic loader takes",)
    assert [
        line.startswith(begin) for line, begin in zip(untold, told, strict=True)
    ] == [True] * 5
    settings = read(SPARKRUN, "/models/b")[0].settings
    assert settings.pop("--speculative-config") == json.dumps({"method": "ngram"})
    assert settings == {"--max-model-len": "9", "--enable-prefix-caching": ""}


def test_the_same_checks_hold_for_a_recipe(cli, tmp_path):
    path = tmp_path / "recipe.yaml"
    text = EUGR.replace("cluster_only: true\n", "").replace('"mtp"', '"dflash"')
    text = text.replace(" -tp ", " --worker-cls x.Y -tp ")
    path.write_text(
        text.replace(
            "--made-up", "--max-num-seqs 900 --max-num-batched-tokens 2048 --made-up"
        )
    )
    done = cli("serve-args", "--recipe", str(path), "--vllm", "0.33.0")
    assert "--gpu-memory-utilization 0.80 --max-num-seqs 900 --max-num-b" in done.stdout
    for text in (
        "--gpu-memory-utilization 0.95 is left out: CPU and GPU share one memory",
        "--enforce-eager is left out: CUDA graphs work",
        "--made-up is left out: vLLM 0.33.0 has no --made-up",
        "`patchkit env --set VLLM_X=1`",
        "--worker-cls: vLLM imports Python",
        "682 of 900 sequences are computed at once: each drafts 3 tokens",
    ):
        assert text in done.stderr


def test_a_recipe_of_vllms_gives_the_same_line_as_its_preset(cli, tmp_path):
    path = tmp_path / "recipe.yaml"
    for text in (GEMMA, GPT_OSS):
        path.write_text(text)
        model = read_recipe(path)[0].id
        again = cli("serve-args", "--recipe", str(path), "--vllm", "0.33.0").stdout
        assert again == cli("serve-args", model, "--vllm", "0.33.0").stdout
    assert read_recipe(path)[0].quantization == "mxfp4"
    with pytest.raises(UsageError, match="has no x/y"):
        read_recipe(path, "x/y")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1, 2]",
        "model: {model_id: a/b}\nvariants: {a: 1}",
        "model: a/b\nruntime: sglang",
        "model: !!python/object/apply:os.system [id]",
        "model: a/b\ncommand: vllm serve a/b --x 'open",
        "model: a/b\ndefaults: {gpu_memory_utilization: much}",
        "model: a/b\ndefaults: {speculative_config: '[]'}",
        "model: a/b\ndefaults: {x: 2026-01-01}",
        "model: a/b\nx: !!bool maybe",
        "model: a/b\nx: !!int ''",
        "model: a/b\nx: !!timestamp 2026",
        f"command: vllm serve a/b --z {{x}}\ndefaults: {{x: '{'{y}' * 9000}', y: '{'y' * 99}'}}",
    ],
)
def test_what_is_no_recipe_is_refused(read, text):
    with pytest.raises(SourceError):
        read(text)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("model: " + "[" * 100_000, 1),
        (f"x: &x {'y' * 9999}\nz: [{'*x, ' * 1000}]\nmodel: a/b", 2),
        ("defaults: &a\n  b: *a\nmodel: a/b", 2),
        ("model: a/b\ncommand: [\n", 3),
        ("model: a/b\n\x07", 2),
    ],
)
def test_a_recipe_that_cannot_be_read_names_the_line(read, text, line):
    with pytest.raises(SourceError, match=rf"recipe.yaml:{line}: is no recipe"):
        read(text)
