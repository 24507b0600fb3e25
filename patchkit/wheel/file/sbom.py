"""Describe a wheel that was made here: facts, the version that is a digest of them, and the SBOM.

The SBOM is CycloneDX, in .dist-info/sboms (PEP 770).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from patchkit.digests import digest
from patchkit.edit.splice import git_diff
from patchkit.patching.fix import Verdict
from patchkit.patching.plan import Texts
from patchkit.wheel.file.wheelfile import Facts

_GITHUB = re.compile(r"https://github\.com/([^/@]+/[^/@]+?)(?:\.git)?@([0-9a-f]{40})")
CUDA_LICENSE = "NVIDIA CUDA Toolkit EULA"
"""A name: SPDX has no identifier for it."""

JsonObject = dict[str, Any]

_SCHEMA = "http://cyclonedx.org/schema/bom-1.6.schema.json"


def as_text(value: object) -> str:
    """Return JSON as wheels hold it: sorted, so that equal facts are equal bytes."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def digest_label(*texts: str) -> str:
    """Return ten hex digits for a local version: of all the texts that decide."""
    short = digest("\0".join(texts))[:10]
    # A segment of digits alone is a number to PEP 440, and would lose its leading zeros.
    return short if not short.isdigit() else f"a{short[1:]}"


def wheel_sbom(facts: Facts, steps: Iterable[tuple[Verdict, Texts]]) -> JsonObject:
    """Make CycloneDX 1.6 for a wheel of an upstream project from the facts in ``patchkit.json``.

    ``steps`` come from the plan (``Plan.steps``). The pedigree names upstream's release (an sdist,
    or for a repack a wheel), and each patch with the symptom that it resolves. A build's SBOM also
    names the compiled sources, the libraries they were compiled against, and the tools.
    """
    project = facts["project"]
    purl = f"pkg:pypi/{project}@{quote(facts['wheel'])}"
    subject = _make_component(purl, project, facts["wheel"], facts["license"][project])
    subject["pedigree"] = {
        "ancestors": [_describe_ancestor(facts)],
        "patches": [_describe_patch(verdict, texts) for verdict, texts in steps],
    }
    subject |= _fix_properties(facts, ("made", "target"))

    tools = {"patchkit": facts["patchkit"]}
    native = facts.get("native", {})
    if "ptxas" in native:
        tools["ptxas"] = native["ptxas"]
    components = [
        _describe_native(library, digests)
        for library, digests in native.get("assembled", {}).items()
    ]

    if facts["made"] == "build":
        tools |= {"nvcc": facts["cuda"], "g++": facts["compiler"], **facts["tools"]}
        sources = [
            _describe_source(option, identity, facts["license"].get(option))
            for option, identity in facts["externals"].items()
        ]
        components = [*sources, *components, *_linked_components(facts)]
    return _make_document(subject, tools, components)


def _describe_ancestor(facts: Facts) -> JsonObject:
    """Describe the sdist or the wheel that upstream released."""
    project = facts["project"]
    version = facts["version"]
    purl = f"pkg:pypi/{project}@{quote(version)}"
    if "source_file" in facts:
        purl += f"?file_name={quote(facts['source_file'])}"
    ancestor = {"type": "library", "name": project, "version": version, "purl": purl}

    algorithm, _, sha256 = facts["source"].partition(":")
    if algorithm == "sha256":
        ancestor["hashes"] = [{"alg": "SHA-256", "content": sha256}]
    return ancestor


def _describe_patch(verdict: Verdict, texts: Texts) -> JsonObject:
    """Describe the change of a fix, and the symptom that it resolves."""
    fix = verdict.fix
    diff = "".join(git_diff(path, *pair) for path, pair in texts.items())
    issue = {
        "type": "defect",
        "id": fix.id,
        "name": fix.title,
        "description": fix.symptom,
    }
    return {
        "type": "unofficial",
        "diff": {"text": {"contentType": "text/x-diff", "content": diff}},
        "resolves": [issue],
    }


def _describe_native(name: str, digests: Iterable[str]) -> JsonObject:
    role = "machine code assembled from the PTX that upstream's library holds"
    rows = [("ptx", f"sha256:{sha256}") for sha256 in digests]
    library = {"bom-ref": f"patchkit:native/{name}", "type": "file", "name": name}
    return library | _properties([("role", role), *rows])


def _describe_source(option: str, identity: str, spdx: str | None) -> JsonObject:
    """Describe code of another project in the wheel; a commit on GitHub has a package URL."""
    source: JsonObject = {
        "bom-ref": f"patchkit:{option}",
        "type": "library",
        "name": option,
    }
    if commit := _GITHUB.match(identity):
        # The package-url specification has GitHub's names in lower case.
        purl = f"pkg:github/{commit[1].lower()}@{commit[2]}"
        source |= {"bom-ref": purl, "version": commit[2], "purl": purl}
    if spdx:
        source["licenses"] = [{"expression": spdx}]

    role = "compiled in"
    if identity.startswith("vllm=="):
        role = "taken from upstream's wheel"
    return source | _properties([("role", role), ("source", identity)])


def _linked_components(facts: Facts) -> Iterator[JsonObject]:
    """Yield the libraries that were compiled against, and are not in the wheel."""
    role = _properties([("role", "compiled against")])
    torch, _, _cuda = facts["environment"]["torch"].partition(",")
    yield _make_component(f"pkg:pypi/torch@{quote(torch)}", "torch", torch) | role

    cuda = facts["cuda"]
    toolkit = f"pkg:generic/cuda-toolkit@{cuda}"
    terms = facts["license"]["cuda"]
    yield _make_component(toolkit, "CUDA toolkit", cuda, terms) | role


def nccl_sbom(facts: Facts) -> JsonObject:
    """Make CycloneDX 1.6 for a libnccl wheel from the facts in ``patchkit.json``.

    No serial number and no time stamp: the same build has the same SBOM.
    """
    cuda = facts["cuda"]
    # A plus sign is no character of a version in a package URL.
    purl = f"pkg:pypi/nvidia-nccl-cu13@{quote(facts['wheel'])}"
    subject = _make_component(purl, "nvidia-nccl-cu13", facts["wheel"])
    tools = {"patchkit": facts["patchkit"], "nvcc": cuda, "g++": facts["compiler"]}

    source = f"pkg:github/nvidia/nccl@{facts['version']}"
    terms = facts["license"]
    nccl = _make_component(source, "NCCL", facts["version"], terms["nccl"])
    nccl |= _fix_properties(facts, ("source", "tree"))

    purl = f"pkg:generic/nvidia-cuda-runtime@{cuda}"
    title = "CUDA runtime (libcudart_static.a)"
    runtime = _make_component(purl, title, cuda, terms["cuda"])
    return _make_document(subject, tools, [nccl, runtime])


def _make_document(
    subject: JsonObject,
    tools: Mapping[str, str],
    components: Sequence[JsonObject],
) -> JsonObject:
    """Make the whole, with the components that the subject depends on."""
    programs = [
        {"type": "application", "name": name, "version": version}
        for name, version in tools.items()
    ]
    document: JsonObject = {
        "$schema": _SCHEMA,
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": subject, "tools": {"components": programs}},
    }
    if components:
        refs = [component["bom-ref"] for component in components]
        document["components"] = components
        document["dependencies"] = [
            {"ref": subject["bom-ref"], "dependsOn": refs},
            *({"ref": ref} for ref in refs),
        ]
    return document


def _make_component(
    purl: str,
    name: str,
    version: str,
    terms: str = "",
) -> JsonObject:
    """Make a library that has a package URL; ``terms`` are an SPDX expression, or a name."""
    component: JsonObject = {
        "bom-ref": purl,
        "type": "library",
        "name": name,
        "version": version,
        "purl": purl,
    }
    if terms == CUDA_LICENSE:
        component["licenses"] = [{"license": {"name": terms}}]
    elif terms:
        component["licenses"] = [{"expression": terms}]
    return component


def _fix_properties(facts: Facts, names: Iterable[str]) -> JsonObject:
    """Return facts of these names, the fixes, and the user's patches."""
    pairs = [(name, facts[name]) for name in names]
    pairs += [("fix", fix) for fix in facts["fixes"]]
    for patch in facts.get("patches", ()):
        text = f"{patch['id']} sha256:{patch['sha256']} {patch['title']}"
        pairs.append(("patch", text))
    return _properties(pairs)


def _properties(pairs: Iterable[tuple[str, str]]) -> JsonObject:
    return {
        "properties": [
            {"name": f"patchkit:{name}", "value": value} for name, value in pairs
        ]
    }
