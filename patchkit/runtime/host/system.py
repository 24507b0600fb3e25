"""Read firmware, kernel, distribution, processor and memory."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable

from patchkit.runtime.host import hardware
from patchkit.runtime.host.host import Memory, System
from patchkit.runtime.host.machine_root import Reader, ToolUnavailable, printable, whole

_DMI = "sys/class/dmi/id"
_KERNEL = "proc/sys/kernel"
_ARM = "0x41"  # the implementer Arm, whose part numbers hardware.toml has


def system(reader: Reader) -> System:
    """Return what DMI, the device tree and the kernel say."""
    cores = _cpu_blocks(reader.text("proc/cpuinfo", needed=True))
    product = reader.line(f"{_DMI}/product_name") or reader.line("proc/device-tree/model")
    if not product:
        reader.note(f"neither /{_DMI} nor /proc/device-tree names the product")
    # In this order by os-release(5).
    release = reader.settings("etc/os-release") or reader.settings("usr/lib/os-release")
    # Of several options of one name the last one counts.
    options = dict(word.partition("=")[::2] for word in reader.line("proc/cmdline").split())
    return System(
        hostname=reader.line(f"{_KERNEL}/hostname"),
        vendor=reader.line(f"{_DMI}/sys_vendor"),
        product=product,
        bios=reader.line(f"{_DMI}/bios_version"),
        bios_date=reader.line(f"{_DMI}/bios_date"),
        kernel=reader.line(f"{_KERNEL}/osrelease"),
        kho=options.get("kho", ""),
        os=release.get("PRETTY_NAME", ""),
        machine=_architecture(reader),
        cpu=_cpu_models(cores),
        cores=len(cores),
    )


def memory(reader: Reader) -> Memory | None:
    """Return /proc/meminfo, the only source that is right where CPU and GPU share memory."""
    text = reader.text("proc/meminfo", needed=True)
    told = {
        key: whole(value.removesuffix(" kB")) for key, value in map(_key_value, text.splitlines())
    }
    sizes = {key: value for key, value in told.items() if value is not None}
    if "MemTotal" not in sizes:
        if text:
            reader.note("/proc/meminfo: does not tell MemTotal")
        return None
    return Memory(
        total=sizes["MemTotal"],
        # Before Linux 3.14, and in some containers, there is no MemAvailable.
        available=sizes.get("MemAvailable", sizes.get("MemFree", 0)),
        swap_total=sizes.get("SwapTotal", 0),
        swap_free=sizes.get("SwapFree", 0),
        cma_total=sizes.get("CmaTotal"),
        cma_free=sizes.get("CmaFree"),
    )


def _architecture(reader: Reader) -> str:
    """Return ``aarch64``; Linux has the file since 6.1."""
    if told := reader.line(f"{_KERNEL}/arch"):
        return told
    try:
        return printable(reader.answer("machine.txt", lambda: os.uname().machine))
    except ToolUnavailable as silent:
        reader.note(f"neither /{_KERNEL}/arch nor uname tells the architecture: {silent}")
        return ""


def _cpu_blocks(text: str) -> list[dict[str, str]]:
    """Return the blocks of ``key : value`` of /proc/cpuinfo, one for each processor."""
    blocks = (dict(map(_key_value, block.splitlines())) for block in text.split("\n\n"))
    return [block for block in blocks if "processor" in block]


def _cpu_models(cores: Iterable[dict[str, str]]) -> str:
    """Return ``10 x Cortex-X925, 10 x Cortex-A725``: the most first, then by name."""
    counted = Counter(map(_cpu_model, cores))
    ranked = sorted(counted.items(), key=lambda each: (-each[1], each[0]))
    return ", ".join(f"{number} x {name}" for name, number in ranked if name)


def _cpu_model(core: dict[str, str]) -> str:
    """Return the model: x86 names it, arm64 has numbers of an implementer and its part."""
    if name := core.get("model name", ""):
        return name
    part = core.get("CPU part", "")
    known = hardware.facts()["cpu_parts"] if core.get("CPU implementer") == _ARM else {}
    return str(known.get(part, part and f"CPU part {part}"))


def _key_value(line: str) -> tuple[str, str]:
    key, _, value = line.partition(":")
    return printable(key), printable(value)
