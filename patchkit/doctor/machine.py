"""Judge a machine by what it says of itself, and the Python or the image that has vLLM. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from patchkit.cluster.agent.health import DiskRoom
from patchkit.cluster.ssh.ssh import ssh_command
from patchkit.doctor.peers.node_report import (
    NodeReport,
    NotCheckedError,
    Outcome,
    check,
    facts_for_causes,
    make_fine,
    require,
    unchecked,
)
from patchkit.doctor.symptoms.diagnosis import read_log
from patchkit.doctor.symptoms.findings import log_findings
from patchkit.finding import Finding, Level
from patchkit.quoting import quoted
from patchkit.records import RECIPES, read_toml
from patchkit.runtime.rules.releases import within
from patchkit.units import KIB_PER_GIB

_UNIFIED = ("gb10", "thor")
# NVML's clocksThrottleReasons that are no choice of the user's: nvml.h.
_THROTTLED = {0x8: "hardware", 0x20: "heat", 0x40: "heat", 0x80: "power brake"}
_MISMATCH = "mismatch"  # NVML_ERROR_LIB_RM_VERSION_MISMATCH in NVML's words
_UNNAMED = "no environment with vLLM is known here: name it with --venv"
_INSTALL = "patchkit cluster install"
_CPUS = {"amd64": "x86_64", "arm64": "aarch64"}  # as Go names them: as Linux does
_LIMITS = read_toml(dict[str, Any], RECIPES / "doctor" / "machine.toml", key="limits")
_UNITS = {"celsius": "°C", "watts": "W", "mhz": "MHz", "busy": "%"}


def disk_trouble(disk: DiskRoom) -> str:
    """Return why nothing can be written to a disk any more, or soon; "" for one with room."""
    if disk.files == 0:
        return "no file can be made"
    return (
        f"{disk.free / 1e6:.0f} MB are free"
        if disk.free < _LIMITS["full_bytes"]
        else ""
    )


def machine_findings(node: NodeReport) -> Iterator[Finding]:
    """Yield what is wrong with one machine, what is well, and what was not looked at."""
    if node.facts is None or node.health is None:
        part = "facts" if node.facts is None else "health"
        yield unchecked("machine", node.node, node.why_not(part))
        return
    python = (
        check_torch,
        check_lost_nccl,
        check_nccl,
        check_compilers,
    )  # of the machine itself
    engine = (check_engine, check_gpu_way, check_image_cpu)
    for run_check in (
        *(check_driver, check_gpu, check_gpu_users, check_kernel_log),
        *(check_memory, check_memory_guard, check_rdma_files),
        *(engine if node.facts.image else python),
    ):
        yield from run_check(node)


@check("memory-left")
def check_memory(node: NodeReport) -> Outcome:
    memory = require(
        node.host.memory, "the kernel does not tell how much memory there is"
    )
    sizes = {
        "available": memory.available // KIB_PER_GIB,
        "total": memory.total // KIB_PER_GIB,
    }
    shared = node.host.target in _UNIFIED and bool(node.processes)
    if shared and sizes["available"] < _LIMITS["left_gib"]:
        return node.find("memory-left", **sizes)
    return sizes


@check("memory-guard")
def check_memory_guard(node: NodeReport) -> Outcome:
    guards = node.health_fact("guards")
    memory = require(
        node.host.memory, "the kernel does not tell how much memory there is"
    )
    if not memory.swap_total and not guards and node.host.target in _UNIFIED:
        return node.find("memory-guard")
    return {
        "guards": ", ".join(
            (*guards, f"{memory.swap_total // KIB_PER_GIB} GiB of swap")
        )
    }


@check("kernel-log")
def check_kernel_log(node: NodeReport) -> Outcome:
    try:
        lines = [line.replace("\n", " ") for line in node.health_fact("kernel")]
    except NotCheckedError as error:
        hint = ssh_command(
            node.node, "sudo", "dmesg", "--level=emerg,alert,crit,err,warn"
        )
        raise NotCheckedError(error.what, hint=hint) from None
    text = "".join(f"{line}\n" for line in lines).encode(errors="replace")
    # Not whole: most lines of the log were left out.
    read = read_log([text], facts_for_causes(node), whole=False)
    findings = log_findings(read, nodes=[node.node] * (len(lines) + 1))
    bad = (Level.ERROR, Level.WARNING)
    found = [each for each in findings if each.about != "unknown" and each.level in bad]
    return found or {"count": len(lines)}


# The GPU


@check("gpu-throttled")
def check_gpu(node: NodeReport) -> Outcome:
    try:
        gpu = node.health_fact("gpu")
    except NotCheckedError as error:
        if _MISMATCH in error.what:
            return node.find("gpu-mismatch", reason=error.what)
        none = "" if node.host.gpus else "no GPU is found here: "
        raise NotCheckedError(f"{none}{error.what}") from None
    throttled = require(
        gpu.throttled, "nvidia-smi does not tell why clocks are held down"
    )
    shown = {
        name: f"? {unit}"
        if (value := getattr(gpu, name)) is None
        else f"{value:.0f} {unit}"
        for name, unit in _UNITS.items()
    }
    slow = (gpu.mhz or _LIMITS["stuck_mhz"] + 1) <= _LIMITS["stuck_mhz"]
    if reasons := {word for bit, word in _THROTTLED.items() if throttled & bit}:
        return node.find(
            "gpu-throttled", reasons=" and ".join(sorted(reasons)), **shown
        )
    if (
        slow
        and (gpu.busy or 0) >= _LIMITS["busy_percent"]
        and node.host.target == "gb10"
    ):
        return node.find("gpu-stuck", **shown)
    return shown


@check("gpu-others")
def check_gpu_users(node: NodeReport) -> Outcome:
    users, container = node.health_fact("gpu_users"), node.health_fact("container")
    own = {each.pid for each in node.part("processes")}
    others = [each for each in users if each.pid not in own]
    if not others:
        return {"count": len(users)}
    if container.kind:
        raise NotCheckedError(
            "in a container processes have other numbers than the driver says"
        )
    shown = []
    for user in others:
        words = [user.name, f"of {user.user}" if user.user else ""]
        words.append("" if user.mib is None else f"{user.mib} MiB")
        shown.append(f"{user.pid} ({' '.join(filter(None, words))})")
    pids = ",".join(str(each.pid) for each in others)
    about = "gpu-others" if own else "gpu-taken"
    return node.find(about, processes=", ".join(shown), pids=pids)


@check("driver")
def check_driver(node: NodeReport) -> Outcome:
    software = node.host.software
    cuda = software.cuda if software else ""
    oldest = _LIMITS["drivers"].get(cuda.partition(".")[0], "")
    driver = node.driver
    if not oldest:
        raise NotCheckedError(
            f"{driver} is there, and no torch says for which CUDA it is"
        )
    fields = {"driver": driver, "cuda": cuda}
    old = within(driver, f"<{oldest}")
    return node.find("driver", oldest=oldest, **fields) if old else fields


@check("rdma-closed")
def check_rdma_files(node: NodeReport) -> Outcome:
    container = node.health_fact("container")
    active = sum(each.active for each in node.host.rdma)
    counts = {"open": container.verbs_open, "count": container.verbs, "active": active}
    if container.verbs_open < active:
        return node.find(
            "container-rdma" if container.kind else "rdma-closed", **counts
        )
    return {
        "what": f"{container.verbs_open} files of RDMA devices open, {active} active"
    }


# The Python


@check("torch-cpu")
def check_torch(node: NodeReport) -> Outcome:
    software = node.host.software
    if software is None or not (software.vllm and software.torch):
        raise NotCheckedError(_UNNAMED)
    own = software.vllm.partition("+")[2]
    built_for = own.removeprefix("cu") if own.startswith("cu") else ""
    has = software.cuda.replace(".", "")
    fields = {"torch": software.torch, "vllm": software.vllm, "cuda": software.cuda}
    if not has and not node.host.gpus:
        raise NotCheckedError("torch is for CPUs, and there is no GPU")
    if has and built_for[:2] in ("", has[:2]):
        return fields
    venv = node.part("facts").venv
    python = f"{venv}/bin/python" if venv else "python3"
    again = ssh_command(
        node.node, python, "-m", "pip", "install", f"vllm=={software.vllm}"
    )
    about = "torch-other" if has else "torch-cpu"
    return node.find(about, command=_INSTALL if node.placed else again, **fields)


@check("nccl-lost")
def check_lost_nccl(node: NodeReport) -> Outcome:
    found = []
    for file in node.contents.lost if node.contents else ():
        # A wheel that was built is in the house.
        built = (
            ("--no-index", "--find-links", "wheelhouse") if "+" in file.version else ()
        )
        words = ("-m", "pip", "install", "--force-reinstall", "--no-deps", *built)
        lost, python = (
            f"{file.project}=={file.version}",
            f"{node.part('facts').venv}/bin/python",
        )
        again = ssh_command(node.node, python, *words, lost)
        command = _INSTALL if node.placed else again
        found.append(node.find("nccl-lost", lost=file, command=command))
    return found


@check("nccl-two")
def check_nccl(node: NodeReport) -> Outcome:
    known = node.part("contents").nccl
    own, its_bytes = known.get("vllm", ("", ""))
    torch, other_bytes = known.get("torch", ("", ""))
    if not its_bytes or not other_bytes:
        raise NotCheckedError("it is not known which libnccl torch and vLLM load")
    if its_bytes == other_bytes:
        return {"version": own}
    python = quoted(f"{node.part('facts').venv}/bin/python")
    return node.find("nccl-two", vllm=own, torch=torch, python=python)


@check("compiler")
def check_compilers(node: NodeReport) -> Outcome:
    has = node.health_fact("compilers")
    if not node.part("facts").venv:
        raise NotCheckedError(_UNNAMED)
    lacking = [] if has.compiler else [node.find("compiler")]
    lacking += [] if has.python_h else [node.find("python-header")]
    return lacking or {"header": has.python_h}


# What containers get: that an engine or the image is missing, or refuses, `up` says as well


@check("engine", "engine-rdma")
def check_engine(node: NodeReport) -> Outcome:
    said, disk = node.engine, node.engine.storage
    fields = {"version": said.version, "storage": disk.folder, "free": disk.free / 1e9}
    verbs = make_fine("engine-rdma", node.node)
    if closed := said.closed:
        command = ssh_command(node.node, "sudo", "chmod", "a+rw", *closed)
        verbs = node.find("engine-rdma", files=", ".join(closed), command=command)
    return [make_fine("engine", node.node, program=said.program, **fields), verbs]


@check("engine-gpu")
def check_gpu_way(node: NodeReport) -> Outcome:
    said, driver = node.engine, node.driver
    if not said.spec:
        docker = said.program.endswith("docker")
        lacking = node.find("engine-hook" if docker else "engine-gpu")
        return {"way": "by NVIDIA's hook, --gpus"} if docker and said.hook else lacking
    if said.driver in ("", driver):
        return {"way": f"by {said.spec}, which is for driver {driver}"}
    kept = said.spec.startswith("/var/run/")  # by the toolkit, from 1.18 on
    made = ("nvidia-ctk", "cdi", "generate", f"--output={said.spec}")
    words = ("systemctl", "restart", "nvidia-cdi-refresh.service") if kept else made
    fields = {"spec": said.spec, "old": said.driver, "driver": driver}
    return node.find(
        "cdi-stale", command=ssh_command(node.node, "sudo", *words), **fields
    )


@check("image-cpu")
def check_image_cpu(node: NodeReport) -> Outcome:
    cpu, machine = node.engine.cpu, node.host.system.machine
    require(
        (cpu and machine) or None, "the image is not there, or no CPU is named here"
    )
    fields = {"cpu": cpu, "machine": machine, "program": node.engine.program}
    return (
        fields if _CPUS.get(cpu, cpu) == machine else node.find("image-cpu", **fields)
    )
