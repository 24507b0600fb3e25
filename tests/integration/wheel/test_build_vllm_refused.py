"""What `patchkit build vllm` refuses before anything is compiled or fetched."""

from __future__ import annotations

import json
import re

import pytest

from support.building import HERE, SMALL, SMALL_VLLM, VLLM_VERSION, wheels

SRC = ["--src", SMALL_VLLM, "--cpu", HERE]
TOOLS = ("bash", "make", "python3")


@pytest.fixture(scope="module")
def project():
    return "vllm"


@pytest.fixture
def nothing(tmp_path):
    """The variables of a machine where nothing can be fetched."""
    return {"PATCHKIT_CACHE_DIR": str(tmp_path / "cache"), "PIP_INDEX_URL": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    ("arguments", "rc", "says"),
    [
        ([*SRC, "--without", "x"], 2, "no source or extension is called 'x'\n  next: there are: "),
        ([*SRC, "--without", "cutlass"], 2, "vLLM cannot be built without it"),
        ([*SRC, "--source", "cutlass=y"], 2, f"vLLM {VLLM_VERSION} does not fetch it"),
        ([*SRC, "--extensions", "_C"], 2, "no extension '_C'\n  next: there are other_C, small_C"),
        ([*SRC, "--version", VLLM_VERSION], 2, "--version and --src exclude each other"),
        (["--version", "0.10.0"], 3, "vllm 0.10.0 is not supported"),
        (["--src", SMALL], 3, "not a source tree of vLLM"),
        (["--offline"], 3, "is not in the cache, and offline it cannot be downloaded"),
    ],
)
def test_refusals(build, nothing, tmp_path, arguments, rc, says):
    said = build(*arguments, "--dir", tmp_path / "house", rc=rc, env=nothing)
    assert says in said.stderr
    assert said.stdout == ""
    assert wheels(tmp_path / "house") == []
    assert not (tmp_path / "work").exists()
    assert not (tmp_path / "cache/cuda").exists()


@pytest.mark.parametrize(
    ("before", "after", "arguments", "rc", "says"),
    [
        ("0.27.99", "0.13.9", ["--without", "flash-attn"], 2, "vLLM 0.13.9 cannot run without it"),
        ("Version: 0.27.99", "", [], 3, "PKG-INFO"),
    ],
    ids=["not without", "no version"],
)
def test_a_tree_that_will_not_do(
    build, nothing, sources, tmp_path, before, after, arguments, rc, says
):
    root = sources("PKG-INFO", before, after)
    house = tmp_path / "house"
    assert says in build("--src", root, *arguments, "--dir", house, rc=rc, env=nothing).stderr


def test_a_plan_says_all_that_is_missing_and_begins_nothing(cli, tmp_path):
    (tmp_path / "empty").mkdir()
    nowhere = {
        "PATH": str(tmp_path / "empty"),
        "PATCHKIT_CACHE_DIR": str(tmp_path / "cache"),
        "PIP_INDEX_URL": "http://127.0.0.1:9",
    }
    house = ("--dir", tmp_path / "house", "--dry-run")
    (tmp_path / "lock.txt").touch()
    vllm = ("build", "vllm", *SRC, "--requirements", tmp_path / "lock.txt", *house)
    for words, title, tools in (
        (vllm, f"vLLM {VLLM_VERSION}, with ", ["no C++ compiler: apt install g++-11"]),
        (("build", "nccl", "--src", SMALL, "--cpu", HERE, *house), f"{SMALL}, with ", []),
    ):
        done = cli(*words, env=nowhere, rc=9)
        assert title in done.stdout
        shown = re.sub(r"(\n  why: .*)?\n  next:  ", ": ", done.stdout)
        for tool in (
            *tools,
            *(f"{name} is not on this machine: apt install {name}" for name in TOOLS),
        ):
            assert f"✗ {tool}\n" in shown
        data = json.loads(cli(*words, "--json", env=nowhere, rc=9).stdout)
        assert len(data["missing"]) == shown.count("✗ ")
    assert not (tmp_path / "house").exists()
    assert not (tmp_path / "work").exists()
    assert not (tmp_path / "cache/cuda").exists()
