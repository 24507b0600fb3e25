"""Find what is known of the node and the versions that a file is for."""

from __future__ import annotations

from collections.abc import Mapping

from patchkit.runtime.envfile.facts import fact_problems
from patchkit.runtime.envfile.header import head_facts
from patchkit.runtime.host.host import Host
from patchkit.runtime.host.target import target_of
from patchkit.runtime.rules.condition import Situation
from patchkit.runtime.rules.releases import release

_FACTS = ("role", "topology", "executor", "vllm", "nccl", "nodes", "quantization")


def situation_of(text: str, host: Host | None, asked: Mapping[str, str | None]) -> Situation:
    """Return what is asked for, else said by the file's first line, else found on this host.

    Malformed facts of the file are left out, and are findings. Raises UsageError for a version that
    is none.
    """
    for name in ("vllm", "nccl", "triton"):
        if version := asked.get(name):
            release(version)  # raises for what is no version, before anything is compared
    found = _of_host(host) if host else {}
    facts = head_facts(text)
    wrong = fact_problems(facts)
    said = {name: facts[name] for name in _FACTS if name in facts and name not in wrong}
    known = {**found, **said, **{name: value for name, value in asked.items() if value}}
    return {name: value for name, value in known.items() if value}


def _of_host(host: Host) -> dict[str, str]:
    topology = "roce" if any(each.active for each in host.rdma) else ""
    return {"target": target_of(host), "topology": topology, **host.versions}
