"""The SBOMs of a libnccl and of a vLLM wheel, whole; a version that is a digest of facts."""

import hashlib
import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from patchkit.patching.fix import State, Verdict
from patchkit.patching.recipe import load_recipe
from patchkit.wheel.file.sbom import as_text, compiled_sbom, digest_label, wheel_sbom

GOLDEN = Path(__file__).parents[3] / "data" / "sboms.json"

FACTS = {
    "project": "nccl",
    "version": "2.29.7",
    "wheel": "2.29.7+gb10.0a1b2c3d4e",
    "patchkit": "0.1.0",
    "source": "sha256:1111",
    "tree": "sha256:2222",
    "fixes": ["make_archs: applied", "make_cuda13: upstream"],
    "cuda": "13.0.88",
    "compiler": "g++ 12.2.0",
    "license": {
        "nccl": "Apache-2.0 AND BSD-3-Clause",
        "cuda": "NVIDIA CUDA Toolkit EULA",
    },
}
VLLM_FACTS = {
    "project": "vllm",
    "version": "0.19.1",
    "wheel": "0.19.1+cu130.gb10.0a1b2c3d4e",
    "made": "repack",
    "patchkit": "0.1.0",
    "source": f"sha256:{'ab' * 32}",
    "source_file": "vllm-0.19.1-cp38-abi3-manylinux_2_31_aarch64.whl",
    "fixes": ["marlin_w4a8_fp8: applied"],
    "target": "gb10",
    "license": {"vllm": "Apache-2.0"},
}
BUILT_FACTS = {
    **VLLM_FACTS,
    "made": "build",
    "source": "git:0123456",
    "fixes": [],
    "cuda": "13.0.88",
    "compiler": "g++ 12.2.0",
    "tools": {"cmake": "4.4.4", "ninja": "1.13.2"},
    "environment": {"python": "3.12", "torch": "2.11.0+cu130, CUDA 13.0"},
    "externals": {
        "cutlass": "flashinfer-python==0.6.8.post1, sha256:12; holds 4.4.2",
        "flashmla": f"https://github.com/vllm-project/FlashMLA@{'a6' * 20}",
        "flash-attn": "vllm==0.19.1, sha256:34; as upstream compiled it: _vllm_fa2_C (compute_80)",
    },
    "license": {
        "vllm": "Apache-2.0",
        "cuda": "NVIDIA CUDA Toolkit EULA",
    },
}


def test_the_whole_documents():
    """These very documents are valid by the JSON schema of CycloneDX 1.6."""
    golden = json.loads(GOLDEN.read_text())
    fix = load_recipe("vllm").fix("marlin_w4a8_fp8")
    verdict = Verdict(fix, State.APPLY, "")
    steps = [(verdict, {"vllm/a.py": ("old\n", "new\n")})]
    assert compiled_sbom(FACTS) == golden["nccl"]
    assert wheel_sbom(VLLM_FACTS, steps) == golden["repacked"]
    assert wheel_sbom(BUILT_FACTS, ()) == golden["built"]


JSON = st.dictionaries(
    st.text(), st.one_of(st.text(), st.integers(), st.lists(st.text()))
)


@given(JSON)
def test_a_label_is_kept_by_pip(facts):
    label = digest_label(as_text(facts))
    assert str(Version(f"1.0+gb10.{label}")) == f"1.0+gb10.{label}"
    assert label == digest_label(as_text(dict(reversed(facts.items()))))


def test_a_label_of_digits_alone_begins_with_a_letter():
    texts = (str(number) for number in range(10**6))
    digests = ((t, hashlib.sha256(t.encode()).hexdigest()[:10]) for t in texts)
    text, digits = next((t, d) for t, d in digests if d.isdigit())
    assert digest_label(text) == f"a{digits[1:]}"
