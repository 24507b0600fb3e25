"""A mistyped model stops a pipeline; another model is served, with flags that fit any."""

from __future__ import annotations

import pytest

from patchkit.errors import UsageError
from patchkit.runtime.serve.model import preset_of, weights_gib


@pytest.mark.parametrize(
    ("model", "meant"),
    [
        ("opnai/gpt-oss-120b", "openai/gpt-oss-120b"),
        ("OpenAI/GPT-OSS-210B", "openai/gpt-oss-120b"),
        ("meta-lama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("qwen2.5-7b", "Qwen2.5-7B-Instruct"),
    ],
)
def test_a_slip_is_an_error(model, meant):
    with pytest.raises(UsageError) as caught:
        preset_of(model, None, {})
    assert f"did you mean {meant}? If there is such a model, add --preset none" in caught.value.hint
    assert preset_of(model, "none", {}) is None


def test_a_slip_gives_a_pipeline_nothing_to_run(cli):
    asked = ("serve-args", "openai/gtp-oss-120b", "--vllm", "0.33.0")
    done = cli(*asked, rc=UsageError.exit_code)
    assert not done.stdout
    assert "did you mean openai/gpt-oss-120b?" in done.stderr
    done = cli(*asked, "--preset", "none")
    assert done.stdout.startswith("vllm serve openai/gtp-oss-120b --host 127.0.0.1 ")
    assert "openai/gtp-oss-120b has no preset: these flags fit any model" in done.stderr


@pytest.mark.parametrize(
    "model", ["some/model", "Qwen/Qwen3.5-27B-FP8", "/models/gtp-oss-120b-of-mine"]
)
def test_another_model_is_none_of_the_presets(model):
    assert preset_of(model, None, {}) is None


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
        preset_of(model, None, environment)
    (tmp_path / place).mkdir(parents=True)
    assert preset_of(model, None, environment) is None


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
