"""The SBOMs of a libnccl and of a vLLM wheel, whole."""

from __future__ import annotations

import copy

from patchkit.patching.fix import State, Verdict
from patchkit.patching.recipe import load_recipe
from patchkit.wheel.file.sbom import nccl_sbom, patches, vllm_sbom

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
    "license": {"nccl": "Apache-2.0 AND BSD-3-Clause", "cuda": "NVIDIA CUDA Toolkit EULA"},
}
WHEEL = "pkg:pypi/nvidia-nccl-cu13@2.29.7%2Bgb10.0a1b2c3d4e"
SOURCE = "pkg:github/nvidia/nccl@2.29.7"
RUNTIME = "pkg:generic/nvidia-cuda-runtime@13.0.88"


def test_the_whole_document():
    """This very document is valid by the JSON schema of CycloneDX 1.6."""
    assert nccl_sbom(FACTS) == {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "bom-ref": WHEEL,
                "type": "library",
                "name": "nvidia-nccl-cu13",
                "version": "2.29.7+gb10.0a1b2c3d4e",
                "purl": WHEEL,
            },
            "tools": {
                "components": [
                    {"type": "application", "name": "patchkit", "version": "0.1.0"},
                    {"type": "application", "name": "nvcc", "version": "13.0.88"},
                    {"type": "application", "name": "g++", "version": "g++ 12.2.0"},
                ]
            },
        },
        "components": [
            {
                "bom-ref": SOURCE,
                "type": "library",
                "name": "NCCL",
                "version": "2.29.7",
                "purl": SOURCE,
                "licenses": [{"expression": "Apache-2.0 AND BSD-3-Clause"}],
                "properties": [
                    {"name": "patchkit:source", "value": "sha256:1111"},
                    {"name": "patchkit:tree", "value": "sha256:2222"},
                    {"name": "patchkit:fix", "value": "make_archs: applied"},
                    {"name": "patchkit:fix", "value": "make_cuda13: upstream"},
                ],
            },
            {
                "bom-ref": RUNTIME,
                "type": "library",
                "name": "CUDA runtime (libcudart_static.a)",
                "version": "13.0.88",
                "purl": RUNTIME,
                "licenses": [{"license": {"name": "NVIDIA CUDA Toolkit EULA"}}],
            },
        ],
        "dependencies": [
            {"ref": WHEEL, "dependsOn": [SOURCE, RUNTIME]},
            {"ref": SOURCE},
            {"ref": RUNTIME},
        ],
    }


def test_it_is_a_function_of_the_facts_alone():
    facts = copy.deepcopy(FACTS)
    assert nccl_sbom(facts) == nccl_sbom(FACTS)
    assert facts == FACTS


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
VLLM = "pkg:pypi/vllm@0.19.1%2Bcu130.gb10.0a1b2c3d4e"


def test_the_whole_document_of_a_vllm_wheel():
    """This very document is valid by the JSON schema of CycloneDX 1.6."""
    fix = load_recipe().fix("marlin_w4a8_fp8")
    verdict = Verdict(fix, State.APPLY, "")
    applied = patches([(verdict, {"vllm/a.py": ("old\n", "new\n")})])
    assert vllm_sbom(VLLM_FACTS, applied) == {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "bom-ref": VLLM,
                "type": "library",
                "name": "vllm",
                "version": "0.19.1+cu130.gb10.0a1b2c3d4e",
                "purl": VLLM,
                "licenses": [{"expression": "Apache-2.0"}],
                "pedigree": {
                    "ancestors": [
                        {
                            "type": "library",
                            "name": "vllm",
                            "version": "0.19.1",
                            "purl": "pkg:pypi/vllm@0.19.1?file_name="
                            "vllm-0.19.1-cp38-abi3-manylinux_2_31_aarch64.whl",
                            "hashes": [{"alg": "SHA-256", "content": "ab" * 32}],
                        }
                    ],
                    "patches": [
                        {
                            "type": "unofficial",
                            "diff": {
                                "text": {
                                    "contentType": "text/x-diff",
                                    "content": "diff --git a/vllm/a.py b/vllm/a.py\n"
                                    "--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1 +1 @@\n-old\n+new\n",
                                }
                            },
                            "resolves": [
                                {
                                    "type": "defect",
                                    "id": "marlin_w4a8_fp8",
                                    "name": fix.title,
                                    "description": fix.symptom,
                                }
                            ],
                        }
                    ],
                },
                "properties": [
                    {"name": "patchkit:made", "value": "repack"},
                    {"name": "patchkit:target", "value": "gb10"},
                    {"name": "patchkit:fix", "value": "marlin_w4a8_fp8: applied"},
                ],
            },
            "tools": {
                "components": [{"type": "application", "name": "patchkit", "version": "0.1.0"}]
            },
        },
    }


def test_a_commit_is_an_ancestor_without_a_hash():
    built = {**VLLM_FACTS, "source": "git:0123456"}
    del built["source_file"]
    (ancestor,) = vllm_sbom(built, ())["metadata"]["component"]["pedigree"]["ancestors"]
    assert ancestor == {
        "type": "library",
        "name": "vllm",
        "version": "0.19.1",
        "purl": "pkg:pypi/vllm@0.19.1",
    }


BUILT_FACTS = {
    **VLLM_FACTS,
    "made": "build",
    "source": "sha256:" + "cd" * 32,
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
        "cutlass": "BSD-3-Clause",
    },
}
TORCH = "pkg:pypi/torch@2.11.0%2Bcu130"
CUDA = "pkg:generic/cuda-toolkit@13.0.88"
FLASHMLA = f"pkg:github/vllm-project/flashmla@{'a6' * 20}"


def test_what_a_build_adds():
    """With what was compiled in and against; valid by the JSON schema of CycloneDX 1.6, too."""
    built = vllm_sbom(BUILT_FACTS, ())
    assert built["components"] == [
        {
            "bom-ref": "patchkit:cutlass",
            "type": "library",
            "name": "cutlass",
            "licenses": [{"expression": "BSD-3-Clause"}],
            "properties": [
                {"name": "patchkit:role", "value": "compiled in"},
                {"name": "patchkit:source", "value": BUILT_FACTS["externals"]["cutlass"]},
            ],
        },
        {
            "bom-ref": FLASHMLA,
            "type": "library",
            "name": "flashmla",
            "version": "a6" * 20,
            "purl": FLASHMLA,
            "properties": [
                {"name": "patchkit:role", "value": "compiled in"},
                {"name": "patchkit:source", "value": BUILT_FACTS["externals"]["flashmla"]},
            ],
        },
        {
            "bom-ref": "patchkit:flash-attn",
            "type": "library",
            "name": "flash-attn",
            "properties": [
                {"name": "patchkit:role", "value": "taken from upstream's wheel"},
                {"name": "patchkit:source", "value": BUILT_FACTS["externals"]["flash-attn"]},
            ],
        },
        {
            "bom-ref": TORCH,
            "type": "library",
            "name": "torch",
            "version": "2.11.0+cu130",
            "purl": TORCH,
            "properties": [{"name": "patchkit:role", "value": "compiled against"}],
        },
        {
            "bom-ref": CUDA,
            "type": "library",
            "name": "CUDA toolkit",
            "version": "13.0.88",
            "purl": CUDA,
            "licenses": [{"license": {"name": "NVIDIA CUDA Toolkit EULA"}}],
            "properties": [{"name": "patchkit:role", "value": "compiled against"}],
        },
    ]
    refs = ["patchkit:cutlass", FLASHMLA, "patchkit:flash-attn", TORCH, CUDA]
    assert built["dependencies"] == [
        {"ref": VLLM, "dependsOn": refs},
        *({"ref": ref} for ref in refs),
    ]
    assert built["metadata"]["tools"]["components"] == [
        {"type": "application", "name": name, "version": version}
        for name, version in {
            "patchkit": "0.1.0",
            "nvcc": "13.0.88",
            "g++": "g++ 12.2.0",
            "cmake": "4.4.4",
            "ninja": "1.13.2",
        }.items()
    ]
    assert built["metadata"]["component"]["pedigree"]["ancestors"][0]["hashes"]
