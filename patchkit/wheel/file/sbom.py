"""Describe a wheel that patchkit made: its facts as JSON, the label of its version, its SBOM.

The label is a digest of what decides about the wheel. The SBOM is CycloneDX and lies in
.dist-info/sboms (PEP 770).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from patchkit.digests import digest
from patchkit.edit.splice import git_diff
from patchkit.elf import MAGIC
from patchkit.frozen import frozen
from patchkit.patching.fix import Verdict
from patchkit.patching.plan import Step, TextPairs
from patchkit.source.project import projects
from patchkit.wheel.file.wheelfile import FACTS, Facts, WheelFile
from patchkit.wheel.file.write import set_tag, set_version

_GITHUB = re.compile(r"https://github\.com/([^/@]+/[^/@]+?)(?:\.git)?@([0-9a-f]{40})")
CUDA_LICENSE = "NVIDIA CUDA Toolkit EULA"
"""The name of a license for which SPDX has no identifier."""

UNLABELLED = "0" * 10
"""The place of the digest in a version, before the digest is known."""

JsonObject = dict[str, Any]
Properties = Sequence[tuple[str, str]]

_FORMAT = 3  # of a new wheel; goes up if the same request gives other bytes
_SBOM = "sboms/patchkit.cdx.json"
# WHEEL repeats the build tag of the file name (PEP 427), which the new name has not.
_BUILD = re.compile(rb"^Build:.*\n", re.MULTILINE)
_SCHEMA = "http://cyclonedx.org/schema/bom-1.6.schema.json"


def as_text(value: object) -> str:
    """Return a value as JSON for a file of a wheel; keys are sorted, for reproducible bytes."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def digest_label(*texts: str) -> str:
    """Return a label for a local version: the first ten hex digits of the digest of all texts.

    If they are decimal digits only, the first is replaced by ``a``.
    """
    short = digest("\0".join(texts))[:10]
    # PEP 440 reads a segment of decimal digits as a number and drops leading zeros.
    return short if not short.isdigit() else f"a{short[1:]}"


@frozen
class NewWheel:
    """A wheel that is made of another one: its file name, its new members, and its facts."""

    filename: str
    members: Mapping[str, bytes]
    facts: Facts


def name_wheel(
    wheel: WheelFile,
    tag: str,
    facts: Facts,
    steps: Iterable[Step],
    members: Mapping[str, bytes],
) -> NewWheel:
    """Name a wheel that is made of ``wheel`` by a digest of all its new members.

    ``facts["wheel"]`` is the version with UNLABELLED in the place of the digest; so do members that
    tell the version. ``steps`` come from the plan.
    """
    version = facts["wheel"]
    home = f"{wheel.distribution}-{version}.dist-info"
    metadata = wheel.read(f"{wheel.dist_info}/METADATA")
    build = wheel.read(f"{wheel.dist_info}/WHEEL")
    members = {
        **members,
        f"{home}/METADATA": set_version(metadata, version),
        f"{home}/WHEEL": set_tag(_BUILD.sub(b"", build), tag),
        f"{home}/{FACTS}": as_text(facts).encode(),
        f"{home}/{_SBOM}": as_text(wheel_sbom(facts, steps)).encode(),
    }

    lines = [f"{_FORMAT}\n{wheel.sha256}\n{tag}\n"]
    lines += [f"{digest(data)}  {path}\n" for path, data in sorted(members.items())]
    label = version.partition("+")[2]
    final = label.replace(UNLABELLED, digest_label("".join(lines)))

    labelled = {}
    for path, data in members.items():
        # A library does not hold its version, and is large.
        if not data.startswith(MAGIC):
            data = data.replace(label.encode(), final.encode())
        labelled[path.replace(label, final)] = data

    version = version.replace(label, final)
    return NewWheel(
        filename=f"{wheel.distribution}-{version}-{tag}.whl",
        members=labelled,
        facts=facts | {"wheel": version},
    )


def wheel_sbom(facts: Facts, steps: Iterable[Step]) -> JsonObject:
    """Return the SBOM (CycloneDX 1.6) of an upstream project's wheel, from its ``patchkit.json``.

    ``steps`` are ``Plan.steps``: each verdict with the texts that it changed. The pedigree names
    upstream's release (the sdist, or the wheel that was repacked), and each patch with the symptom
    that it resolves. The components of a build are the sources that are in the wheel; the facts
    also name tools, and the PTX that machine code was assembled from.
    """
    project = facts["project"]
    subject = _make_component(
        f"pkg:pypi/{project}@{quote(facts['wheel'])}",
        project,
        facts["wheel"],
        facts["license"][project],
        _stated_facts(facts, "made", "target"),
    )
    subject["pedigree"] = {
        "ancestors": [_describe_ancestor(facts)],
        "patches": [_describe_patch(verdict, texts) for verdict, texts in steps],
    }

    sources = facts.get("externals", {})
    components = [_describe_source(*source) for source in sources.items()]
    return _make_document(subject, facts, components)


def _describe_ancestor(facts: Facts) -> JsonObject:
    """Describe the sdist or wheel of upstream from which this wheel was made."""
    project = facts["project"]
    version = facts["version"]
    purl = f"pkg:pypi/{project}@{quote(version)}"
    if "source_file" in facts:
        purl += f"?file_name={quote(facts['source_file'])}"
    ancestor = _make_component(purl, project, version)
    del ancestor["bom-ref"]  # nothing refers to it

    algorithm, _, sha256 = facts["source"].partition(":")
    if algorithm == "sha256":
        ancestor["hashes"] = [{"alg": "SHA-256", "content": sha256}]
    return ancestor


def _describe_patch(verdict: Verdict, texts: TextPairs) -> JsonObject:
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


def _describe_source(option: str, identity: str) -> JsonObject:
    """Describe code of another project that is in the wheel.

    ``option`` is the project's name in options of ``patchkit build``: ``flash-attn``. ``identity``
    says where the code is from; a commit on GitHub also gets a package URL.
    """
    ref = f"patchkit:{option}"
    version = ""
    if commit := _GITHUB.match(identity):
        version = commit[2]
        # The package-url specification wants GitHub's names in lower case.
        ref = f"pkg:github/{commit[1].lower()}@{version}"

    role = "compiled in"
    if identity.startswith("vllm=="):
        role = "taken from upstream's wheel"
    properties = [("role", role), ("source", identity)]
    return _make_component(ref, option, version, properties=properties)


# Project → its wheel, its sources, and what the wheel holds of the CUDA runtime.
_COMPILED = {
    "nccl": ("nvidia-nccl-cu13", "pkg:github/nvidia/nccl", "libcudart_static.a"),
    "flashinfer": ("flashinfer-jit-cache", "pkg:pypi/flashinfer-python", "headers"),
}


def compiled_sbom(facts: Facts) -> JsonObject:
    """Return the SBOM (CycloneDX 1.6) of a compiled wheel, from the facts in ``patchkit.json``.

    It has no serial number and no time stamp, so that equal builds have equal SBOMs.
    """
    project = facts["project"]
    distribution, origin, part = _COMPILED[project]
    cuda = facts["cuda"]
    # In a package URL, the plus sign of a version must be quoted.
    purl = f"pkg:pypi/{distribution}@{quote(facts['wheel'])}"
    subject = _make_component(purl, distribution, facts["wheel"])

    version = facts["version"]
    terms = facts["license"]
    source = _make_component(
        f"{origin}@{version}",
        projects()[project].title,
        version,
        terms[project],
        _stated_facts(facts, "source", "tree"),
    )
    purl = f"pkg:generic/nvidia-cuda-runtime@{cuda}"
    runtime = _make_component(purl, f"CUDA runtime ({part})", cuda, terms["cuda"])
    return _make_document(subject, facts, [source, runtime])


def _make_document(
    subject: JsonObject,
    facts: Facts,
    components: Sequence[JsonObject],
) -> JsonObject:
    """Return the CycloneDX document of ``subject``, which depends on ``components``."""
    tool = {"type": "application", "name": "patchkit", "version": facts["patchkit"]}
    document: JsonObject = {
        "$schema": _SCHEMA,
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": subject, "tools": {"components": [tool]}},
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
    ref: str,
    name: str,
    version: str = "",
    terms: str = "",
    properties: Properties = (),
) -> JsonObject:
    """Return the component of a library; ``ref`` is its package URL, if it has one.

    ``terms`` is its license: an SPDX expression, CUDA_LICENSE, or "" if none is stated.
    """
    component: JsonObject = {"bom-ref": ref, "type": "library", "name": name}
    if version:
        component["version"] = version
    if ref.startswith("pkg:"):
        component["purl"] = ref

    if terms == CUDA_LICENSE:
        component["licenses"] = [{"license": {"name": terms}}]
    elif terms:
        component["licenses"] = [{"expression": terms}]

    if properties:
        component["properties"] = [
            {"name": f"patchkit:{name}", "value": value} for name, value in properties
        ]
    return component


def _stated_facts(facts: Facts, *names: str) -> Properties:
    """Return as properties: the named facts, the fixes, and the user's patches."""
    pairs = [(name, facts[name]) for name in names]
    pairs += [("fix", fix) for fix in facts["fixes"]]
    for patch in facts.get("patches", ()):
        text = f"{patch['id']} sha256:{patch['sha256']} {patch['title']}"
        pairs.append(("patch", text))
    return pairs
