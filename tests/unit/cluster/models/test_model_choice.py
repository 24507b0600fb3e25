"""Which files of a repository are fetched, and which names are refused."""

import json

import pytest

from patchkit.cluster.models.choice import choose_files, parse_index
from patchkit.cluster.models.listing import Listing
from patchkit.cluster.models.names import (
    ModelFolder,
    folder_of,
    models_folder,
    split_revision,
)
from patchkit.errors import PatchkitError, SourceError, UsageError
from patchkit.records import RecordError
from support.hub import CHOSEN, COMMIT, MODEL, SHARDS

INDEX = "model.safetensors.index.json"
MISTRAL = ["consolidated.safetensors", "params.json", "tekken.json"]
BIN = ["pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"]


@pytest.mark.parametrize(
    ("names", "shards", "left"),
    [
        (list(MODEL), {INDEX: SHARDS}, {*MODEL} - {*CHOSEN}),
        (["config.json", "model.safetensors", "model.gguf"], {}, {"model.gguf"}),
        # Weights beside the ones that an index names, as an adapter or an older upload.
        ([INDEX, *SHARDS, "extra.safetensors"], {INDEX: SHARDS}, {"extra.safetensors"}),
        (MISTRAL, {}, set()),
        (
            [*MISTRAL, "config.json", "model.safetensors", "consolidated.safetensors.index.json"],
            {"consolidated.safetensors.index.json": MISTRAL[:1]},
            {MISTRAL[0], "consolidated.safetensors.index.json"},
        ),
        (
            ["config.json", *BIN, "training_args.bin", "optimizer.bin"],
            {BIN[1]: BIN[:1]},
            {"training_args.bin", "optimizer.bin"},
        ),
        # Beside safetensors: neither the others nor their index.
        (["model.safetensors", *BIN], {BIN[1]: BIN[:1]}, {*BIN}),
        (
            ["model.safetensors", "1_Pooling/config.json", "chat_template.jinja", "code.py"],
            {},
            set(),
        ),
        (
            ["model.safetensors", "onnx/config.json", "onnx/model.onnx", ".gitattributes", "a.png"],
            {},
            {"onnx/config.json", "onnx/model.onnx", ".gitattributes", "a.png"},
        ),
        (["adapter_config.json", "adapter_model.safetensors"], {}, set()),
    ],
)
def test_what_is_fetched_is_what_is_loaded(names, shards, left):
    assert choose_files(names, shards) == tuple(sorted({*names} - left))


@pytest.mark.parametrize(
    ("names", "shards", "says"),
    [
        (["config.json"], {}, "no weights"),
        (["config.json", "model.gguf"], {}, "it holds .gguf"),
        (["original/consolidated.00.pth"], {}, "no weights"),
        ([INDEX, SHARDS[0]], {INDEX: SHARDS}, f"{INDEX} names {SHARDS[1]}"),
    ],
)
def test_a_repository_that_cannot_be_loaded_is_refused(names, shards, says):
    with pytest.raises(SourceError, match=says):
        choose_files(names, shards)


HOSTILE = [
    "../config.json",
    "/etc/x.json",
    "a/../../b.json",
    "a\x1b[2J.json",
    "a\nb.json",
    "./c.json",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_leads_elsewhere_is_refused_wherever_it_stands(name):
    files = {name: (1, "a" * 40), "model.safetensors": (1, "a" * 64)}
    with pytest.raises(SourceError, match="no plain name"):
        Listing(commit=COMMIT, files=files).choose_record("org/small")
    with pytest.raises(RecordError, match="no plain name"):
        parse_index(json.dumps({"weight_map": {"w": name}}), INDEX)


@pytest.mark.parametrize(
    "name", ["a[1].safetensors", "*.safetensors", "-x.safetensors", "a\\b.json"]
)
def test_a_name_that_hf_would_take_for_something_else_is_refused(name):
    files = {name: (1, "a" * 64), "model.safetensors": (1, "a" * 64)}
    with pytest.raises(SourceError, match="which is no plain name"):
        Listing(commit=COMMIT, files=files).choose_record("org/small")


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": 3}', "{", '{"weight_map": {"w": 3}}'])
def test_what_is_no_index_is_said(text):
    with pytest.raises(RecordError, match=INDEX):
        parse_index(text, INDEX)


@pytest.mark.parametrize(
    ("spec", "split"),
    [
        ("openai/gpt-oss-120b", ("openai/gpt-oss-120b", "")),
        ("gpt2@main", ("gpt2", "main")),
        ("org/a.b_c@refs/pr/1", ("org/a.b_c", "refs/pr/1")),
        (f"org/small@{COMMIT}", ("org/small", COMMIT)),
    ],
)
def test_a_model_is_named_as_on_the_hub(spec, split):
    assert split_revision(spec) == split


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "@main",
        "a/b/c",
        "../b",
        "a/..",
        "a--b/c",
        "-a/b",
        "a/b@",
        "a/b@-x",
        "a/b@../c",
        "a/b c",
        "a/b@x y",
    ],
)
def test_what_names_no_model_is_refused(spec):
    with pytest.raises(UsageError):
        split_revision(spec)


@pytest.mark.parametrize("repo", ["openai/gpt-oss-120b", "gpt2", "a-b/c.d_e"])
def test_a_folder_says_which_model_it_is(repo):
    name = ModelFolder(repo=repo, commit=COMMIT).name
    assert "/" not in name
    assert folder_of(name) == ModelFolder(repo=repo, commit=COMMIT[:12])


@pytest.mark.parametrize(
    "name", ["a", "a@b", ".a@0123456789ab", "a--b@0123456789AB", "a--b--c@0123456789ab"]
)
def test_other_folders_are_no_models(name):
    assert folder_of(name) is None


@pytest.mark.parametrize("folder", ["models", "", "a\nb", "/a\x1bb"])
def test_the_folder_of_models_is_a_whole_path(folder):
    with pytest.raises(PatchkitError):
        models_folder(folder)
