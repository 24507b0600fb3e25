"""What is in a wheel that was built here: CycloneDX, in .dist-info/sboms (PEP 770)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def nccl_sbom(facts: Mapping[str, Any]) -> dict[str, Any]:
    """CycloneDX 1.6 for a libnccl wheel, from the facts that ``patchkit.json`` holds.

    No serial number and no time stamp: the same build has the same SBOM.
    """
    # A plus sign is no character of a version in a package URL.
    ref = f"pkg:pypi/nvidia-nccl-cu13@{facts['wheel'].replace('+', '%2B')}"
    source = f"pkg:github/nvidia/nccl@{facts['version']}"
    runtime = f"pkg:generic/nvidia-cuda-runtime@{facts['cuda']}"
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "bom-ref": ref,
                "type": "library",
                "name": "nvidia-nccl-cu13",
                "version": facts["wheel"],
                "purl": ref,
            },
            "tools": {
                "components": [
                    _tool("patchkit", facts["patchkit"]),
                    _tool("nvcc", facts["cuda"]),
                    _tool("g++", facts["compiler"]),
                ]
            },
        },
        "components": [_library(facts, source), _runtime(facts, runtime)],
        "dependencies": [
            {"ref": ref, "dependsOn": [source, runtime]},
            {"ref": source},
            {"ref": runtime},
        ],
    }


def _library(facts: Mapping[str, Any], ref: str) -> dict[str, Any]:
    return {
        "bom-ref": ref,
        "type": "library",
        "name": "NCCL",
        "version": facts["version"],
        "purl": ref,
        "licenses": [{"expression": facts["license"]["nccl"]}],
        "properties": [
            {"name": "patchkit:source", "value": facts["source"]},
            {"name": "patchkit:tree", "value": facts["tree"]},
            *({"name": "patchkit:fix", "value": fix} for fix in facts["fixes"]),
        ],
    }


def _runtime(facts: Mapping[str, Any], ref: str) -> dict[str, Any]:
    return {
        "bom-ref": ref,
        "type": "library",
        "name": "CUDA runtime (libcudart_static.a)",
        "version": facts["cuda"],
        "purl": ref,
        "licenses": [{"license": {"name": facts["license"]["cuda"]}}],
    }


def _tool(name: str, version: str) -> dict[str, str]:
    return {"type": "application", "name": name, "version": version}
