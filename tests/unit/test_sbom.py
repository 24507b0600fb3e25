"""The SBOM of a libnccl wheel, whole."""

from __future__ import annotations

import copy

from patchkit.wheel.sbom import nccl_sbom

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
