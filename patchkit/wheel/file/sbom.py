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

_GITHUB = re.compile(r"https://github\.com/([^/@]+/[^/@]+?)(?:\.git)?@([0-9a-f]{40})")
CUDA_LICENSE = "NVIDIA CUDA Toolkit EULA"
"""A name: SPDX has no identifier for it."""

_SCHEMA = "http://cyclonedx.org/schema/bom-1.6.schema.json"


def as_text(value: object) -> str:
    """Return JSON as wheels hold it: sorted, so that equal facts are equal bytes."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def digest_label(*texts: str) -> str:
    """Return ten hex digits for a local version: of all the texts that decide."""
    short = digest("\0".join(texts))[:10]
    # A segment of digits alone is a number to PEP 440, and would lose its leading zeros.
    return short if not short.isdigit() else f"a{short[1:]}"


def wheel_sbom(
    facts: Mapping[str, Any], steps: Iterable[tuple[Verdict, Texts]]
) -> dict[str, Any]:
    """Make CycloneDX 1.6 for a wheel of upstream's from the facts that ``patchkit.json`` holds.

    ``steps`` are those of the plan (``Plan.steps``). Its pedigree names what upstream released (an
    sdist, or for a repack a wheel), and each patch with the symptom that it resolves. Of a build it
    also names the sources that were compiled in, what they were compiled against, and the tools.
    """
    project, (algorithm, _, sha256) = facts["project"], facts["source"].partition(":")
    file = f"?file_name={quote(facts['source_file'])}" if "source_file" in facts else ""
    ancestor = {
        "type": "library",
        "name": project,
        "version": facts["version"],
        "purl": f"pkg:pypi/{project}@{quote(facts['version'])}{file}",
        **(
            {"hashes": [{"alg": "SHA-256", "content": sha256}]}
            if algorithm == "sha256"
            else {}
        ),
    }
    patches = []
    for verdict, texts in steps:
        diff = "".join(git_diff(path, *pair) for path, pair in texts.items())
        fix, text = verdict.fix, {"contentType": "text/x-diff", "content": diff}
        issue = {
            "type": "defect",
            "id": fix.id,
            "name": fix.title,
            "description": fix.symptom,
        }
        patches.append(
            {"type": "unofficial", "diff": {"text": text}, "resolves": [issue]}
        )
    ref = f"pkg:pypi/{project}@{quote(facts['wheel'])}"
    subject = {
        **_make_component(ref, project, facts["wheel"], facts["license"][project]),
        "pedigree": {"ancestors": [ancestor], "patches": patches},
        **_properties(
            ("made", facts["made"]),
            ("target", facts["target"]),
            *_fix_pairs(facts),
        ),
    }
    parts, native, tools = [], facts.get("native", {}), {"patchkit": facts["patchkit"]}
    for name, digests in native.get("assembled", {}).items():
        role = (
            "role",
            "machine code assembled from the PTX that upstream's library holds",
        )
        library = {"bom-ref": f"patchkit:native/{name}", "type": "file", "name": name}
        parts.append(
            library | _properties(role, *(("ptx", f"sha256:{ptx}") for ptx in digests))
        )
    tools |= {"ptxas": native["ptxas"]} if "ptxas" in native else {}
    if facts["made"] != "build":
        return _make_document(subject, tools, parts)
    tools |= {"nvcc": facts["cuda"], "g++": facts["compiler"], **facts["tools"]}
    # What was compiled against, and is not in the wheel.
    torch, _, _cuda = facts["environment"]["torch"].partition(",")
    toolkit = f"pkg:generic/cuda-toolkit@{facts['cuda']}"
    linked = (
        _make_component(f"pkg:pypi/torch@{quote(torch)}", "torch", torch),
        _make_component(
            toolkit, "CUDA toolkit", facts["cuda"], facts["license"]["cuda"]
        ),
    )
    parts += (
        component | _properties(("role", "compiled against")) for component in linked
    )
    return _make_document(subject, tools, [*_source_components(facts), *parts])


def _source_components(facts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield other projects' code that is in the wheel; a commit on GitHub has a package URL."""
    for name, identity in facts["externals"].items():
        commit = _GITHUB.match(identity)
        # The package-url specification has GitHub's names in lower case.
        ref = (
            f"pkg:github/{commit[1].lower()}@{commit[2]}"
            if commit
            else f"patchkit:{name}"
        )
        source = {"bom-ref": ref, "type": "library", "name": name}
        source |= {"version": commit[2], "purl": ref} if commit else {}
        license_ = facts["license"].get(name)
        licenses = {"licenses": [{"expression": license_}]} if license_ else {}
        role = (
            "taken from upstream's wheel"
            if identity.startswith("vllm==")
            else "compiled in"
        )
        yield source | licenses | _properties(("role", role), ("source", identity))


def nccl_sbom(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Make CycloneDX 1.6 for a libnccl wheel from the facts that ``patchkit.json`` holds.

    No serial number and no time stamp: the same build has the same SBOM.
    """
    # A plus sign is no character of a version in a package URL.
    ref = f"pkg:pypi/nvidia-nccl-cu13@{quote(facts['wheel'])}"
    source = f"pkg:github/nvidia/nccl@{facts['version']}"
    runtime = f"pkg:generic/nvidia-cuda-runtime@{facts['cuda']}"
    library = _make_component(
        source, "NCCL", facts["version"], facts["license"]["nccl"]
    )
    library |= _properties(
        *((name, facts[name]) for name in ("source", "tree")),
        *_fix_pairs(facts),
    )
    name = "CUDA runtime (libcudart_static.a)"
    return _make_document(
        _make_component(ref, "nvidia-nccl-cu13", facts["wheel"]),
        {
            "patchkit": facts["patchkit"],
            "nvcc": facts["cuda"],
            "g++": facts["compiler"],
        },
        [
            library,
            _make_component(runtime, name, facts["cuda"], facts["license"]["cuda"]),
        ],
    )


def _make_document(
    subject: dict[str, Any],
    tools: Mapping[str, str],
    components: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Make the whole, with the components that the subject depends on."""
    refs = [component["bom-ref"] for component in components]
    depends = [
        {"ref": subject["bom-ref"], "dependsOn": refs},
        *({"ref": ref} for ref in refs),
    ]
    return {
        "$schema": _SCHEMA,
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": subject,
            "tools": {
                "components": [
                    {"type": "application", "name": name, "version": version}
                    for name, version in tools.items()
                ]
            },
        },
        **(
            {"components": list(components), "dependencies": depends}
            if components
            else {}
        ),
    }


def _make_component(
    ref: str, name: str, version: str, license_: str = ""
) -> dict[str, Any]:
    """Make a library that has a package URL; ``license_`` is an SPDX expression, or a name."""
    named = license_ == CUDA_LICENSE
    license_field = (
        {"license": {"name": license_}} if named else {"expression": license_}
    )
    return {
        "bom-ref": ref,
        "type": "library",
        "name": name,
        "version": version,
        "purl": ref,
        **({"licenses": [license_field]} if license_ else {}),
    }


def _fix_pairs(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield from (("fix", fix) for fix in facts["fixes"])
    for patch in facts.get("patches", ()):
        yield "patch", f"{patch['id']} sha256:{patch['sha256']} {patch['title']}"


def _properties(*pairs: tuple[str, str]) -> dict[str, Any]:
    return {
        "properties": [
            {"name": f"patchkit:{name}", "value": value} for name, value in pairs
        ]
    }
