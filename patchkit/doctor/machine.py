"""Judge a machine by what it says of itself: memory, limits, log of the kernel, GPU. Pure.

Each check says that it is well and what was seen, what is wrong, or why it was not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from patchkit.cluster.health.closer import GpuUser
from patchkit.cluster.launch.survey import memlock_cure
from patchkit.cluster.ssh.ssh import there
from patchkit.doctor.log import log_findings
from patchkit.doctor.node_judge import NodeJudge, limits
from patchkit.doctor.peers.report import NodeReport
from patchkit.doctor.peers.situation import facts_for_causes
from patchkit.doctor.python import PYTHON_CHECKS
from patchkit.doctor.symptoms.diagnosis import read_log
from patchkit.finding import Finding, Level
from patchkit.runtime.host.nvml import GpuState
from patchkit.runtime.host.target import target_of
from patchkit.runtime.rules.releases import within
from patchkit.units import KIB_PER_GIB

_UNIFIED = ("gb10", "thor")
# NVML's clocksThrottleReasons that are no choice of the user's: nvml.h.
_THROTTLED = {0x8: "hardware", 0x20: "heat", 0x40: "heat", 0x80: "power brake"}
_MISMATCH = "mismatch"  # NVML_ERROR_LIB_RM_VERSION_MISMATCH in NVML's words

Check = Callable[[NodeJudge], Iterator[Finding]]


def machine_findings(report: NodeReport) -> Iterator[Finding]:
    """Yield what is wrong with one machine and its Python, what is well, what was not looked at."""
    if report.facts is None or report.health is None:
        part = "facts" if report.facts is None else "health"
        what = f"not checked: {report.why_not(part)}"
        yield Finding(level=Level.UNKNOWN, where=report.node, about="machine", what=what)
        return
    judge = NodeJudge(report, report.facts, report.health)
    for check in (*_CHECKS, *PYTHON_CHECKS):
        yield from check(judge)


def _memory(judge: NodeJudge) -> Iterator[Finding]:
    memory, serves = judge.facts.host.memory, bool(judge.report.processes)
    if memory is None:
        yield judge.unknown("memory-left", "the kernel does not tell how much there is")
        return
    sizes = {"available": memory.available // KIB_PER_GIB, "total": memory.total // KIB_PER_GIB}
    shared = target_of(judge.facts.host) in _UNIFIED
    if serves and shared and memory.available < limits().left_gib * KIB_PER_GIB:
        yield judge.say("memory-left", **sizes)
    elif not serves and memory.available < memory.total // 2:
        command = there(judge.node, "ps", "-eo", "rss,pid,args", "--sort=-rss")
        yield judge.say("memory-taken", command=command, **sizes)
    else:
        yield judge.fine("memory-left", **sizes)


def _page_cache(judge: NodeJudge) -> Iterator[Finding]:
    memory, cache = judge.facts.host.memory, judge.health.page_cache
    if memory is None or cache is None:
        why = judge.health.why_not("page_cache") or "the kernel does not tell how much memory is"
        yield judge.unknown("page-cache", why)
    elif cache > memory.total // 4 and not judge.report.processes:
        drop = there(judge.node, "sudo", "sh", "-c", "sync; echo 3 > /proc/sys/vm/drop_caches")
        yield judge.say("page-cache", cache=cache // KIB_PER_GIB, command=drop)
    else:
        yield judge.fine("page-cache", cache=cache // KIB_PER_GIB)


def _huge_pages(judge: NodeJudge) -> Iterator[Finding]:
    if (huge := judge.health.huge) is None:
        yield judge.unknown("huge-pages", judge.health.why_not("huge"))
    elif huge:
        command = there(judge.node, "sudo", "sysctl", "vm.nr_hugepages=0")
        yield judge.say("huge-pages", huge=huge / KIB_PER_GIB, command=command)
    else:
        yield judge.fine("huge-pages")


def _oom(judge: NodeJudge) -> Iterator[Finding]:
    memory, guards = judge.facts.host.memory, judge.health.guards
    if (kills := judge.health.oom_kills) is None:
        yield judge.unknown("oom-kills", judge.health.why_not("oom_kills"))
    elif kills:
        command = there(judge.node, "sudo", "journalctl", "-k", "-b", "--grep=Killed process")
        yield judge.say("oom-kills", kills=kills, command=command)
    else:
        yield judge.fine("oom-kills")
    if guards is None or memory is None:
        why = judge.health.why_not("guards") or "the kernel does not tell of its memory"
        yield judge.unknown("memory-guard", why)
    elif not memory.swap_total and not guards and target_of(judge.facts.host) in _UNIFIED:
        command = there(judge.node, "sudo", "apt", "install", "earlyoom")
        yield judge.say("memory-guard", command=command)
    else:
        swap = f"{memory.swap_total // KIB_PER_GIB} GiB of swap"
        yield judge.fine("memory-guard", guards=", ".join((*guards, swap)))


def _kernel(judge: NodeJudge) -> Iterator[Finding]:
    if judge.health.kernel is None:
        why = judge.health.why_not("kernel")
        hint = there(judge.node, "sudo", "dmesg", "--level=emerg,alert,crit,err,warn")
        yield judge.unknown("kernel-log", why, hint)
        return
    lines = [line.replace("\n", " ") for line in judge.health.kernel]
    text = "".join(f"{line}\n" for line in lines).encode(errors="replace")
    # Not whole: most lines of the log were left out.
    read = read_log([text], facts_for_causes(judge.report), whole=False)
    bad = (Level.ERROR, Level.WARNING)
    writers = [judge.node] * (len(lines) + 1)
    found = [
        each
        for each in log_findings(read, nodes=writers)
        if each.about != "unknown" and each.level in bad
    ]
    yield from found or [judge.fine("kernel-log", count=len(lines))]


def _clock(judge: NodeJudge) -> Iterator[Finding]:
    if judge.health.synced is None:
        yield judge.unknown("clock-sync", judge.health.why_not("synced"), "timedatectl")
    elif judge.health.synced:
        yield judge.fine("clock-sync")
    else:
        command = there(judge.node, "sudo", "timedatectl", "set-ntp", "true")
        yield judge.say("clock-sync", command=command)


# The GPU


def _gpu(judge: NodeJudge) -> Iterator[Finding]:
    gpu, why = judge.health.gpu, judge.health.why_not("gpu")
    if gpu is None and _MISMATCH in why:
        yield judge.say("gpu-mismatch", reason=why)
    elif gpu is None:
        none = "" if judge.facts.host.gpus else "no GPU is found here: "
        yield judge.unknown("gpu-throttled", f"{none}{why}")
    elif gpu.throttled is None:
        yield judge.unknown("gpu-throttled", "NVML does not tell why clocks are held down")
    else:
        yield from _slow(judge, gpu, gpu.throttled)


def _slow(judge: NodeJudge, gpu: GpuState, throttled: int) -> Iterator[Finding]:
    shown = {
        "celsius": _shown(gpu.celsius, "°C"),
        "watts": _shown(gpu.watts, "W"),
        "mhz": _shown(gpu.mhz, "MHz"),
        "busy": _shown(gpu.busy, "%"),
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


def _shown(value: float | None, unit: str) -> str:
    return f"? {unit}" if value is None else f"{value:.0f} {unit}"


def _gpu_others(judge: NodeJudge) -> Iterator[Finding]:
    users, container = judge.health.gpu_users, judge.health.container
    own = {each.pid for each in judge.report.processes or ()}
    if users is None or judge.report.processes is None or container is None:
        why = judge.health.why_not("gpu_users", "container") or judge.report.why_not("processes")
        yield judge.unknown("gpu-others", why)
        return
    others = [each for each in users if each.pid not in own]
    if others and container.kind:
        why = "in a container processes have other numbers than the driver says"
        yield judge.unknown("gpu-others", why)
    elif others:
        pids = ",".join(str(each.pid) for each in others)
        command = there(judge.node, "ps", "-o", "pid,user,etime,args", "-p", pids)
        about = "gpu-others" if own else "gpu-taken"
        shown = ", ".join(map(_described, others))
        yield judge.say(about, processes=shown, command=command)
    else:
        yield judge.fine("gpu-others", count=len(users))


def _described(user: GpuUser) -> str:
    about = [user.name, f"of {user.user}" if user.user else ""]
    about.append("" if user.mib is None else f"{user.mib} MiB")
    words = " ".join(filter(None, about))
    return f"{user.pid} ({words})" if words else str(user.pid)


def _driver(judge: NodeJudge) -> Iterator[Finding]:
    driver, software = judge.driver, judge.facts.host.software
    cuda = software.cuda if software else ""
    oldest = limits().drivers.get(cuda.partition(".")[0], "")
    if not driver:
        yield judge.unknown("driver", "no driver of a GPU says its version")
        return
    if oldest and within(driver, f"<{oldest}"):
        yield judge.say("driver", driver=driver, cuda=cuda, oldest=oldest)
    elif within(driver, ">=590,<595"):
        yield judge.say("driver-590", driver=driver)
    elif oldest:
        yield judge.fine("driver", driver=driver, cuda=cuda)
    else:
        yield judge.unknown("driver", f"{driver} is there, and no torch says for which CUDA it is")


# Limits


def _unit_limits(judge: NodeJudge) -> Iterator[Finding]:
    unit, active = judge.health.unit, [each.name for each in judge.facts.host.rdma if each.active]
    if not active:
        yield judge.fine("unit-memlock", what="no RDMA device is active: nothing is registered")
    elif unit is None or not unit.known:
        yield judge.unknown("unit-memlock", judge.health.why_not("unit") or "its limits are hidden")
    elif unit.memlock is None or unit.locks:
        yield judge.fine("unit-memlock", what="the running server may lock all memory")
    else:
        command = there(judge.node, *memlock_cure())
        said = judge.say("unit-memlock", mib=unit.memlock >> 20, command=command)
        # Where its manager is limited as well, that is the cause, and is said as such.
        known = judge.facts.memlock is not None
        yield replace(said, level=Level.NOTE) if known else said


def _container(judge: NodeJudge) -> Iterator[Finding]:
    its, process = judge.health.container, judge.health.process
    if its is None or process is None:
        yield judge.unknown("container-pids", judge.health.why_not("container", "process"))
        return
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


def _threads(judge: NodeJudge) -> Iterator[Finding]:
    """Yield whether a control group is nearly full of threads, in a container or not."""
    its = judge.health.container
    if its is None:
        yield judge.unknown("threads", judge.health.why_not("container"))
    elif its.pids is None or its.pids_now is None:
        yield judge.fine("threads", what="no limit of processes and threads")
    else:
        figures = {"limit": its.pids, "now": its.pids_now}
        if its.pids_now * 10 > its.pids * 9:
            yield judge.say("threads", **figures)
        else:
            what = f"{its.pids_now} of {its.pids} processes and threads"
            yield judge.fine("threads", what=what)


def _rdma_files(judge: NodeJudge) -> Iterator[Finding]:
    its, active = judge.health.container, sum(each.active for each in judge.facts.host.rdma)
    if its is None:
        yield judge.unknown("rdma-closed", judge.health.why_not("container"))
    elif not active:
        yield judge.fine("rdma-closed", what="no RDMA device is active")
    else:
        counts = {"open": its.verbs_open, "count": its.verbs, "active": active}
        command = there(judge.node, "ls", "-l", "/dev/infiniband")
        closed = "container-rdma" if its.kind else "rdma-closed"
        if its.verbs_open < active:
            yield judge.say(closed, command=command, **counts)
        else:
            yield judge.fine("rdma-closed", what=f"{its.verbs_open} files of RDMA devices open")


def _firmware(judge: NodeJudge) -> Iterator[Finding]:
    if found := judge.health.firmware:
        shown = ", ".join(sorted(set(found.values())))
        one = len(set(found.values())) == 1
        yield judge.fine("firmware", shown=shown) if one else judge.say("firmware", shown=shown)
    else:
        why = judge.health.unread.get("firmware") or "there is no RDMA device"
        yield judge.unknown("firmware", why)


_CHECKS: tuple[Check, ...] = (
    *(_driver, _gpu, _gpu_others, _kernel),
    *(_memory, _page_cache, _huge_pages, _oom),
    *(_unit_limits, _container, _threads, _rdma_files, _firmware, _clock),
)
