"""Which files of a repository are fetched, and which names are refused."""

import json

import pytest

from patchkit.cluster.models.model_files import (
    ModelFolder,
    choose_files,
    folder_of,
    read_shards,
    split_revision,
)
from patchkit.errors import SourceError, UsageError
from patchkit.records import RecordError
from support.hub import CHOSEN, COMMIT, MODEL

INDEX = "model.safetensors.index.json"
MISTRAL = ["consolidated.safetensors", "params.json", "tekken.json"]
BIN = ["pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"]


@pytest.mark.parametrize(
    ("names", "left"),
    [
        (list(MODEL), {*MODEL} - {*CHOSEN}),
        (["config.json", "model.safetensors", "model.gguf"], {"model.gguf"}),
        (MISTRAL, set()),
        (
            [
                *MISTRAL,
                "config.json",
                "model.safetensors",
                "consolidated.safetensors.index.json",
            ],
            {MISTRAL[0], "consolidated.safetensors.index.json"},
        ),
        (
            ["config.json", *BIN, "training_args.bin", "optimizer.bin"],
            {"training_args.bin", "optimizer.bin"},
        ),
        # Beside safetensors: neither the others nor their index.
        (["model.safetensors", *BIN], {*BIN}),
        (
            [
                "model.safetensors",
                "1_Pooling/config.json",
                "chat_template.jinja",
                "code.py",
            ],
            set(),
        ),
        (
            [
                "model.safetensors",
                "onnx/config.json",
                "onnx/model.onnx",
                ".gitattributes",
                "a.png",
            ],
            {"onnx/config.json", "onnx/model.onnx", ".gitattributes", "a.png"},
        ),
        (["adapter_config.json", "adapter_model.safetensors"], set()),
    ],
)
def test_what_is_fetched_is_what_is_loaded(names, left):
    assert choose_files(names) == tuple(sorted({*names} - left))


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["config.json"], "no weights"),
        (["config.json", "model.gguf"], "it holds .gguf"),
        (["original/consolidated.00.pth"], "no weights"),
    ],
)
def test_a_repository_that_cannot_be_loaded_is_refused(names, says):
    with pytest.raises(SourceError, match=says):
        choose_files(names)


HOSTILE = [
    "../config.json",
    "/etc/x.json",
    "a/../../b.json",
    "a\x1b[2J.json",
    "a\nb.json",
    "./c.json",
    # What hf would take for a pattern or an option.
    "a[1].safetensors",
    "*.safetensors",
    "-x.safetensors",
    "a\\b.safetensors",
]


def read_index(folder, text):
    (folder / INDEX).write_text(text)
    return read_shards(folder, [INDEX])


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_leads_elsewhere_is_refused(tmp_path, name):
    with pytest.raises(RecordError, match="no plain name"):
        read_index(tmp_path, json.dumps({"weight_map": {"w": name}}))


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"weight_map": 3}', "{", '{"weight_map": {"w": 3}}']
)
def test_what_is_no_index_is_said(tmp_path, text):
    with pytest.raises(RecordError, match=INDEX):
        read_index(tmp_path, text)


@pytest.mark.parametrize(
    ("spec", "split"),
    [
        ("openai/gpt-oss-120b", ("openai/gpt-oss-120b", "")),
        ("gpt2@main", ("gpt2", "main")),
        ("org/a.b_c@refs/pr/1", ("org/a.b_c", "refs/pr/1")),
    ],
)
def test_a_model_is_named_as_on_the_hub(spec, split):
    assert split_revision(spec) == split
    name = ModelFolder(repo=split[0], commit=COMMIT).name
    assert "/" not in name
    assert folder_of(name) == ModelFolder(repo=split[0], commit=COMMIT[:12])


def test_what_names_no_model_is_refused():
    refused = ["", "@main", "a/b/c", "../b", "a/..", "a--b/c", "-a/b"]
    for spec in (*refused, "a/b@", "a/b@-x", "a/b@../c", "a/b c", "a/b@x y"):
        with pytest.raises(UsageError):
            split_revision(spec)
    for name in (
        "a",
        "a@b",
        ".a@0123456789ab",
        "a--b@0123456789AB",
        "a--b--c@0123456789ab",
    ):
        assert folder_of(name) is None
