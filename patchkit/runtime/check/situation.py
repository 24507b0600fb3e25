"""Find what is known of the node and the versions that a file is for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from patchkit.runtime.check.content import FileContent
from patchkit.runtime.check.versions import StatedVersion, find_versions
from patchkit.runtime.envfile.facts import fact_problems
from patchkit.runtime.envfile.header import head_facts
from patchkit.runtime.host.host import Host
from patchkit.runtime.host.target import target_of
from patchkit.runtime.rules.condition import Situation
from patchkit.runtime.rules.releases import release
from patchkit.runtime.rules.variables import is_known_vllm
from patchkit.target import targets

DEFAULT_TARGET = "gb10"
_FACTS = ("role", "topology", "executor", "vllm", "nccl", "nodes", "quantization")
_SOFTWARE = ("vllm", "nccl", "torch", "triton")
# With one GPU in a node, more than one of these takes several nodes.
_COUNTS = ("--nnodes", "--tensor-parallel-size", "--pipeline-parallel-size")
_ONE_GPU = ("gb10", "thor")
# Nobody sets these for anything but a ring.
_IN_A_RING = {("NCCL_IB_MERGE_NICS", "0"), ("NCCL_IB_SUBNET_AWARE_ROUTING", "1")}


@dataclass(frozen=True, kw_only=True)
class CheckedText:
    """What is checked: a text with its name, what it says, and what is known of its machine.

    ``text`` is empty for what runs; ``mode`` are a file's rights. ``host`` is the machine that is
    to use it, None for any; ``home`` the folder of its vLLM, whose names count instead of those of
    the version in ``situation``.
    """

    where: str
    content: FileContent
    text: str = ""
    mode: int | None = None
    versions: Sequence[StatedVersion] = ()
    situation: Situation = field(default_factory=dict)
    host: Host | None = None
    home: Path | None = None


def add_situation(
    checked: CheckedText, host: Host | None, asked: Mapping[str, str | None]
) -> CheckedText:
    """Add what is asked for, else said by the file's first line or its text, else found here.

    The target is a GB10 unless one is asked for or this host is another known device. A file that
    names a container image does not run with this host's software, and one that names several
    versions of a project is checked against any. Raises UsageError for a version that is none.
    """
    text, content = checked.text, checked.content
    versions = [*find_versions(text, content), *checked.versions]
    for name in _SOFTWARE:
        if version := asked.get(name):
            release(version)  # raises for what is no version, before anything is compared
    found: dict[str, str] = {}
    if host:
        # An unknown device, as a laptop is one, says nothing of the machine that the file is for.
        target = target_of(host)
        found["target"] = target if target in targets() else ""
        found["topology"] = "roce" if any(device.active for device in host.rdma) else ""
        found |= {} if content.images else host.versions
    facts = head_facts(text)
    wrong = fact_problems(facts)
    for name in _SOFTWARE:
        stated = [version.version for version in versions if version.project == name]
        # Other images have tags of their own numbers.
        is_known = name != "vllm" or (stated and is_known_vllm(stated[0]))
        if stated:
            found[name] = stated[0] if len(stated) == 1 and is_known else ""
    head = {name: facts[name] for name in _FACTS if name in facts and name not in wrong}
    known = {"target": DEFAULT_TARGET}
    for source in (found, head, asked):
        known |= {name: value for name, value in source.items() if value}
    # The file itself may tell of several nodes, and of a ring.
    pairs = {(assignment.name, assignment.value) for assignment in content.assignments}
    if _IN_A_RING & pairs:
        known.setdefault("topology", "ring")
    counts = _COUNTS if known["target"] in _ONE_GPU else _COUNTS[:1]
    for command in content.commands:
        values = [flag.value[:9] for flag in command.flags if flag.name in counts]
        joins = command.program == "ray start" and command.find_flag("--address")
        if joins or any(value.isdecimal() and int(value) > 1 for value in values):
            known.setdefault("role", "head")
    home = host.vllm_home(known.get("vllm", "")) if host else None
    return replace(checked, versions=versions, situation=known, host=host, home=home)
