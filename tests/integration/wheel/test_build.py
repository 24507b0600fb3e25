"""`patchkit build nccl`, from a small stand-in of NCCL to a wheel that pip installs.

The stand-in in tests/data/nccl_small is built by real make, nvcc and g++, with the work folder in a
temporary one. NCCL itself takes half an hour: `nox -s repro -- nccl`.
"""

import json
import os
import shutil
import signal
import time
import zipfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import patchkit
from patchkit.wheel.wheelhouse.storage import load_manifest
from patchkit.wheel.wheelhouse.verify import check_files
from support import run_program
from support.building import HERE, PATCHKIT, QUIET, SMALL, VERSION, wheels
from support.comparing import first_member, object_digests
from support.wheels import OTHER_CPU

ROOT = f"nccl-{VERSION}-gb10-{{}}"
LIBRARY = "nvidia/nccl/lib/libnccl.so.2"


@pytest.fixture(scope="module")
def built(toolchain, tmp_path_factory):
    """An undisturbed build for a CPU, made once: ``built("x86_64")``."""
    known = {}

    def make(machine):
        toolchain(machine)
        if machine not in known:
            home = tmp_path_factory.mktemp(machine)
            work, house = home / "work", home / "house"
            arguments = ["--src", SMALL, "--cpu", machine, "--dir", house]
            env = {
                **os.environ,
                "PYTHONPATH": str(Path(patchkit.__file__).parents[1]),
                **QUIET,
            }
            done = run_program(
                *PATCHKIT, work, "build", "nccl", *arguments, "--json", env=env
            )
            work.rename(home / "aside")
            known[machine] = SimpleNamespace(
                work=work,
                aside=home / "aside",
                house=house,
                shown=json.loads(done.stdout),
                arguments=arguments[:4],
                wheel=next(house.glob("*.whl")),
                objects=object_digests(home / "aside" / ROOT.format(machine) / "build"),
            )
        return known[machine]

    return make


@pytest.fixture
def work(built):
    """Where the undisturbed build took place, free again: what comes of it depends on the path."""
    place = built(HERE).work
    yield place
    shutil.rmtree(place, ignore_errors=True)


def assert_same(built, house):
    """The one wheel there is, byte for byte, that of the undisturbed build."""
    assert check_files(house) == ()
    (wheel,) = wheels(house)
    assert first_member(built.wheel, wheel) == ""


# The whole way


@pytest.mark.parametrize(
    "machine", [HERE, pytest.param(OTHER_CPU, marks=pytest.mark.e2e)]
)
def test_from_sources_to_a_wheel(built, cli, machine):
    made = built(machine)
    facts, digest = made.shown["facts"], made.shown["facts"]["wheel"].rpartition(".")[2]
    stem = f"nvidia_nccl_cu13-{VERSION}+gb10.{digest}"
    assert made.wheel.name.startswith(f"{stem}-py3-none-manylinux_2_")
    assert made.wheel.name.endswith(f"_{machine}.whl")
    assert made.shown["wheel"] == str(made.wheel)
    log = Path(made.shown["log"]).relative_to(made.work)
    assert "Compiling  max.cu" in (made.aside / log).read_text()
    assert facts["source"].startswith("tree:sha256:")
    assert facts["fixes"][:2] == ["make_archs: applied", "make_cuda13: upstream"]
    assert facts["gencode"] == "-gencode=arch=compute_121,code=sm_121"
    assert (facts["machine"], facts["target"], facts["functions"]) == (
        machine,
        "gb10",
        "all",
    )

    assert check_files(made.house) == ()
    (entry,) = load_manifest(made.house).wheels
    assert entry.facts == facts
    home = f"nvidia_nccl_cu13-{facts['wheel']}.dist-info"
    with zipfile.ZipFile(made.wheel) as bundle:
        assert bundle.namelist() == [
            "nvidia/nccl/include/nccl.h",
            LIBRARY,
            f"{home}/METADATA",
            f"{home}/WHEEL",
            f"{home}/licenses/LICENSE.txt",
            f"{home}/patchkit.json",
            f"{home}/RECORD",
        ]
        assert json.loads(bundle.read(f"{home}/patchkit.json")) == facts
        metadata = bundle.read(f"{home}/METADATA").decode()
    assert f"Version: {facts['wheel']}\n" in metadata
    assert (
        "License-Expression: Apache-2.0 AND BSD-3-Clause AND LicenseRef-NVIDIA-"
        in metadata
    )

    assert '"sm_121"' in cli("inspect", made.wheel, "--target", "gb10", "--json").stdout
    assert {"obj/device/max.o", "obj/init.o"} < {*made.objects}


# Accidents


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("sent", "everything"),
    [(signal.SIGKILL, True), (signal.SIGINT, True), (signal.SIGTERM, False)],
    ids=["all killed", "Ctrl-C", "patchkit alone"],
)
def test_interrupted(built, run, work, tmp_path, sent, everything):
    made, house, root = built(HERE), tmp_path / "house", work / ROOT.format(HERE)
    start = partial(run, work, *made.arguments, "--dir", house, "--jobs", 1)
    process, log = start(), root / "log.txt"
    deadline = time.monotonic() + 120
    while not (log.exists() and "Compiling  max.cu" in log.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (os.killpg if everything else os.kill)(process.pid, sent)
    assert "Traceback" not in process.communicate()[1]
    assert process.returncode
    assert wheels(house) == []
    compiled = root / "build/obj/device/sum.o"
    before = compiled.stat().st_mtime_ns
    for _ in range(60):
        process = start()
        said = process.communicate()[1]
        if (
            process.returncode != 6
        ):  # what patchkit started holds the folder until it ends
            break
        time.sleep(0.5)
    assert process.returncode == 0, said
    assert compiled.stat().st_mtime_ns == before  # gone on with, not begun anew
    assert_same(made, house)


# What does not compile, or is not what was promised


@pytest.mark.parametrize(
    ("path", "before", "after", "rc", "says"),
    [
        pytest.param(
            *("src/device/generate.sh", "+= atomicAdd(", "+= atomic_add(", 10),
            [
                'error: identifier "atomic_add" is undefined',
                "run again to go on from here",
            ],
            marks=pytest.mark.e2e,
        ),
        # The flags are right where fixes look, and others where they are used.
        (
            *(
                "src/Makefile",
                ".SILENT:",
                "NVCUFLAGS := $(subst 121,120,$(NVCUFLAGS))",
                5,
            ),
            [
                "is not exact for NVIDIA DGX Spark (GB10): 0 live entries are sm_121, 1 are not"
            ],
        ),
        # The same in the fixes' own file is not even compiled.
        (
            *(
                "makefiles/common.mk",
                "-ccbin $(CXX) $(NVCC_GENCODE)",
                "-ccbin $(CXX) -arch=a",
                5,
            ),
            ["make would give nvcc no -gencode"],
        ),
    ],
)
def test_a_build_that_fails(
    toolchain, build, sources, tmp_path, path, before, after, rc, says
):
    toolchain(HERE)
    arguments = [
        "--src",
        sources(path, before, after),
        "--cpu",
        HERE,
        "--dir",
        tmp_path / "house",
    ]
    said = build(*arguments, rc=rc).stderr
    assert not [text for text in says if text not in said]
    assert wheels(tmp_path / "house") == []
