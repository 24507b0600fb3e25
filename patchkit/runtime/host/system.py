"""Read firmware, kernel, distribution, processor and memory."""

from __future__ import annotations

import os
from collections import Counter

from patchkit.runtime.host import hardware
from patchkit.runtime.host.host import Memory, System
from patchkit.runtime.host.machine_root import Reader, printable, whole

_DMI = "sys/class/dmi/id"
_KERNEL = "proc/sys/kernel"
_ARM = "0x41"  # the implementer Arm, whose part numbers hardware.toml has


def system(reader: Reader) -> System:
    """Return what DMI, the device tree and the kernel say."""
    # One block for each processor.
    blocks = map(_read_pairs, reader.text("proc/cpuinfo", needed=True).split("\n\n"))
    models = [_cpu_model(block) for block in blocks if "processor" in block]
    ranked = sorted(Counter(models).items(), key=lambda item: (-item[1], item[0]))
    product = reader.line(f"{_DMI}/product_name") or reader.line("proc/device-tree/model")
    if not product:
        reader.notes.append(f"neither /{_DMI} nor /proc/device-tree names the product")
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
        # Linux has the file since 6.1.
        machine=reader.line(f"{_KERNEL}/arch") or (os.uname().machine if reader.live else ""),
        cpu=", ".join(f"{count} x {name}" for name, count in ranked if name),
        cores=len(models),
    )


def memory(reader: Reader) -> Memory | None:
    """Return /proc/meminfo, the only source that is right where CPU and GPU share memory."""
    pairs = _read_pairs(reader.text("proc/meminfo", needed=True))
    numbers = {key: whole(value.removesuffix(" kB")) for key, value in pairs.items()}
    sizes = {key: number for key, number in numbers.items() if number is not None}
    if "MemTotal" not in sizes:
        if pairs:
            reader.notes.append("/proc/meminfo: does not tell MemTotal")
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


def _cpu_model(core: dict[str, str]) -> str:
    """Return the model: x86 names it, arm64 has numbers of an implementer and its part."""
    if name := core.get("model name", ""):
        return name
    part = core.get("CPU part", "")
    known = hardware.facts()["cpu_parts"] if core.get("CPU implementer") == _ARM else {}
    return str(known.get(part, part and f"CPU part {part}"))


def _read_pairs(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {printable(key): printable(value) for key, _, value in pairs}
