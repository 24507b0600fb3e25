"""What `patchkit build` refuses before anything is compiled or fetched."""

import json
import re
import shutil

import pytest

from patchkit.source.releases import load_facts
from support.building import HERE, SMALL, SMALL_VLLM, VERSION, VLLM_VERSION
from support.needed import need
from support.wheels import write_wheel


def test_a_wheelhouse_that_cannot_take_it(toolchain, build, tmp_path):
    toolchain(HERE)
    house = tmp_path / "house"
    write_wheel(house, VERSION)
    assert (
        "cannot be added"
        in build("--src", SMALL, "--cpu", HERE, "--dir", house, rc=2).stderr
    )
    assert not (tmp_path / "work").exists()


SRC = ["--src", SMALL_VLLM, "--cpu", HERE]
ARCHIVE = ["--src", "ARCHIVE", "--cpu", HERE]
of_vllm = pytest.mark.parametrize("project", ["vllm"])
NCCL = [
    ([*ARCHIVE, "--sha256", "0" * 64], 8, f"not {'0' * 64}"),
    (ARCHIVE, 3, "if you trust this very file, add --sha256 "),
    (
        ["--src", SMALL.parent, "--cpu", HERE],
        3,
        "not a source tree of NCCL: makefiles/version.mk is missing",
    ),
    (
        ["--src", SMALL, "--version", VERSION],
        2,
        "--version and --src exclude each other",
    ),
    (["--version", "2.28.3"], 3, "sticky CUDA error"),
]
VLLM = [
    (
        [*SRC, "--without", "x"],
        2,
        "no source or extension is called 'x'\n  next: there are: ",
    ),
    ([*SRC, "--without", "cutlass"], 2, "vLLM cannot be built without it"),
    ([*SRC, "--source", "cutlass=y"], 2, f"vLLM {VLLM_VERSION} does not fetch it"),
    (
        [*SRC, "--extensions", "_C"],
        2,
        "no extension '_C'\n  next: there are other_C, small_C",
    ),
    (["--version", "0.10.0"], 3, "vllm 0.10.0 is not supported"),
    (["--src", SMALL], 3, "not a source tree of vLLM"),
]


@pytest.fixture
def nothing(tmp_path):
    """The variables of a machine where nothing can be fetched."""
    return {
        "PATCHKIT_CACHE_DIR": str(tmp_path / "cache"),
        "PIP_INDEX_URL": "http://127.0.0.1:9",
    }


@pytest.mark.parametrize(
    ("project", "arguments", "rc", "says"),
    [*(("nccl", *row) for row in NCCL), *(("vllm", *row) for row in VLLM)],
)
def test_refusals(build, nothing, tmp_path, arguments, rc, says):
    need("make", "g++")  # what lacks is said first
    archive = shutil.make_archive(
        str(tmp_path / "nccl"), "gztar", SMALL.parent, SMALL.name
    )
    given = [archive if each == "ARCHIVE" else each for each in arguments]
    said = build(*given, "--dir", tmp_path / "house", rc=rc, env=nothing)
    assert says in said.stderr
    assert said.stdout == ""
    assert not [
        name for name in ("work", "house", "cache/cuda") if (tmp_path / name).exists()
    ]


def test_the_version_that_nobody_named_is_told(build, nothing, tmp_path):
    """And why that one, before anything else is."""
    need("make", "g++")
    said = build(
        "--offline", "--cpu", HERE, "--dir", tmp_path / "house", rc=3, env=nothing
    ).stderr
    default = load_facts("nccl").default
    assert said.startswith(
        f"NCCL {default}: the recipe's default: no torch or vLLM wheel"
    )
    assert f"no sources of NCCL {default} could be had" in said


@of_vllm
def test_a_tree_that_cannot_do_without(build, nothing, sources, tmp_path):
    root, house = sources("PKG-INFO", "0.27.99", "0.13.9"), tmp_path / "house"
    given = ("--src", root, "--without", "flash-attn", "--dir", house)
    assert (
        "vLLM 0.13.9 cannot run without it" in build(*given, rc=2, env=nothing).stderr
    )


def test_a_plan_says_all_that_is_missing_and_begins_nothing(cli, nothing, tmp_path):
    (tmp_path / "empty").mkdir()
    nowhere = {**nothing, "PATH": str(tmp_path / "empty")}
    house = ("--dir", tmp_path / "house", "--dry-run")
    (tmp_path / "lock.txt").touch()
    vllm = ("build", "vllm", *SRC, "--requirements", tmp_path / "lock.txt", *house)
    nccl = ("build", "nccl", "--src", SMALL, "--cpu", HERE, *house)
    for words, title in (
        (vllm, f"vLLM {VLLM_VERSION}, with "),
        (nccl, f"{SMALL}, with "),
    ):
        done = cli(*words, env=nowhere, rc=9)
        assert title in done.stdout
        shown = re.sub(r"(\n  why: .*)?\n  next:  ", ": ", done.stdout)
        assert "✗ g++ is not on this machine: apt install g++\n" in shown
        for name in ("bash", "make", "python3"):
            assert f"✗ {name} is not on this machine: apt install {name}\n" in shown
        data = json.loads(cli(*words, "--json", env=nowhere, rc=9).stdout)
        assert len(data["missing"]) == shown.count("✗ ")
    assert not (tmp_path / "house").exists()
    assert not (tmp_path / "work").exists()
    assert not (tmp_path / "cache/cuda").exists()
