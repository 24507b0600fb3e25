"""Judge a machine by its facts, and the Python or the container image that has vLLM. Pure."""

from typing import Any

from patchkit.cluster.agent.health import DiskRoom
from patchkit.cluster.ssh.ssh import HERE, unchecked
from patchkit.doctor.peers.node_report import (
    NodeReport,
    NotCheckedError,
    Outcome,
    check,
    facts_for_causes,
    require,
)
from patchkit.doctor.symptoms.diagnosis import read_log
from patchkit.doctor.symptoms.findings import log_findings
from patchkit.finding import Findings, Level
from patchkit.quoting import quoted
from patchkit.records import RECIPES, read_toml
from patchkit.runtime.rules.releases import within
from patchkit.runtime.serve.command_notes import kernel_advice
from patchkit.target import is_unified
from patchkit.units import KIB_PER_GIB

_MISMATCH = "mismatch"  # in NVML's message for NVML_ERROR_LIB_RM_VERSION_MISMATCH
_UNNAMED = "no environment with vLLM is known here: name it with --venv"
_INSTALL = "patchkit cluster install"
_MACHINE = read_toml(
    dict[str, Any],
    RECIPES / "doctor" / "machine.toml",
    key="machine",
)


def disk_trouble(disk: DiskRoom) -> str:
    """Return why nothing can be written to a disk now or soon, "" if it has room."""
    if disk.files == 0:
        return "no file can be made"

    if disk.free < _MACHINE["full_bytes"]:
        return f"{disk.free / 1e6:.0f} MB are free"

    return ""


def machine_findings(node: NodeReport) -> Findings:
    """Yield the findings of all checks of one machine: faults, OK, and what was not checked."""
    for part in ("facts", "health"):
        if getattr(node, part) is None:
            yield unchecked("machine", node.node, node.why_not(part))
            return

    of_machine = (
        check_driver,
        check_gpu,
        check_gpu_users,
        check_kernel_log,
        check_memory,
        check_rdma_files,
    )
    of_python = (
        check_torch,
        check_lost_nccl,
        check_nccl,
        check_compilers,
        check_flashinfer,
    )
    of_image = (
        check_engine,
        check_rdma_rights,
        check_gpu_way,
        check_image_cpu,
    )
    of_engine = of_image if node.part("facts").image else of_python
    for run_check in (*of_machine, *of_engine):
        yield from run_check(node)


@check("memory-left")
def check_memory(node: NodeReport) -> Outcome:
    reason = "the kernel does not tell how much memory there is"
    memory = require(node.host.memory, reason)
    sizes = {
        "available": memory.available // KIB_PER_GIB,
        "total": memory.total // KIB_PER_GIB,
    }

    has_room = sizes["available"] >= _MACHINE["left_gib"]

    if has_room or not is_unified(node.host.target) or not node.processes:
        return sizes

    return node.find("memory-left", **sizes)


@check("kernel-log")
def check_kernel_log(node: NodeReport) -> Outcome:
    try:
        kernel_lines = node.health_fact("kernel")
    except NotCheckedError as error:
        levels = "--level=emerg,alert,crit,err,warn"
        hint = node.command("sudo", "dmesg", levels)
        raise NotCheckedError(error.what, hint=hint) from None

    lines = [line.replace("\n", " ") for line in kernel_lines]
    text = "".join(f"{line}\n" for line in lines)

    # The node sent only some lines of its log: a missing text proves nothing.
    chunks = [text.encode(errors="replace")]
    log = read_log(chunks, facts_for_causes(node), whole=False)

    faults = []
    writers = [node.node] * (len(lines) + 1)
    for finding in log_findings(log, nodes=writers):
        is_bad = finding.level in (Level.ERROR, Level.WARNING)
        if is_bad and finding.about != "unknown":
            faults.append(finding)

    return faults or {"count": len(lines)}


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

    reason = "nvidia-smi does not tell why clocks are held down"
    throttled = require(gpu.throttled, reason)

    figures = {}
    for name, unit in _MACHINE["units"].items():
        value = getattr(gpu, name)
        figures[name] = f"? {unit}" if value is None else f"{value:.0f} {unit}"

    reasons = {word for bit, word in _MACHINE["throttled"] if throttled & bit}
    if reasons:
        shown = " and ".join(sorted(reasons))
        return node.find(
            "gpu-throttled",
            reasons=shown,
            **figures,
        )

    is_busy = (gpu.busy or 0) >= _MACHINE["busy_percent"]
    is_slow = 0 < (gpu.mhz or 0) <= _MACHINE["stuck_mhz"]
    if node.host.target == "gb10" and is_busy and is_slow:
        return node.find("gpu-stuck", **figures)

    return figures


@check("gpu-others")
def check_gpu_users(node: NodeReport) -> Outcome:
    users = node.health_fact("gpu_users")
    container = node.health_fact("container")
    ranks = {process.pid for process in node.part("processes")}

    others = [user for user in users if user.pid not in ranks]
    if not others:
        return {"count": len(users)}

    if container.kind:
        reason = "in a container processes have other numbers than the driver says"
        raise NotCheckedError(reason)

    shown = []
    for user in others:
        owner = f" of {user.user}" if user.user else ""
        memory = "" if user.mib is None else f" {user.mib} MiB"
        words = f"{user.name}{owner}{memory}".strip()
        shown.append(f"{user.pid} ({words})")

    return node.find(
        "gpu-others" if ranks else "gpu-taken",
        processes=", ".join(shown),
        pids=",".join(str(user.pid) for user in others),
    )


@check("driver")
def check_driver(node: NodeReport) -> Outcome:
    software = node.host.software
    cuda = software.cuda if software else ""
    major = cuda.partition(".")[0]
    oldest = _MACHINE["drivers"].get(major, "")

    driver = node.driver
    if not oldest:
        reason = f"{driver} is there, and no torch says for which CUDA it is"
        raise NotCheckedError(reason)

    return node.find("driver", oldest=oldest) if within(driver, f"<{oldest}") else {}


@check("rdma-closed")
def check_rdma_files(node: NodeReport) -> Outcome:
    container = node.health_fact("container")
    active = sum(device.active for device in node.host.rdma)
    counts = {"container": container, "active": active}
    if container.verbs_open >= active:
        return counts

    return node.find("container-rdma" if container.kind else "rdma-closed", **counts)


# The Python


@check("torch-cpu")
def check_torch(node: NodeReport) -> Outcome:
    software = node.host.software
    if software is None or not (software.vllm and software.torch):
        raise NotCheckedError(_UNNAMED)

    if not software.cuda and not node.host.gpus:
        raise NotCheckedError("torch is for CPUs, and there is no GPU")

    local_version = software.vllm.partition("+")[2]
    built_for = ""
    if local_version.startswith("cu"):
        built_for = local_version.removeprefix("cu")[:2]

    cuda = software.cuda.replace(".", "")

    if cuda and cuda.startswith(built_for):
        return {}

    command = _install_command(node, f"vllm=={software.vllm}")
    about = "torch-other" if software.cuda else "torch-cpu"
    return node.find(about, command=command)


def _install_command(node: NodeReport, *words: str) -> str:
    """Return the command that installs again: with pip, unless `up` has started this node."""
    if node.placed:
        return _INSTALL

    venv = node.part("facts").venv
    python = f"{venv}/bin/python" if venv else "python3"
    return node.command(python, "-m", "pip", "install", *words)


@check("nccl-lost")
def check_lost_nccl(node: NodeReport) -> Outcome:
    findings = []
    for lost in node.contents.lost if node.contents else ():
        words = ["--force-reinstall", "--no-deps"]
        if "+" in lost.version:  # a wheel that was built here is in no public index
            words += ("--no-index", "--find-links", "wheelhouse")

        command = _install_command(node, *words, f"{lost.project}=={lost.version}")

        finding = node.find("nccl-lost", lost=lost, command=command)
        findings.append(finding)

    return findings


@check("nccl-two")
def check_nccl(node: NodeReport) -> Outcome:
    copies = node.part("contents").nccl
    digests = {
        loader: sha256 for loader, (_version, sha256) in copies.items() if sha256
    }
    if not digests.keys() >= {"vllm", "torch"}:
        raise NotCheckedError("it is not known which libnccl torch and vLLM load")

    if digests["vllm"] == digests["torch"]:
        return {}

    python = quoted(f"{node.part('facts').venv}/bin/python")
    return node.find("nccl-two", python=python)


@check("compiler")
def check_compilers(node: NodeReport) -> Outcome:
    compilers = node.health_fact("compilers")
    if not node.part("facts").venv:
        raise NotCheckedError(_UNNAMED)

    lacking = []

    if not compilers.compiler:
        lacking.append(node.find("compiler"))

    if not compilers.python_h:
        lacking.append(node.find("python-header"))

    return lacking or {"header": compilers.python_h}


@check("flashinfer")
def check_flashinfer(node: NodeReport) -> Outcome:
    software = require(node.host.software, _UNNAMED)
    kernels = require(software.flashinfer, "FlashInfer is not installed")
    require(node.placed or node.node == HERE or None, "nothing was started")
    asked = node.placed.modules.split() if node.placed else []
    lacking = [name for name in asked if not kernels.has(name)]

    findings = [
        node.find("flashinfer", advice=row)
        for row in kernel_advice(kernels, software.vllm)
    ]
    if lacking:
        names = ", ".join(lacking)
        findings.append(node.find("flashinfer-modules", names=names))
    return findings or {"count": len(kernels.modules)}


# The container engine and the image; `up`, too, refuses if one is missing or does not answer


@check("engine")
def check_engine(node: NodeReport) -> Outcome:
    return {"free": node.engine.storage.free / 1e9}


@check("engine-rdma")
def check_rdma_rights(node: NodeReport) -> Outcome:
    closed = node.engine.closed
    if not closed:
        return {}

    command = node.command("sudo", "chmod", "a+rw", *closed)
    return node.find("engine-rdma", files=", ".join(closed), command=command)


@check("engine-gpu")
def check_gpu_way(node: NodeReport) -> Outcome:
    engine = node.engine
    driver = node.driver
    if not engine.spec:
        if not engine.program.endswith("docker"):
            return node.find("engine-gpu")
        if not engine.hook:
            return node.find("engine-hook")
        return {"way": "by NVIDIA's hook, --gpus"}

    if engine.driver in ("", driver):
        return {"way": f"by {engine.spec}, which is for driver {driver}"}

    words = ["nvidia-ctk", "cdi", "generate", f"--output={engine.spec}"]
    if engine.spec.startswith("/var/run/"):  # by the toolkit, from 1.18 on
        words = ["systemctl", "restart", "nvidia-cdi-refresh.service"]

    return node.find("cdi-stale", command=node.command("sudo", *words))


@check("image-cpu")
def check_image_cpu(node: NodeReport) -> Outcome:
    cpu = node.engine.cpu
    machine = node.host.system.machine

    if not cpu or not machine:
        raise NotCheckedError("the image is not there, or no CPU is named here")

    is_same = _MACHINE["cpus"].get(cpu, cpu) == machine
    return {} if is_same else node.find("image-cpu")
