"""Judge a machine by what it says of itself: memory, limits, log of the kernel, GPU. Pure.

Each check says that it is well and what was seen, what is wrong, or why it was not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from patchkit.cluster.health.node_health import GpuUser
from patchkit.cluster.launch.survey import memlock_cure
from patchkit.cluster.ssh.ssh import there
from patchkit.doctor.log import log_findings
from patchkit.doctor.node_judge import NodeJudge, limits
from patchkit.doctor.peers.check import NotCheckedError, check, require, unknown
from patchkit.doctor.peers.report import NodeReport
from patchkit.doctor.peers.situation import facts_for_causes
from patchkit.doctor.python import PYTHON_CHECKS
from patchkit.doctor.symptoms.diagnosis import read_log
from patchkit.finding import Finding, Level
from patchkit.runtime.host.hardware import target_of
from patchkit.runtime.rules.releases import within
from patchkit.units import KIB_PER_GIB

_UNIFIED = ("gb10", "thor")
# NVML's clocksThrottleReasons that are no choice of the user's: nvml.h.
_THROTTLED = {0x8: "hardware", 0x20: "heat", 0x40: "heat", 0x80: "power brake"}
_NO_MEMORY = "the kernel does not tell how much memory there is"
_MISMATCH = "mismatch"  # NVML_ERROR_LIB_RM_VERSION_MISMATCH in NVML's words


def machine_findings(report: NodeReport) -> Iterator[Finding]:
    """Yield what is wrong with one machine and its Python, what is well, what was not looked at."""
    if report.facts is None or report.health is None:
        part = "facts" if report.facts is None else "health"
        yield unknown("machine", report.node, report.why_not(part))
        return
    judge = NodeJudge(report, report.facts, report.health)
    for look in (*_CHECKS, *PYTHON_CHECKS):
        yield from look(judge)


@check("memory-left")
def check_memory(judge: NodeJudge) -> Iterator[Finding]:
    memory = require(judge.facts.host.memory, _NO_MEMORY)
    serves = bool(judge.report.processes)
    sizes = {"available": memory.available // KIB_PER_GIB, "total": memory.total // KIB_PER_GIB}
    shared = target_of(judge.facts.host) in _UNIFIED
    if serves and shared and memory.available < limits().left_gib * KIB_PER_GIB:
        yield judge.say("memory-left", **sizes)
    elif not serves and memory.available < memory.total // 2:
        command = there(judge.node, "ps", "-eo", "rss,pid,args", "--sort=-rss")
        yield judge.say("memory-taken", command=command, **sizes)
    else:
        yield judge.fine("memory-left", **sizes)


@check("page-cache")
def check_page_cache(judge: NodeJudge) -> Iterator[Finding]:
    cache = require(judge.health.page_cache, judge.health.why_not("page_cache"))
    memory = require(judge.facts.host.memory, _NO_MEMORY)
    if cache > memory.total // 4 and not judge.report.processes:
        drop = there(judge.node, "sudo", "sh", "-c", "sync; echo 3 > /proc/sys/vm/drop_caches")
        yield judge.say("page-cache", cache=cache // KIB_PER_GIB, command=drop)
    else:
        yield judge.fine("page-cache", cache=cache // KIB_PER_GIB)


@check("oom-kills")
def check_oom_kills(judge: NodeJudge) -> Iterator[Finding]:
    if kills := require(judge.health.oom_kills, judge.health.why_not("oom_kills")):
        command = there(judge.node, "sudo", "journalctl", "-k", "-b", "--grep=Killed process")
        yield judge.say("oom-kills", kills=kills, command=command)
    else:
        yield judge.fine("oom-kills")


@check("memory-guard")
def check_memory_guard(judge: NodeJudge) -> Iterator[Finding]:
    guards = require(judge.health.guards, judge.health.why_not("guards"))
    memory = require(judge.facts.host.memory, _NO_MEMORY)
    if not memory.swap_total and not guards and target_of(judge.facts.host) in _UNIFIED:
        command = there(judge.node, "sudo", "apt", "install", "earlyoom")
        yield judge.say("memory-guard", command=command)
    else:
        swap = f"{memory.swap_total // KIB_PER_GIB} GiB of swap"
        yield judge.fine("memory-guard", guards=", ".join((*guards, swap)))


@check("kernel-log")
def check_kernel_log(judge: NodeJudge) -> Iterator[Finding]:
    if judge.health.kernel is None:
        hint = there(judge.node, "sudo", "dmesg", "--level=emerg,alert,crit,err,warn")
        raise NotCheckedError(judge.health.why_not("kernel"), hint)
    lines = [line.replace("\n", " ") for line in judge.health.kernel]
    text = "".join(f"{line}\n" for line in lines).encode(errors="replace")
    # Not whole: most lines of the log were left out.
    read = read_log([text], facts_for_causes(judge.report), whole=False)
    findings = log_findings(read, nodes=[judge.node] * (len(lines) + 1))
    bad = (Level.ERROR, Level.WARNING)
    found = [each for each in findings if each.about != "unknown" and each.level in bad]
    yield from found or [judge.fine("kernel-log", count=len(lines))]


@check("clock-sync")
def check_clock_sync(judge: NodeJudge) -> Iterator[Finding]:
    if judge.health.synced is None:
        raise NotCheckedError(judge.health.why_not("synced"), "timedatectl")
    if judge.health.synced:
        yield judge.fine("clock-sync")
    else:
        command = there(judge.node, "sudo", "timedatectl", "set-ntp", "true")
        yield judge.say("clock-sync", command=command)


# The GPU


@check("gpu-throttled")
def check_gpu(judge: NodeJudge) -> Iterator[Finding]:
    why = judge.health.why_not("gpu")
    if _MISMATCH in why:
        yield judge.say("gpu-mismatch", reason=why)
        return
    none = "" if judge.facts.host.gpus else "no GPU is found here: "
    gpu = require(judge.health.gpu, f"{none}{why}")
    throttled = require(gpu.throttled, "nvidia-smi does not tell why clocks are held down")
    shown = {
        "celsius": _with_unit(gpu.celsius, "°C"),
        "watts": _with_unit(gpu.watts, "W"),
        "mhz": _with_unit(gpu.mhz, "MHz"),
        "busy": _with_unit(gpu.busy, "%"),
    }
    reasons = {word for bit, word in _THROTTLED.items() if throttled & bit}
    slow, busy = limits().stuck_mhz, limits().busy_percent
    stuck = (gpu.mhz or slow + 1) <= slow and (gpu.busy or 0) >= busy
    if reasons:
        command = there(judge.node, "nvidia-smi", "-q", "-d", "PERFORMANCE,TEMPERATURE,POWER")
        words = " and ".join(sorted(reasons))
        yield judge.say("gpu-throttled", reasons=words, command=command, **shown)
    elif stuck and target_of(judge.facts.host) == "gb10":
        yield judge.say("gpu-stuck", **shown)
    else:
        yield judge.fine("gpu-throttled", **shown)


def _with_unit(value: float | None, unit: str) -> str:
    return f"? {unit}" if value is None else f"{value:.0f} {unit}"


@check("gpu-others")
def check_gpu_users(judge: NodeJudge) -> Iterator[Finding]:
    users = require(judge.health.gpu_users, judge.health.why_not("gpu_users"))
    container = require(judge.health.container, judge.health.why_not("container"))
    processes = require(judge.report.processes, judge.report.why_not("processes"))
    own = {each.pid for each in processes}
    others = [each for each in users if each.pid not in own]
    if others and container.kind:
        raise NotCheckedError("in a container processes have other numbers than the driver says")
    if others:
        pids = ",".join(str(each.pid) for each in others)
        command = there(judge.node, "ps", "-o", "pid,user,etime,args", "-p", pids)
        about = "gpu-others" if own else "gpu-taken"
        shown = ", ".join(map(_describe_process, others))
        yield judge.say(about, processes=shown, command=command)
    else:
        yield judge.fine("gpu-others", count=len(users))


def _describe_process(user: GpuUser) -> str:
    about = [user.name, f"of {user.user}" if user.user else ""]
    about.append("" if user.mib is None else f"{user.mib} MiB")
    words = " ".join(filter(None, about))
    return f"{user.pid} ({words})" if words else str(user.pid)


@check("driver")
def check_driver(judge: NodeJudge) -> Iterator[Finding]:
    driver, software = judge.driver, judge.facts.host.software
    cuda = software.cuda if software else ""
    oldest = limits().drivers.get(cuda.partition(".")[0], "")
    if not driver:
        raise NotCheckedError("no driver of a GPU says its version")
    if oldest and within(driver, f"<{oldest}"):
        yield judge.say("driver", driver=driver, cuda=cuda, oldest=oldest)
    elif within(driver, ">=590,<595"):
        yield judge.say("driver-590", driver=driver)
    elif oldest:
        yield judge.fine("driver", driver=driver, cuda=cuda)
    else:
        raise NotCheckedError(f"{driver} is there, and no torch says for which CUDA it is")


# Limits


@check("unit-memlock")
def check_unit_limits(judge: NodeJudge) -> Iterator[Finding]:
    unit, active = judge.health.unit, [each.name for each in judge.facts.host.rdma if each.active]
    if not active:
        yield judge.fine("unit-memlock", what="no RDMA device is active: nothing is registered")
    elif unit is None or not unit.known:
        raise NotCheckedError(judge.health.why_not("unit") or "its limits are hidden")
    elif unit.memlock is None or unit.locks:
        yield judge.fine("unit-memlock", what="the running server may lock all memory")
    else:
        command = there(judge.node, *memlock_cure())
        said = judge.say("unit-memlock", mib=unit.memlock >> 20, command=command)
        # Where its manager is limited as well, that is the cause, and is said as such.
        known = judge.facts.memlock is not None
        yield replace(said, level=Level.NOTE) if known else said


@check("container-pids")
def check_container(judge: NodeJudge) -> Iterator[Finding]:
    its = require(judge.health.container, judge.health.why_not("container"))
    process = require(judge.health.process, judge.health.why_not("process"))
    if not its.kind:
        yield judge.fine("container-pids", what="this is no container")
        return
    found = []
    if its.pids is not None and its.pids < limits().threads:
        found.append(judge.say("container-pids", limit=its.pids, now=its.pids_now or 0))
    if its.shm is not None and its.shm < limits().shm_mib << 20:
        found.append(judge.say("container-shm", mib=its.shm >> 20))
    active = any(each.active for each in judge.facts.host.rdma)
    if active and process.memlock is not None and not process.locks:
        found.append(judge.say("container-memlock", mib=process.memlock >> 20))
    yield from found or [
        judge.fine("container-pids", what=f"{its.kind} limits nothing that matters")
    ]


@check("rdma-closed")
def check_rdma_files(judge: NodeJudge) -> Iterator[Finding]:
    its = require(judge.health.container, judge.health.why_not("container"))
    active = sum(each.active for each in judge.facts.host.rdma)
    if not active:
        yield judge.fine("rdma-closed", what="no RDMA device is active")
    elif its.verbs_open < active:
        counts = {"open": its.verbs_open, "count": its.verbs, "active": active}
        command = there(judge.node, "ls", "-l", "/dev/infiniband")
        closed = "container-rdma" if its.kind else "rdma-closed"
        yield judge.say(closed, command=command, **counts)
    else:
        yield judge.fine("rdma-closed", what=f"{its.verbs_open} files of RDMA devices open")


_CHECKS: tuple[Callable[[NodeJudge], Iterator[Finding]], ...] = (
    *(check_driver, check_gpu, check_gpu_users, check_kernel_log),
    *(check_memory, check_page_cache, check_oom_kills, check_memory_guard),
    *(check_unit_limits, check_container, check_rdma_files),
    check_clock_sync,
)
