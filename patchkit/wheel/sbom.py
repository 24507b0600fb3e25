"""What is in a wheel that was built here: CycloneDX, in .dist-info/sboms (PEP 770)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from patchkit.edit.splice import git_diff
from patchkit.patching.fix import Fix, Verdict
from patchkit.patching.plan import Texts

_SCHEMA = "http://cyclonedx.org/schema/bom-1.6.schema.json"


@dataclass(frozen=True, slots=True)
class Patch:
    """What one fix changed, as a unified diff."""

    fix: Fix
    diff: str


def patches(steps: Iterable[tuple[Verdict, Texts]]) -> tuple[Patch, ...]:
    """The steps of a plan (``Plan.steps``) as an SBOM tells them."""
    return tuple(
        Patch(verdict.fix, "".join(git_diff(path, *pair) for path, pair in texts.items()))
        for verdict, texts in steps
    )


def vllm_sbom(facts: Mapping[str, Any], applied: Sequence[Patch]) -> dict[str, Any]:
    """CycloneDX 1.6 for a vLLM wheel, from the facts that ``patchkit.json`` holds.

    Its pedigree names what upstream released (an sdist, or for a repack a wheel), and each patch
    with the symptom that it resolves. The same wheel has the same SBOM.
    """
    ref = f"pkg:pypi/vllm@{quote(facts['wheel'])}"
    return {
        "$schema": _SCHEMA,
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "bom-ref": ref,
                "type": "library",
                "name": "vllm",
                "version": facts["wheel"],
                "purl": ref,
                "licenses": [{"expression": facts["license"]["vllm"]}],
                "pedigree": {
                    "ancestors": [_ancestor(facts)],
                    "patches": list(map(_patch, applied)),
                },
                "properties": [
                    {"name": "patchkit:made", "value": facts["made"]},
                    {"name": "patchkit:target", "value": facts["target"]},
                    *({"name": "patchkit:fix", "value": fix} for fix in facts["fixes"]),
                ],
            },
            "tools": {"components": [_tool("patchkit", facts["patchkit"])]},
        },
    }


def _ancestor(facts: Mapping[str, Any]) -> dict[str, Any]:
    algorithm, _, digest = facts["source"].partition(":")
    file = f"?file_name={quote(facts['source_file'])}" if "source_file" in facts else ""
    return {
        "type": "library",
        "name": "vllm",
        "version": facts["version"],
        "purl": f"pkg:pypi/vllm@{quote(facts['version'])}{file}",
        **({"hashes": [{"alg": "SHA-256", "content": digest}]} if algorithm == "sha256" else {}),
    }


def _patch(patch: Patch) -> dict[str, Any]:
    fix = patch.fix
    issue = {"type": "defect", "id": fix.id, "name": fix.title, "description": fix.symptom}
    text = {"contentType": "text/x-diff", "content": patch.diff}
    return {"type": "unofficial", "diff": {"text": text}, "resolves": [issue]}


def nccl_sbom(facts: Mapping[str, Any]) -> dict[str, Any]:
    """CycloneDX 1.6 for a libnccl wheel, from the facts that ``patchkit.json`` holds.

    No serial number and no time stamp: the same build has the same SBOM.
    """
    # A plus sign is no character of a version in a package URL.
    ref = f"pkg:pypi/nvidia-nccl-cu13@{facts['wheel'].replace('+', '%2B')}"
    source = f"pkg:github/nvidia/nccl@{facts['version']}"
    runtime = f"pkg:generic/nvidia-cuda-runtime@{facts['cuda']}"
    return {
        "$schema": _SCHEMA,
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
