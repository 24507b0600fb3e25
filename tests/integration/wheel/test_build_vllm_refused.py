"""What `patchkit build vllm` refuses before anything is compiled or fetched."""

from __future__ import annotations

import json
import re
import sys

import pytest

from support.building import HERE, SMALL, SMALL_VLLM, VLLM_VERSION, python_with, wheels
from support.needed import need, need_headers
from support.wheels import OTHER_CPU

SRC = ["--src", SMALL_VLLM, "--cpu", HERE]


@pytest.fixture(scope="module")
def project():
    return "vllm"


@pytest.fixture
def refused(build, tmp_path):
    """Run it where nothing can be fetched: what it says, the same in JSON, and nothing written."""
    nothing = {"PATCHKIT_CACHE_DIR": str(tmp_path / "cache"), "PIP_INDEX_URL": "http://127.0.0.1:9"}

    def run(*arguments, rc, env=None):
        given = [*arguments, "--dir", tmp_path / "house"]
        said = build(*given, rc=rc, env={**nothing, **(env or {})})
        assert said.stdout == ""
        if "Usage:" not in said.stderr:  # click's own errors are no JSON
            told = build(*given, "--json", rc=rc, env={**nothing, **(env or {})}).stdout
            error = json.loads(told)["error"]
            assert error["exit_code"] == rc
            assert error["what"] in said.stderr
            assert "error:" not in told
        assert wheels(tmp_path / "house") == []
        assert not (tmp_path / "work").exists()
        assert not (tmp_path / "cache/cuda").exists()
        return said.stderr

    return run


TOOLS = ("bash", "make", "python3")
PYTHON = ["--python", sys.executable]
ACROSS = (
    f"--python {sys.executable}: its torch is for x86_64, the wheel for aarch64"
    if HERE == "x86_64"
    else f"patchkit repack vllm==X.Y.Z --cpu {OTHER_CPU}"
)
REFUSED = [
    (["--cpu", OTHER_CPU, *PYTHON], 2, ACROSS),
    (
        [*SRC, "--without", "x"],
        2,
        "no source or extension is called 'x'\n  next: there are: cutlass, deepgemm",
    ),
    ([*SRC, "--without", "cutlass"], 2, "vLLM cannot be built without it"),
    ([*SRC, "--source", "x=y"], 2, "no source or extension is called 'x'"),
    ([*SRC, "--source", "cutlass"], 2, "not OPTION=WHAT"),
    ([*SRC, "--source", "cutlass=y"], 2, f"vLLM {VLLM_VERSION} does not fetch it"),
    ([*SRC, "--extensions", "_C"], 2, "no extension '_C'\n  next: there are other_C, small_C"),
    ([*SRC, "--version", VLLM_VERSION], 2, "--version and --src exclude each other"),
    ([*SRC, "--target", "gb300"], 2, "no target is called 'gb300'"),
    ([*SRC, "--arch", "12.1"], 2, "--arch takes native or family"),
    ([*SRC, "--jobs", "0"], 2, "--jobs"),
    (["--version", "new"], 2, "'new' is not a version"),
    (["--version", "0.10.0"], 3, "vllm 0.10.0 is not supported"),
    (["--version", "0.99.0"], 3, "0.99.0"),
    (["--src", "/nonexistent"], 3, "/nonexistent"),
    (["--src", SMALL], 3, "is a source tree of NCCL, not of vLLM"),
    (["--src", SMALL_VLLM / "csrc"], 3, "not a source tree of vLLM: setup.py is missing"),
    (["--offline"], 3, "is not in the cache, and offline it cannot be downloaded"),
]


@pytest.mark.parametrize(("arguments", "rc", "says"), REFUSED)
def test_refusals(refused, arguments, rc, says):
    if "--cuda" in arguments:  # looked at after the compiler
        need("g++")
        need_headers()
    assert says in refused(*arguments, rc=rc)


@pytest.mark.parametrize(
    ("before", "after", "arguments", "rc", "says"),
    [
        ("0.99.0", "0.25.1", [], 4, "vLLM 0.25.1 says torch = '2.15.0', recorded is '2.11.0'"),
        ("0.99.0", "0.13.9", ["--without", "flash-attn"], 2, "vLLM 0.13.9 cannot run without it"),
        ("0.99.0", "0.10.0", [], 3, "vllm 0.10.0 is not supported"),
        ("Version: 0.99.0", "", [], 3, "PKG-INFO"),
    ],
    ids=["not the release", "not without", "not supported", "no version"],
)
def test_a_tree_that_will_not_do(refused, sources, before, after, arguments, rc, says):
    root = sources("PKG-INFO", before, after)
    assert says in refused("--src", root, *arguments, rc=rc)


# The Python, and the machine


@pytest.mark.parametrize(
    ("how", "rc", "says"),
    [
        ({"without": ["torch"]}, 9, "has no torch: {python} -m pip install torch==2.15.0"),
        (
            {"without": ["ninja", "setuptools_scm"]},
            *(9, "has no ninja, setuptools-scm: {python} -m pip install ninja setuptools-scm"),
        ),
        (
            {"torch": "2.15.0+cpu", "cuda": None},
            *(10, "torch is 2.15.0+cpu with no CUDA: it is for CPUs alone; wanted: 2.15.0 with"),
        ),
        ({"torch": "2.15.0+cu128", "cuda": "12.8"}, 10, "2.15.0+cu128 with CUDA 12.8; wanted"),
        ({"torch": "2.14.0+cu130"}, 10, "torch is 2.14.0+cu130 with CUDA 13.0; wanted: 2.15.0"),
    ],
    ids=["no torch", "no tools", "torch for CPUs", "another CUDA", "another torch"],
)
def test_a_python_that_will_not_do(refused, tmp_path, how, rc, says):
    need("g++")
    need_headers()
    python = python_with(tmp_path / "venv", **how)
    assert says.format(python=python) in refused(*SRC, "--python", python, rc=rc)


def test_a_plan_says_all_that_is_missing_and_begins_nothing(cli, tmp_path):
    (tmp_path / "empty").mkdir()
    nowhere = {
        "PATH": str(tmp_path / "empty"),
        "PATCHKIT_CACHE_DIR": str(tmp_path / "cache"),
        "PIP_INDEX_URL": "http://127.0.0.1:9",
    }
    house = ("--dir", tmp_path / "house", "--dry-run", "--cuda", "locked")
    vllm = ("build", "vllm", *SRC, "--python", sys.executable, *house)
    for words, title, tools in (
        (vllm, f"vLLM {VLLM_VERSION}, with ", ["no C++ compiler: apt install g++"]),
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
