"""What `patchkit build nccl` refuses before anything is compiled or fetched."""

from __future__ import annotations

import shutil

import pytest

from patchkit.source.releases import load_facts
from support.building import HERE, SMALL, VERSION
from support.needed import need
from support.wheels import write_wheel


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        ({"version": VERSION}, ("cannot be added", "ResolutionImpossible")),
        (
            {"version": "2.11.0", "project": "torch", "requires": ["nvidia-nccl-cu13==2.27.5"]},
            (
                f"its wheels are for NCCL 2.27.5, and {VERSION} is to be built",
                f"nvidia-nccl-cu13=={VERSION};",
            ),
        ),
    ],
)
def test_a_wheelhouse_that_cannot_take_it(toolchain, build, tmp_path, beside, words):
    toolchain(HERE)
    house = tmp_path / "house"
    write_wheel(house, **beside)
    said = build("--src", SMALL, "--cpu", HERE, "--dir", house, rc=2).stderr
    assert not [each for each in words if each not in said], said
    assert not (tmp_path / "work").exists()


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    home = tmp_path_factory.mktemp("archive")
    return shutil.make_archive(str(home / "nccl"), "gztar", SMALL.parent, SMALL.name)


@pytest.mark.parametrize(
    ("arguments", "rc", "says"),
    [
        (["--src", "ARCHIVE", "--sha256", "0" * 64], 8, f"not {'0' * 64}"),
        (["--src", "ARCHIVE"], 3, "if you trust this very file, add --sha256 "),
        (["--src", SMALL.parent], 3, "not a source tree of NCCL: makefiles/version.mk is missing"),
        (["--src", SMALL, "--version", VERSION], 2, "--version and --src exclude each other"),
        (["--version", "2.28.3"], 3, "sticky CUDA error"),
        (["--src", SMALL, "--target", "gb300"], 2, "gb300"),
        (["--src", SMALL, "--jobs", "0"], 2, "--jobs"),
    ],
)
def test_refusals(build, archive, tmp_path, arguments, rc, says):
    need("make", "g++")  # what lacks is said first
    given = [archive if each == "ARCHIVE" else each for each in arguments]
    # Without a cache and a network: nothing may be fetched for what is refused.
    nothing = {"PATCHKIT_CACHE_DIR": str(tmp_path / "cache"), "PIP_INDEX_URL": "http://127.0.0.1:9"}
    assert says in build(*given, "--dir", tmp_path / "house", rc=rc, env=nothing).stderr
    assert not (tmp_path / "work").exists()
    assert not (tmp_path / "house").exists()
    assert not (tmp_path / "cache/cuda").exists()


def test_the_version_that_nobody_named_is_told(build, tmp_path):
    """And why that one, before anything else is."""
    need("make", "g++")
    nothing = {"PATCHKIT_CACHE_DIR": str(tmp_path / "cache")}
    words = ("--offline", "--cpu", HERE, "--dir", tmp_path / "house")
    said = build(*words, rc=3, env=nothing).stderr
    default = load_facts().default
    assert said.startswith(f"NCCL {default}: the recipe's default: no torch or vLLM wheel")
    assert f"no sources of NCCL {default} could be had" in said
