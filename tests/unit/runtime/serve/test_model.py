"""A mistyped model stops a pipeline; another model is served, with flags that fit any."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from patchkit.cli import group
from patchkit.errors import HostError, UsageError
from patchkit.runtime.memory.checkpoint import weights_gib
from patchkit.runtime.memory.weights import find_weights
from patchkit.runtime.rules.releases import variable_table
from patchkit.runtime.serve.request import (
    choose_preset,
    count_nodes,
    memory_request,
)
from support import hub, write_files
from tools import serve_lines
from unit.runtime.memory.test_plan import KINDS, checkpoint_of


def test_a_slip_is_an_error():
    for model, meant in (
        ("opnai/gpt-oss-120b", "openai/gpt-oss-120b"),
        ("OpenAI/GPT-OSS-210B", "openai/gpt-oss-120b"),
        ("qwen2.5-7b", "Qwen2.5-7B-Instruct"),
    ):
        with pytest.raises(UsageError, match="no model is known") as caught:
            choose_preset(model, None, {})
        assert f"did you mean {meant}? If there is such" in caught.value.hint
        assert choose_preset(model, "none", {}) is None


def test_a_slip_gives_a_pipeline_nothing_to_run(cli):
    asked = ("serve-args", "openai/gtp-oss-120b", "--vllm", "0.33.0")
    done = cli(*asked, rc=UsageError.exit_code)
    assert not done.stdout
    assert "did you mean openai/gpt-oss-120b?" in done.stderr
    done = cli(*asked, "--preset", "none")
    assert done.stdout.startswith("vllm serve openai/gtp-oss-120b --host 127.0.0.1 ")
    assert "openai/gtp-oss-120b has no preset: these flags fit any model" in done.stderr


def test_another_model_is_none_of_the_presets():
    for model in ("some/model", "Qwen/Qwen3.5-27B-FP8", "/models/gtp-oss-120b-of-mine"):
        assert choose_preset(model, None, {}) is None


@pytest.mark.parametrize("where", ["folder", "cache", "home", "default"])
def test_what_is_there_is_no_slip(tmp_path, monkeypatch, where):
    monkeypatch.chdir(tmp_path)
    model = "openai/gtp-oss-120b"
    downloaded = "models--openai--gtp-oss-120b"
    place, environment = {
        "folder": (model, {}),
        "cache": (f"cache/{downloaded}", {"HF_HUB_CACHE": "cache", "HF_HOME": "hf"}),
        "home": (f"hf/hub/{downloaded}", {"HF_HOME": "hf", "HOME": "."}),
        "default": (f".cache/huggingface/hub/{downloaded}", {"HOME": "."}),
    }[where]
    with pytest.raises(UsageError, match="no model is known as"):
        choose_preset(model, None, environment)
    (tmp_path / place).mkdir(parents=True)
    assert choose_preset(model, None, environment) is None


def test_a_download_is_weighed(tmp_path):
    environment = {"HF_HUB_CACHE": str(tmp_path)}
    assert weights_gib("a/b", environment) is None
    for name, size in (("half", 1), ("whole", 3)):
        folder = tmp_path / "models--a--b/snapshots" / name
        folder.mkdir(parents=True)
        with (folder / "model.safetensors").open("wb") as file:
            file.truncate(size * 2**30)  # takes no room on the disk
        (folder / "missing.safetensors").symlink_to("../../blobs/not-there")
    assert weights_gib("a/b", environment) == 3


SPARK = "NVIDIA GB10, 12.1, 580.173.02, [N/A], 0000000F:01:00.0"
LAPTOP = "NVIDIA GeForce RTX 5080 Laptop GPU, 12.0, 576.40, 16303, 00000000:01:00.0"
STATION = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition, 12.0, 580.95, 97887, 00000000:01:00.0"
SILENT = "NVIDIA Something New, 13.0, 610.43.02, [N/A], 00000000:01:00.0"
GPT, LARGE = "openai/gpt-oss-120b", "Qwen/Qwen2.5-72B-Instruct"


def serve_args(*arguments):
    return CliRunner().invoke(group, ["serve-args", *arguments])


@pytest.fixture
def machine(tmp_path):
    """Make the root of a machine of one GPU, "" for none, with so many GiB of RAM."""

    def make(gpu, ram):
        files = {"proc/meminfo": f"MemTotal: {ram << 20} kB\nMemAvailable: 1 kB\n"}
        files |= {"commands/nvidia-smi.csv": f"{gpu}\n"} if gpu else {}
        return write_files(tmp_path / "machine", files)

    return make


UNTRIED = [
    (("env", "--role", "single", "--vllm", "0.33.0"), "nobody has tried this file on"),
    (("serve-args", GPT, "--vllm", "0.33.0"), "nobody has tried these flags on an RTX"),
    (("probe",), "nobody has run patchkit's vLLM on one"),
]


@pytest.mark.parametrize(("verb", "note"), UNTRIED, ids=["env", "serve-args", "probe"])
def test_a_verb_says_what_nobody_tried_on_a_card(machine, verb, note):
    for gpu, is_told in ((STATION, True), (SPARK, False)):
        done = CliRunner().invoke(group, [*verb, f"--root={machine(gpu, 500)}"])
        assert done.exit_code == 0, done.output
        assert (note in " ".join(done.output.split())) is is_told


@pytest.mark.parametrize(
    ("gpu", "ram", "asked", "figures", "hint"),
    [
        (
            *(LAPTOP, 30, (GPT,)),
            "room for 11 why: 0.92 of 15.9 GiB (NVIDIA GeForce RTX 5080 Laptop GPU), less 4",
            "take a checkpoint in fewer bits; or a GPU with 71 GiB; or for a line that a Spark",
        ),
        # Upstream's recipe says the size.
        (
            *(LAPTOP, 30, ("Qwen/Qwen3.6-27B",)),
            "at least 40 GiB of weights",
            "a GPU with 49 GiB",
        ),
        (
            *(STATION, 500, (LARGE,)),
            "136 GiB of weights per node",
            "or AWQ checkpoint: 39 GiB; or",
        ),
        (
            *(SPARK, 30, (GPT,)),
            "room for 20 why: 0.80 of 30.0 GiB (this host)",
            "take 4 nodes",
        ),
        (
            *(LAPTOP, 30, (LARGE, "--target", "gb10")),
            "0.85 of 119.7 GiB (a Spark)",
            "2 nodes",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_figures(
    machine, gpu, ram, asked, figures, hint
):
    done = serve_args(*asked, "--vllm=0.25.1", f"--root={machine(gpu, ram)}")
    assert not done.stdout
    assert isinstance(done.exception, HostError)
    assert figures in f"{done.exception.what} why: {done.exception.why}"
    assert hint in done.exception.hint


@pytest.mark.parametrize(
    ("gpu", "asked", "share", "note"),
    [
        (SPARK, (GPT,), "0.80", ""),
        (
            STATION,
            (GPT,),
            None,
            "sized for NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        ),
        (
            SILENT,
            (GPT,),
            None,
            "whether it fits was not checked: nvidia-smi does not say",
        ),
        (
            LAPTOP,
            ("some/model",),
            None,
            "some/model has no preset: these flags fit any model, ",
        ),
        (SPARK, (GPT, "--target", "thor"), "0.80", "thor's memory is not known here"),
        ("", (GPT,), "0.80", "no GPU is found here: sized for a Spark, with 119.7 GiB"),
    ],
)
def test_what_fits_or_is_not_known_is_printed(machine, gpu, asked, share, note):
    done = serve_args(*asked, "--vllm=0.25.1", f"--root={machine(gpu, 121)}", "--json")
    served = json.loads(done.stdout)
    flags = {each["flag"]: each["value"] for each in served["flags"]}
    # That of a preset is for memory which CPU and GPU share.
    assert flags.get("--gpu-memory-utilization") == share
    said = [
        each for each in served["notes"] if "sized for" in each or "not checked" in each
    ]
    assert (note in said[0]) if note else not said


GLM, TWO = (
    "nvidia/GLM-5.3-Flash-NVFP4",
    ("--role=head", "--nodes=2", "--head-ip=192.168.100.10"),
)


@pytest.mark.parametrize(
    ("model", "says", "hint"),
    [
        (
            GLM,
            "does not fit: 178 GiB of weights per node, and there is room for 94",
            "2 nodes",
        ),
        # Upstream's recipe names less than one Spark has: the preset knows better.
        (
            "deepseek-ai/DeepSeek-V4-Flash",
            "at least 106 GiB of weights per node",
            "2 nodes",
        ),
        (
            "some/Model-405B-Instruct",
            "405 * 10^9 parameters in 4 bits or more)",
            "3 nodes",
        ),
        (
            "some/Model-122B-A10B-BF16",
            "at least 227 GiB of weights per node (by its name",
            "3 nodes",
        ),
    ],
)
def test_what_one_spark_cannot_hold_is_refused(model, says, hint):
    done = serve_args(model, "--role=single", "--target=gb10", "--vllm=0.33.0")
    assert not done.stdout
    assert isinstance(done.exception, HostError)
    assert says in done.exception.what
    assert hint in done.exception.hint


@pytest.mark.parametrize(("single", "nodes"), [(False, 2), (True, 1)])
def test_a_preset_knows_more_than_a_size_that_is_a_least_one(single, nodes):
    """At 0.99 of the memory the 106 GiB of upstream's recipe would fit one Spark."""
    request = serve_lines.request("0.33.0", {"model": "deepseek-ai/DeepSeek-V4-Flash"})
    preset = replace(request.node.preset, single=single)
    asked = replace(request, node=replace(request.node, preset=preset))
    memory = memory_request(asked, {"--gpu-memory-utilization": "0.99"})
    assert count_nodes(asked, memory).nodes == nodes


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("a/Model-8B", 4 * 8e9 / 8 / 2**30),
        ("a/Model-80B-A3B-FP8", 80e9 / 2**30),
        ("a/model-4b-it-bf16", 2 * 4e9 / 2**30),
        ("/models/Model-1T-2.5bpw", 2.5e12 / 8 / 2**30),
        # Tokens that it was trained on, or the teacher, are no weights: of several the least.
        ("TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T", 4 * 1.1e9 / 8 / 2**30),
        ("a/Model-7B-distill-from-405B", 4 * 7e9 / 8 / 2**30),
        ("./Qwen3-235B-A22B-Q2_K.gguf", 235e9 / 8 / 2**30),
        ("Intel/Qwen3-235B-A22B-int2-mixed-AutoRound", 2 * 235e9 / 8 / 2**30),
        ("a/Mixtral-8x7B", None),  # the experts share their attention
        ("a/gemma-3n-E4B-it", None),
        ("a/model-4bit", None),
    ],
)
def test_a_name_is_the_last_resort(name, gib):
    weights = find_weights(name, None, None)
    assert (weights and weights.gib) == gib
    assert weights is None or (weights.from_name and weights.is_least)
    assert find_weights(name, None, 7.0).gib == 7


def test_two_copies_are_for_what_one_spark_holds():
    for model, told in ((GPT, True), (GLM, False)):
        done = serve_args(
            model, *TWO, "--topology=roce", "--target=gb10", "--vllm=0.33.0"
        )
        assert done.exit_code == 0, done.output
        assert ("two copies may serve more" in done.stderr) is told


def test_a_release_newer_than_all_known_ones_is_told():
    newest = variable_table("vllm").newest
    for release, is_told in ((newest, False), ("9.9", True)):
        given = ["serve-args", "some/Model-7B", "--target=gb10", f"--vllm={release}"]
        done = CliRunner().invoke(group, given)
        assert (f"the flags are those of {newest}" in done.output) == is_told


def test_the_list_has_the_longest_context_of_models_that_are_here(
    tmp_path, monkeypatch
):
    """The header and the config of a checkpoint are enough; the command takes it, and no longer."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    row = KINDS["llama8b"]
    config = row["config"] | {"max_position_embeddings": 10_000_000}
    header = {
        tensor.name: {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [0, tensor.size],
        }
        for tensor in checkpoint_of(row).tensors
    }
    names = {
        "Qwen/Qwen2.5-7B-Instruct": (),
        LARGE: ("--role=head", "--nodes=2", "--head-ip=10.0.0.1", "--topology=socket"),
    }
    for name in names:
        folder = tmp_path / f"hub/models--{name.replace('/', '--')}/snapshots/1"
        folder.mkdir(parents=True)
        hub.checkpoint(folder, header, config)

    words = ("--target=gb10", "--vllm=0.33.0")
    listed = json.loads(serve_args("--list", "--json", *words).stdout)
    contexts = {row["id"]: row["longest_context"] for row in listed}
    assert {name for name, longest in contexts.items() if longest} == {*names}
    assert serve_args("--list").stdout.count("  ?  ") >= len(listed)  # no release

    for name, more in names.items():
        longest = contexts[name]
        fits = serve_args(name, f"--ctx={longest}", *words, *more)
        assert f"--max-model-len {longest} " in fits.stdout
        longer = serve_args(name, f"--ctx={longest + 16}", *words, *more)
        assert longer.exception.hint == f"take --ctx {longest}, or more nodes"
