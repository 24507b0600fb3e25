"""Check what several nodes need: an address of each, and an NCCL that works between them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from patchkit.finding import Finding, Level
from patchkit.runtime.files.content import CommandLine, FileContent
from patchkit.runtime.rules.condition import Situation
from patchkit.runtime.rules.rule import holding
from patchkit.runtime.rules.variable_rules import load_variable_rules

# With one GPU in a node, more than one of these takes several nodes.
_COUNTS = ("--nnodes", "-n", "--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp")
_ONE_GPU = ("gb10", "thor")
# Nobody sets these for a node alone; still they are no proof of others.
_BETWEEN_NODES = ("NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "UCX_NET_DEVICES")
# And these for nothing but a ring.
_IN_A_RING = {("NCCL_IB_MERGE_NICS", "0"), ("NCCL_IB_SUBNET_AWARE_ROUTING", "1")}
_OWN_ADDRESS = ("VLLM_HOST_IP", "RAY_NODE_IP_ADDRESS", "RAY_OVERRIDE_NODE_IP_ADDRESS")
_SOURCE = "vLLM network_utils.get_ip, ray_utils.py"
# What images are told to be, by an argument of their entrypoint: ray-head, ray_worker.
_MODE = re.compile(r"ray[-_](head|worker|node)")


def in_cluster(content: FileContent, situation: Situation) -> Situation:
    """Return the situation with a role and a ring, if the file itself tells of several nodes."""
    set_to = {(each.name, each.value) for each in content.assignments if each.literal}
    if not situation.get("topology") and _IN_A_RING & set_to:
        situation = {**situation, "topology": "ring"}
    if situation.get("role") or not _several_nodes(content, situation):
        return situation
    return {**situation, "role": "head"}


def _several_nodes(content: FileContent, situation: Situation) -> bool:
    counts = _COUNTS if situation.get("target") in _ONE_GPU else _COUNTS[:1]
    for command in content.commands:
        if command.program == "ray start" and command.flag("--address"):
            return True
        if _is_mode(command):
            return True
        if command.program == "vllm serve":
            given = [flag.value for name in counts if (flag := command.flag(name))]
            if any(value.isdecimal() and int(value) > 1 for value in given):
                return True
    return False


def check_ray(content: FileContent, situation: Situation) -> Iterator[Finding]:
    """Return `ray start` on one of several nodes without the address of this node."""
    named = {each.name for each in (*content.assignments, *content.passed, *content.own)}
    if situation.get("role", "single") == "single" or named.intersection(_OWN_ADDRESS):
        return
    for command in content.commands:
        if command.program == "ray start" and command.is_whole:
            yield _without_address(command)
        elif _is_mode(command):
            yield Finding(
                line=command.line,
                level=Level.NOTE,
                what=f"nothing says which address the image's {command.program} takes",
                why="Without VLLM_HOST_IP vLLM takes that of the default route: the LAN's.",
                hint="set VLLM_HOST_IP, on each node its own, unless the image's entrypoint does",
                source=_SOURCE,
            )


def _is_mode(command: CommandLine) -> bool:
    """Return whether an image is told to start Ray by itself."""
    return bool(command.image and _MODE.fullmatch(command.program))


def _without_address(command: CommandLine) -> Finding:
    if told := command.flag("--node-ip-address"):
        return Finding(
            line=told.line,
            level=Level.NOTE,
            what="the address of this node is told to Ray alone",
            why="vLLM takes that of the default route, the LAN's, and looks for the GPU there.",
            hint="set VLLM_HOST_IP to the same address: on each node its own",
            source=_SOURCE,
        )
    return Finding(
        line=command.line,
        level=Level.WARNING,
        what="Ray is started without the address of this node",
        why="Ray and vLLM take that of the default route: the LAN's, not the cable's.",
        hint="add --node-ip-address, and set VLLM_HOST_IP to the same: on each node its own",
        source=_SOURCE,
    )


def check_advice(content: FileContent, situation: Situation) -> Iterator[Finding]:
    """Return what the rules know of these versions in a cluster, which no rule mends."""
    values = {each.name: each.value for each in content.assignments}
    if not situation.get("role") and values.keys() & set(_BETWEEN_NODES):
        situation = {**situation, "role": "head"}
    for advice in holding(load_variable_rules().advice, situation):
        if advice.solved(values):
            continue
        projects = [name for name in ("nccl", "vllm") if name in advice.when]
        said = next(filter(None, map(content.version, projects)), None)
        facts = " and ".join(f"{name} {situation[name]}" for name in advice.when)
        yield Finding(
            line=said.line if said else 1,
            level=Level(advice.severity),
            what=advice.says,
            why=f"Known of {facts}.",
            hint=advice.instead,
            source=advice.source,
        )
