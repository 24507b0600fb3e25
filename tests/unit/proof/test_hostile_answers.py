"""Treat what a sandboxed child answers (Python, CMake, make) as data: it fits, or fails."""

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patchkit.errors import ProofError, SourceError, StorageError
from patchkit.proof.cmake import mirror, read_trace
from patchkit.proof.questions import ask
from patchkit.proof.sandbox import missing
from patchkit.recipes.nccl.build_files import COMMON_MK, make_flags
from patchkit.recipes.vllm.archs import ROOT_FILE, evaluate
from patchkit.target import targets
from support.needed import need

pytestmark = pytest.mark.skipif(missing() != "", reason=f"no sandbox here: {missing()}")
GB10 = targets()["gb10"]
GROUP = 'set(ARCHS 12.0)\nset_gencode_flags_for_srcs(SRCS a.cu CUDA_ARCHS "${ARCHS}")\n'
NUMBER = "9" * 5000


@pytest.mark.parametrize(
    "line",
    [
        *(f"{GROUP}patchkit_code({x})" for x in ("", "sm_", "lto_90", f"sm_{NUMBER}")),
        "set(X 1)\ncuda_archs_loose_intersection(X)\npatchkit_archs(X many)",
    ],
)
def test_calls_in_no_known_form_fail_the_proof(line, make_tree):
    external = "cmake/external_projects/x.cmake"
    names = ("set_gencode_flags_for_srcs", "cuda_archs_loose_intersection")
    defined = "".join(f"function({name})\nendfunction()\n" for name in names)
    texts = {
        ROOT_FILE: f"{defined}include({external})\n{line}\n",
        external: f"{line}\n",
    }
    hostile = make_tree("0.25.1", {**texts, "setup.py": ""})
    with pytest.raises(ProofError, match="here in a form that patchkit cannot read"):
        evaluate(hostile, GB10, GB10.native, GB10.cuda)


ENTRY = {
    "args": ["a", "b"],
    "cmd": "set",
    "file": "/t/CMakeLists.txt",
    "line": 1,
    "frame": 1,
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
few = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    max_examples=40,
    deadline=None,
)


@few
@given(key=st.sampled_from(sorted(ENTRY)), value=JSON, cut=st.integers(0, 200))
def test_a_damaged_trace_is_read_or_fails_the_proof(key, value, cut, tmp_path):
    log = tmp_path / "trace"
    lines = ["{}", json.dumps(ENTRY), json.dumps({**ENTRY, key: value})[:cut]]
    log.write_text("\n".join(lines), encoding="utf-8", errors="replace")
    try:
        calls = list(read_trace(log, ["set"], tmp_path))
    except ProofError:
        return
    assert calls[0].arguments == ("a", "b")


# Answers of Python


@few
@given(key=st.sampled_from(("answers", "raised", "read")), value=JSON)
def test_a_forged_answer_fits_or_fails_the_proof(key, value, make_tree):
    made = make_tree("0.25.1", {"a.py": ""})
    said = {"answers": [["x"]], "raised": None, "read": []}
    text = json.dumps({**said, key: value})

    def forge():
        os.write(1, text.encode(errors="surrogatepass"))
        os._exit(0)

    try:
        (names,) = ask(made, [forge], list[str])
    except (ProofError, SourceError):
        return
    assert all(isinstance(name, str) for name in names)


# Flags of make, and targets of NCCL


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('NVCUFLAGS := -O3 "open', "No closing quotation"),
        ("$(info patchkit -O3)", "it says 2 times what nvcc is given"),
        ("$(error no)", "exit code 2"),
        ("X := $(shell uname -m)", "it starts a program"),
    ],
)
def test_flags_in_no_known_form_fail_the_proof(line, said, make_tree):
    need("make")
    with pytest.raises(ProofError, match=said):
        make_flags(make_tree("0.25.1", {COMMON_MK: f"{line}\n"}), "13.0")


def test_a_warning_is_no_obstacle(make_tree):
    need("make")
    text = "$(warning old)\nNVCUFLAGS := -O3\n"
    assert make_flags(make_tree("0.25.1", {COMMON_MK: text}), "13.0") == ("-O3",)


def test_a_full_disk_is_told_with_the_file(make_tree, tmp_path):
    tree = make_tree("0.25.1", {ROOT_FILE: "x\n", "setup.py": ""})
    root = tmp_path / "root"
    root.mkdir()
    (root / ROOT_FILE).symlink_to("/dev/full")
    with pytest.raises(StorageError, match=f"{ROOT_FILE}: No space left on device"):
        mirror(tree, {ROOT_FILE: "x\n"}, root)
