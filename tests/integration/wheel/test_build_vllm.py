"""`patchkit build vllm`, from a small stand-in of vLLM and of torch to a wheel.

The stand-in in tests/data/vllm_small brings a build backend of its own: real g++, no CMake. Real
releases are configured and in part compiled by `nox -s build-proof`.
"""

from __future__ import annotations

import json
import re
import signal
import zipfile

import pytest

from patchkit.wheel.build.full_toolkit import HEADERS, LIBRARIES
from patchkit.wheel.file.sbom import vllm_sbom
from patchkit.wheel.wheelhouse.verify import check_files
from support.building import (
    HERE,
    SMALL_VLLM,
    TORCH,
    VLLM_VERSION,
    gone_on_with,
    interrupted,
    python_with,
    wheels,
)
from support.comparing import first_member

BESIDE = [*(f"lib/lib{name}.so.13" for name in LIBRARIES), *(f"include/{name}" for name in HEADERS)]
ROOT = f"vllm-{VLLM_VERSION}-h200-{HERE}-reduced"


@pytest.fixture(scope="module")
def project():
    return "vllm"


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return python_with(tmp_path_factory.mktemp("python") / "venv", libraries=BESIDE)


@pytest.fixture
def arguments(toolchain, python, tmp_path):
    """A build for an H200, whose fixes do not need the files of a real release."""

    def make(*, sources=SMALL_VLLM, python=python, house=tmp_path / "house"):
        toolkit = toolchain(HERE).nvcc.parents[1]
        what = ["--src", sources, "--target", "h200", "--extensions", "small_C", "--jobs", 1]
        return [*what, "--python", python, "--cuda", toolkit, "--dir", house]

    return make


def test_from_sources_to_a_wheel(build, arguments, tmp_path):
    said = build(*arguments(), "--json")
    made = json.loads(said.stdout)
    facts = made["facts"]
    (wheel,) = wheels(tmp_path / "house")
    assert made["wheel"] == str(wheel)
    assert made["proofs"] == ["1 kernel groups are compiled for the archs that were proved"]
    assert wheel.name.startswith(f"vllm-{VLLM_VERSION}+cu130.h200.reduced.")
    assert facts["environment"]["torch"] == f"{TORCH}+cu130, CUDA 13.0"
    assert facts["tools"] == {"cmake": "1.0", "ninja": "1.0"}
    (network,) = made["circumstances"]
    assert "cut off from the network" in network
    assert "network" not in facts

    # What the backend warns of is in the log, and nowhere else.
    log = (tmp_path / "work" / ROOT / "log.txt").read_text()
    assert re.search(r"backend/small\.py:\d+: a word of the backend", log)
    assert network in log
    assert "a word of the backend" not in said.stderr

    home = f"vllm-{facts['wheel']}.dist-info"
    with zipfile.ZipFile(wheel) as bundle:
        assert json.loads(bundle.read(f"{home}/patchkit.json")) == facts
        sbom = json.loads(bundle.read(f"{home}/sboms/patchkit.cdx.json"))
    assert sbom == vllm_sbom(facts, ())
    assert check_files(tmp_path / "house") == ()

    foreign = {"TZ": "Asia/Tokyo", "CXXFLAGS": "-O0", "LDFLAGS": "-Wl,--no-such-option"}
    build(*arguments(house=tmp_path / "again"), "--fresh", env=foreign, umask=0o077)
    assert first_member(wheel, wheels(tmp_path / "again")[0]) == ""


# Accidents


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("sent", "everything"),
    [(signal.SIGKILL, True), (signal.SIGTERM, False)],
    ids=["all killed", "patchkit alone"],
)
def test_interrupted(run, arguments, sources, tmp_path, sent, everything):
    slow = sources(
        "backend/small.py", "        compile_step(", "        time.sleep(1)\n        compile_step("
    )
    backend = slow / "backend/small.py"
    backend.write_text(backend.read_text().replace("import sys\n", "import sys\nimport time\n"))
    work, house = tmp_path / "work", tmp_path / "house"

    def start():
        return run(work, *arguments(sources=slow))

    interrupted(start, work / ROOT / "log.txt", "[2/3]", sent, everything=everything)
    assert wheels(house) == []
    compiled = work / ROOT / "source/build/temp/small.1.o"
    before = compiled.stat().st_mtime_ns
    gone_on_with(start)
    assert compiled.stat().st_mtime_ns == before  # gone on with, not begun anew
    assert check_files(house) == ()
    assert len(wheels(house)) == 1


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("path", "before", "after", "rc", "says"),
    [
        ("csrc/small.cpp", "42", "where_is_it", 10, "error: 'where_is_it' was not declared"),
        (
            "backend/small.py",
            "return packed(",
            "return os.path.join(",
            10,
            "holds 0 wheels instead of one",
        ),
        (
            "backend/small.py",
            "other_C.dir",
            "small_C.dir",
            5,
            "lacks 1 of 1 fat binaries with sm_90a",
        ),
        (
            "backend/small.py",
            "code=sm_90a",
            "code=sm_90",
            5,
            "is compiled for sm_90, and CMakeLists",
        ),
    ],
    ids=["does not compile", "leaves no wheel", "is not linked", "has another arch"],
)
def test_a_build_that_fails(build, arguments, sources, tmp_path, path, before, after, rc, says):
    said = build(*arguments(sources=sources(path, before, after)), rc=rc).stderr
    assert says in said
    assert wheels(tmp_path / "house") == []
