"""Judge a machine and the Python that has vLLM by what they say of themselves. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from patchkit.finding import Finding, Level
from patchkit.quoting import quoted
from patchkit.runtime.doctor.log import log_findings
from patchkit.runtime.doctor.texts import told
from patchkit.runtime.health.closer import NodeHealth
from patchkit.runtime.host.advice import remarks
from patchkit.runtime.host.target import target_of
from patchkit.runtime.launch.survey import memlock_cure
from patchkit.runtime.on_node.node_facts import NodeFacts
from patchkit.runtime.peers.report import NodeReport
from patchkit.runtime.remote.ssh import there
from patchkit.runtime.rules.releases import within
from patchkit.runtime.symptoms.diagnosis import read_log

_FILE = "machine.toml"
_GIB = 1 << 20  # KiB
_LEFT = 10 * _GIB  # KiB that have to be left: open-gpu-kernel-modules#1358
_CACHE = 4  # a page cache of more than a quarter of the memory is large
_THREADS = 8192  # processes and threads; podman gives 2048
_SHM = 1 << 30
_LOCKED = 1 << 30
_UNIFIED = ("gb10", "thor")
# NVML's clocksThrottleReasons that are no choice of the user's: nvml.h.
_THROTTLED = {0x8: "hardware", 0x20: "heat", 0x40: "heat", 0x80: "power brake"}

Check = Callable[[NodeReport, NodeFacts, NodeHealth], Iterator[Finding]]


def machine_findings(report: NodeReport) -> Iterator[Finding]:
    """Yield what is wrong with one machine, what is well, and what was not looked at.

    What `probe` remarks of it is said by `judgement`, with what is between machines.
    """
    facts, health = report.facts, report.health
    if facts is None:
        yield _unknown(report, "machine", report.why_not("facts"))
        return
    if health is None:
        yield _unknown(report, "machine", report.why_not("health"))
        return
    for about, (needs, check) in _CHECKS.items():
        reasons = [health.unread[need] for need in needs if need in health.unread]
        found = list(check(report, facts, health)) if not reasons else []
        yield from found
        if reasons:
            yield _unknown(report, about, reasons[0])
        elif not any(each.level is not Level.NOTE for each in found):
            yield Finding(level=Level.OK, where=report.node, about=about, what="fine")


def _unknown(report: NodeReport, about: str, why: str) -> Finding:
    what = f"not checked: {why}"
    return Finding(level=Level.UNKNOWN, where=report.node, about=about, what=what)


def _memory(report: NodeReport, facts: NodeFacts, health: NodeHealth) -> Iterator[Finding]:
    memory, target = facts.host.memory, target_of(facts.host)
    if memory is None or target not in _UNIFIED:
        return
    sizes = {"available": memory.available // _GIB, "total": memory.total // _GIB}
    serves = bool(report.processes)
    if serves and memory.available < _LEFT:
        yield told(_FILE, "memory-left", report.node, **sizes)
    if not serves and memory.available < memory.total // 2:
        command = there(report.node, "ps", "-eo", "rss,pid,args", "--sort=-rss")
        yield told(_FILE, "memory-taken", report.node, command=command, **sizes)
    cache = health.page_cache or 0
    if not serves and cache > memory.total // _CACHE:
        drop = there(report.node, "sudo", "sh", "-c", "sync; echo 3 > /proc/sys/vm/drop_caches")
        yield told(_FILE, "page-cache", report.node, cache=cache // _GIB, command=drop)
    if not memory.swap_total and not health.guards and "guards" not in health.unread:
        yield told(_FILE, "memory-guard", report.node)


def _kernel(report: NodeReport, _facts: NodeFacts, health: NodeHealth) -> Iterator[Finding]:
    if not health.kernel:
        return
    lines = [line.replace("\n", " ") for line in health.kernel]
    text = "".join(f"{line}\n" for line in lines).encode(errors="replace")
    writers = [report.node] * (len(lines) + 1)
    for each in log_findings(read_log([text], facts_for_causes(report)), nodes=writers):
        if each.about != "unknown" and each.level in (Level.ERROR, Level.WARNING):
            yield each


def _clock(report: NodeReport, _facts: NodeFacts, health: NodeHealth) -> Iterator[Finding]:
    if health.synced is False:
        yield told(_FILE, "clock-sync", report.node)


def _gpu(report: NodeReport, _facts: NodeFacts, health: NodeHealth) -> Iterator[Finding]:
    gpu = health.gpu
    if gpu is None:
        return
    reasons = {word for bit, word in _THROTTLED.items() if (gpu.throttled or 0) & bit}
    if reasons:
        figures = {"celsius": gpu.celsius, "watts": gpu.watts}
        command = there(report.node, "nvidia-smi", "-q", "-d", "PERFORMANCE,TEMPERATURE,POWER")
        words = " and ".join(sorted(reasons))
        yield told(_FILE, "gpu-throttled", report.node, reasons=words, command=command, **figures)
    own = {each.pid for each in report.processes or ()}
    others = [each for each in gpu.processes or () if each not in own]
    if others and own:
        command = there(report.node, "ps", "-o", "pid,user,args", "-p", ",".join(map(str, others)))
        shown = ", ".join(map(str, others))
        yield told(_FILE, "gpu-others", report.node, processes=shown, command=command)


def _driver(report: NodeReport, facts: NodeFacts, _health: NodeHealth) -> Iterator[Finding]:
    driver = next((gpu.driver for gpu in facts.host.gpus if _is_version(gpu.driver)), "")
    cuda = facts.host.software.cuda if facts.host.software else ""
    if driver and cuda.startswith("13") and within(driver, "<580"):
        yield told(_FILE, "driver", report.node, driver=driver, cuda=cuda)
    elif driver and within(driver, ">=590,<595"):
        yield told(_FILE, "driver-590", report.node, driver=driver)


def _limits(report: NodeReport, facts: NodeFacts, health: NodeHealth) -> Iterator[Finding]:
    unit = health.unit
    active = any(each.active for each in facts.host.rdma)
    if unit and unit.memlock is not None and unit.memlock < _LOCKED and active:
        command = there(report.node, *memlock_cure())
        yield told(_FILE, "unit-memlock", report.node, mib=unit.memlock >> 20, command=command)


def _container(report: NodeReport, facts: NodeFacts, health: NodeHealth) -> Iterator[Finding]:
    its = health.container
    if not its.kind:
        return
    if its.pids is not None and its.pids < _THREADS:
        yield told(_FILE, "container-pids", report.node, limit=its.pids)
    if its.shm is not None and its.shm < _SHM:
        yield told(_FILE, "container-shm", report.node, mib=its.shm >> 20)
    active = sum(each.active for each in facts.host.rdma)
    if active and its.verbs_open < active:
        counts = {"open": its.verbs_open, "count": its.verbs, "active": active}
        yield told(_FILE, "container-rdma", report.node, **counts)


def _compilers(report: NodeReport, facts: NodeFacts, health: NodeHealth) -> Iterator[Finding]:
    software, has = facts.host.software, health.compilers
    if software is None or not software.vllm:
        return
    if not has.has("cc", "gcc"):
        why = "Triton compiles a launcher with it at the first request"
        fields = {"program": "C compiler", "package": "build-essential", "reason": why}
        yield told(_FILE, "compiler", report.node, **fields)
    if not has.python_h:
        why = "Triton's launcher needs it: `Python.h: No such file or directory`"
        fields = {"program": "Python.h", "package": "python3-dev", "reason": why}
        yield told(_FILE, "compiler", report.node, **fields)


def _pins(report: NodeReport, facts: NodeFacts, health: NodeHealth) -> Iterator[Finding]:
    contents, software = report.contents, facts.host.software
    if contents is None or software is None or not software.vllm:
        return
    for name, wanted in health.pins.items():
        installed = contents.versions.get(name, "")
        if installed and installed.partition("+")[0] != wanted.partition("+")[0]:
            yield told(
                _FILE,
                "python-pins",
                report.node,
                vllm=software.vllm,
                wanted=f"{name} {wanted}",
                installed=installed,
            )
    own, other = contents.nccl, contents.torch_nccl
    if own.sha256 and other.sha256 and own.sha256 != other.sha256:
        versions = {"vllm": own.version, "torch": other.version}
        yield told(_FILE, "nccl-two", report.node, python=quoted(software.python), **versions)


def _caches(report: NodeReport, _facts: NodeFacts, health: NodeHealth) -> Iterator[Finding]:
    contents = report.contents
    present = contents.versions.get("flashinfer-python", "") if contents else ""
    for cache in health.compilers.caches:
        versions = {name.partition("/")[0] for name in cache.names}
        others = sorted(each for each in versions if _is_version(each) and each != present)
        if cache.owner == "flashinfer" and present and others:
            fields = {"folder": cache.folder, "others": ", ".join(others)}
            yield told(_FILE, "jit-cache", report.node, present=f"FlashInfer {present}", **fields)


def _is_version(text: str) -> bool:
    return re.fullmatch(r"\d+(?:\.\d+)+.*", text) is not None


_CHECKS: dict[str, tuple[tuple[str, ...], Check]] = {
    "memory": (("page_cache",), _memory),
    "kernel-log": (("kernel",), _kernel),
    "clock-sync": (("synced",), _clock),
    "gpu-state": (("gpu",), _gpu),
    "driver": ((), _driver),
    "unit-limits": (("unit",), _limits),
    "container": (("container",), _container),
    "compilers": (("compilers",), _compilers),
    "python-pins": (("pins",), _pins),
    "jit-caches": (("compilers",), _caches),
}
"""What is looked at, by the id of the check: the facts that it needs, and who judges them."""


def facts_for_causes(report: NodeReport) -> dict[str, str]:
    """Return the facts of a node that causes of symptoms hang on."""
    facts, health = report.facts, report.health
    if facts is None:
        return {}
    host = facts.host
    driver = next((gpu.driver for gpu in host.gpus if _is_version(gpu.driver)), "")
    found = {**host.versions, "driver": driver, "target": target_of(host) or ""}
    found["kernel"] = ".".join(re.findall(r"\d+", host.system.kernel)[:4])
    found["linger"] = "yes" if facts.linger else "no"
    if host.memory:
        taken = any(each.about == "kernel-reserve" for each in remarks(host))
        found["kernel_reserve"] = "yes" if taken else "no"
        found["memory"] = "short" if host.memory.available * 10 < host.memory.total else "enough"
    if health:
        limit = health.unit.memlock if health.unit else facts.memlock
        found["memlock"] = "unlimited" if limit is None else "limited"
        found["container"] = "yes" if health.container.kind else "no"
        if health.page_cache is not None and host.memory:
            large = health.page_cache * _CACHE > host.memory.total
            found["page_cache"] = "large" if large else "small"
    env = report.placed.env if report.placed else None
    if env:
        found["topology"] = env.facts.get("topology", "")
    return {name: value for name, value in found.items() if value}
