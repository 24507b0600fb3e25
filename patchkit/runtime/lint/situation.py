"""Find what is known of the node and the versions that a file is for."""

from __future__ import annotations

from collections.abc import Mapping

from patchkit.runtime.envfile.facts import fact_problems
from patchkit.runtime.envfile.header import head_facts
from patchkit.runtime.files.content import FileContent, SaidVersion
from patchkit.runtime.host.host import Host
from patchkit.runtime.host.target import target_of
from patchkit.runtime.rules.condition import Situation
from patchkit.runtime.rules.releases import release
from patchkit.runtime.rules.variables import is_known_vllm
from patchkit.target import targets

DEFAULT_TARGET = "gb10"
_FACTS = ("role", "topology", "executor", "vllm", "nccl", "nodes", "quantization")
_SOFTWARE = ("vllm", "nccl", "torch", "triton")


def situation_of(
    text: str, content: FileContent, host: Host | None, asked: Mapping[str, str | None]
) -> Situation:
    """Return what is asked for, else said by the file's first line or its text, else found here.

    The target is a GB10 unless one is asked for or this host is another known device.
    A file that names a container image does not run with this host's software. Malformed facts of
    the file are left out, and are findings. Raises UsageError for a version that is none.
    """
    for name in _SOFTWARE:
        if version := asked.get(name):
            release(version)  # raises for what is no version, before anything is compared
    found = _of_host(host) if host else {}
    if content.images:
        found = {name: value for name, value in found.items() if name not in _SOFTWARE}
    facts = head_facts(text)
    wrong = fact_problems(facts)
    head = {name: facts[name] for name in _FACTS if name in facts and name not in wrong}
    # A file that names several versions of a project is checked against any.
    written = {
        name: said[0].version if len(said) == 1 and _is_known(name, said[0].version) else ""
        for name in _SOFTWARE
        if (said := versions_of(content, name))
    }
    wanted = {name: value for name, value in asked.items() if value}
    known = {"target": DEFAULT_TARGET}
    for facts in (found, written, head, wanted):
        known |= {name: value for name, value in facts.items() if value}
    return known


def versions_of(content: FileContent, project: str) -> tuple[SaidVersion, ...]:
    """Return the versions of a project that a file names, each where it is first named."""
    said: dict[str, SaidVersion] = {}
    for each in content.versions:
        if each.project == project:
            said.setdefault(each.version, each)
    return tuple(said.values())


def _is_known(project: str, version: str) -> bool:
    """Return whether the tables know a release; other images have tags of their own numbers."""
    return project != "vllm" or is_known_vllm(version)


def _of_host(host: Host) -> dict[str, str]:
    topology = "roce" if any(each.active for each in host.rdma) else ""
    # An unknown device, as a laptop is one, says nothing of the machine that the file is for.
    target = target_of(host)
    return {"target": target if target in targets() else "", "topology": topology, **host.versions}
