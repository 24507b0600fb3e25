"""Check what RDMA and several nodes need: addresses, container options, a sound NCCL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from patchkit.finding import Finding, Level
from patchkit.runtime.check.content import Container, FileContent
from patchkit.runtime.check.messages import make_finding
from patchkit.runtime.check.versions import StatedVersion
from patchkit.runtime.rules.condition import Situation
from patchkit.runtime.rules.rule import holding
from patchkit.runtime.rules.variable_rules import load_variable_rules

_OWN_ADDRESS = {"VLLM_HOST_IP", "RAY_NODE_IP_ADDRESS", "RAY_OVERRIDE_NODE_IP_ADDRESS"}
# Nobody sets these for a node alone; still they are no proof of others.
_BETWEEN_NODES = {"NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "UCX_NET_DEVICES"}
_RDMA = "/dev/infiniband"


def check_ray(text: str, content: FileContent, situation: Situation) -> Iterator[Finding]:
    """Yield `ray start` on one of several nodes without the address of this node."""
    names = {assignment.name for assignment in content.assignments}
    known = any(name in text or name in names for name in _OWN_ADDRESS)
    for command in content.commands:
        if (
            command.program == "ray start"
            and not known
            and situation.get("role", "single") != "single"
        ):
            address = command.find_flag("--node-ip-address")
            if address:
                yield make_finding("address-for-ray-alone", address)
            elif not any("$" in word.text for word in command.words):
                yield make_finding("ray-without-address", command.line)


def check_advice(
    content: FileContent, situation: Situation, versions: Sequence[StatedVersion]
) -> Iterator[Finding]:
    """Yield what the rules know of these versions in a cluster, which no rule mends."""
    values = {assignment.name: assignment.value for assignment in content.assignments}
    if not situation.get("role") and values.keys() & _BETWEEN_NODES:
        situation = {**situation, "role": "head"}
    for advice in holding(load_variable_rules().advice, situation):
        if not advice.solved(values):
            stated = (version.line for version in versions if version.project in advice.when)
            facts = " and ".join(f"{name} {situation[name]}" for name in advice.when)
            yield Finding(
                id=advice.id,
                line=next(stated, 1),
                level=Level(advice.severity),
                what=advice.says,
                why=f"Known of {facts}.",
                hint=advice.instead,
                source=advice.source,
            )


def check_containers(content: FileContent) -> Iterator[Finding]:
    """Yield what a container of vLLM lacks; nothing of one whose options are not all known."""
    for box in content.containers:
        started = [command for command in content.commands if command.block == box.block]
        if not (started and box.is_whole and box.program):
            continue
        if box.program == "podman" and not box.has_option("--pids-limit"):
            yield make_finding("container-few-threads", box.block)
        environment = content.environment(started[0])
        off, hca = environment.get("NCCL_IB_DISABLE"), environment.get("NCCL_IB_HCA")
        means_rdma = (hca and hca.is_given) or box.has_option("--device", _RDMA)
        if means_rdma and not (off and off.value != "0"):
            for key in _find_lacks(box):
                yield make_finding(f"container-without-{key}", box.block)


def _find_lacks(box: Container) -> Iterator[str]:
    privileged = any(
        name == "--privileged" and value.lower() not in ("false", "no")
        for name, value in box.options
    )
    mounted = any(box.has_option(name, _RDMA) for name in ("-v", "--volume", "--mount"))
    may_lock = any(box.has_option("--cap-add", name) for name in ("IPC_LOCK", "ALL", "all"))
    if not (privileged or mounted or box.has_option("--device", _RDMA)):
        yield "device"
    if not (privileged or may_lock or box.has_option("--ulimit", "memlock")):
        yield "memlock"
    if not any(box.has_option(name, "host") for name in ("--network", "--net")):
        yield "network"
