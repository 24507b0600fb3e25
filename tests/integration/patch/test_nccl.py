"""NCCL as Debian has it, patched, looked at and put back; older releases made from it."""

import json
import re
import subprocess

import pytest

from patchkit.apply import apply, revert
from patchkit.errors import DriftError
from patchkit.patching.recipe import load_recipe
from patchkit.recipes.nccl.build_files import COMMON_MK, ROOT_FILE
from support import write_files
from support.needed import need

RECIPE = load_recipe("nccl")
STATES = {"make_archs": "applied", "make_cuda13": "upstream", "cmake_archs": "applied"}


def states(outcome):
    return {verdict.fix.id: verdict.state.value for verdict in outcome.verdicts}


@pytest.fixture
def edit(rewrite):
    """Replace one text of a tree's file: ``edit(root, path, before, after)``."""

    def change(root, path, before, after):
        text = (root / path).read_text()
        assert text.count(before) == 1, (path, before)
        rewrite(root / path, text.replace(before, after))

    return change


# Apply and back


@pytest.mark.parametrize(
    ("target", "arch", "number"), [("gb10", "native", "121"), ("thor", "family", "110")]
)
def test_apply_and_revert(nccl, ask, snapshot, target, arch, number):
    need("make")
    root = nccl()
    before = snapshot(root)
    request = ask(arch, target=target)

    done = apply(root, RECIPE, request)

    assert states(done) == STATES
    assert done.written == (ROOT_FILE, COMMON_MK)
    gencode = f"-gencode=arch=compute_{number},code=sm_{number}"
    make, archs = done.proofs
    assert make == f"make gives nvcc {gencode}, where it gave 7 others"
    assert archs == f"CMake builds {number}-real, where it built 75"
    patched = snapshot(root)
    again = apply(root, RECIPE, request)
    assert (again.written, states(again)) == ((), STATES)
    assert snapshot(root) == patched

    assert set(revert(root, "nccl")) == set(done.written)
    assert snapshot(root) == before


# What the build would be told


def test_the_whole_makefile_hands_the_arch_on(nccl, ask, tmp_path):
    """Not our own three lines of a makefile: NCCL's, down to the command for a device file."""
    need("make")
    root = nccl()
    apply(root, RECIPE, ask())
    said = "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n"
    nvcc = write_files(tmp_path, {"nvcc": said}, mode=0o755) / "nvcc"

    def given(*arguments):
        command = [
            "make",
            "-n",
            "-C",
            root / "src/device",
            f"NVCC={nvcc}",
            f"CUDA_HOME={tmp_path}",
        ]
        done = subprocess.run(
            [*command, f"BUILDDIR={tmp_path}/build", "VERBOSE=1", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        found = re.findall(r"-gencode=[\w=,]+", done.stdout)
        assert found, done.stdout + done.stderr
        return set(found)

    ours = "-gencode=arch=compute_121,code=sm_121"
    # Four small kernels for NVLS are compiled for sm_100f whatever the variable says.
    always = {"-gencode=arch=compute_100f,code=sm_100f"}
    assert given() - always == {ours}
    assert given("NVCC_GENCODE=-gencode=arch=compute_90,code=sm_90") - always == {
        "-gencode=arch=compute_90,code=sm_90"
    }


# Code that is not as expected


@pytest.mark.parametrize(
    ("path", "before", "after", "drifts"),
    [
        (
            COMMON_MK,
            "# of archs to reduce",
            "# of architectures to reduce",
            "make_archs",
        ),
        (ROOT_FILE, "LANGUAGES CUDA CXX C)", "LANGUAGES CXX C)", "cmake_archs"),
    ],
)
def test_altered_anchors_are_drift(
    nccl, edit, ask, snapshot, cli, path, before, after, drifts
):
    root = nccl()
    edit(root, path, before, after)
    altered = snapshot(root)
    with pytest.raises(DriftError, match=drifts):
        apply(root, RECIPE, ask())
    assert snapshot(root) == altered
    shown = json.loads(cli("fixes", "--nccl-src", root, "--json", rc=4).stdout)
    assert [fix["id"] for fix in shown["fixes"] if fix["state"] == "drifted"] == [
        drifts
    ]


# The command line


@pytest.mark.usefixtures("nccl_release")
def test_what_is_said_of_a_release(cli):
    need("make")
    shown = json.loads(cli("apply", "--nccl-src", "nccl==2.29.7", "--json").stdout)
    assert {fix["id"]: fix["state"] for fix in shown["fixes"]} == STATES
    assert shown["nvcc_gencode"] == "-gencode=arch=compute_121,code=sm_121"
    assert any("Message truncated" in bug["says"] for bug in shown["known_bugs"])
