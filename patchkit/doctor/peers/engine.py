"""Judge what a node's container engine and the image of cluster.toml get there. Pure.

That an engine is missing or refuses, and that an image is missing or differs, `up` says as well.
"""

from __future__ import annotations

from patchkit.cluster.agent.engine_facts import EngineFacts
from patchkit.cluster.ssh.ssh import there
from patchkit.doctor.peers.node_report import NodeReport, NotCheckedError, Outcome, check

_CPUS = {"amd64": "x86_64", "arm64": "aarch64"}  # as Go names them: as Linux does


@check("engine")
def check_engine(node: NodeReport) -> Outcome:
    said, disk = node.part("engine"), node.part("engine").storage[0]
    fields = {"version": said.version, "storage": disk.folder, "free": disk.free / 1e9}
    return {"program": node.part("facts").image.program, **fields}


@check("engine-gpu")
def check_gpu_way(node: NodeReport) -> Outcome:
    said: EngineFacts = node.part("engine")
    driver, docker = node.driver, node.part("facts").image.program.endswith("docker")
    if not said.spec:
        lacking = node.find("engine-hook" if docker else "engine-gpu")
        return {"way": "by NVIDIA's hook, --gpus"} if docker and said.hook else lacking
    if said.driver in ("", driver):
        return {"way": f"by {said.spec}, which is for driver {driver}"}
    kept = said.spec.startswith("/var/run/")  # by the toolkit, from 1.18 on
    made = ("nvidia-ctk", "cdi", "generate", f"--output={said.spec}")
    words = ("systemctl", "restart", "nvidia-cdi-refresh.service") if kept else made
    fields = {"spec": said.spec, "old": said.driver, "driver": driver}
    return node.find("cdi-stale", command=there(node.node, "sudo", *words), **fields)


@check("engine-rdma")
def check_verbs(node: NodeReport) -> Outcome:
    if closed := node.part("engine").closed:
        command = there(node.node, "sudo", "chmod", "a+rw", *closed)
        return node.find("engine-rdma", files=", ".join(closed), command=command)
    return {}


@check("image-cpu")
def check_image_cpu(node: NodeReport) -> Outcome:
    cpu, machine = node.part("engine").cpu, node.host.system.machine
    if not cpu or not machine:
        raise NotCheckedError("the image is not there" if machine else "no CPU is named here")
    fields = {"cpu": cpu, "machine": machine, "program": node.part("facts").image.program}
    return fields if _CPUS.get(cpu, cpu) == machine else node.find("image-cpu", **fields)


ENGINE_CHECKS = (check_engine, check_gpu_way, check_verbs, check_image_cpu)
