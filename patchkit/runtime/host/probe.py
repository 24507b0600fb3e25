"""Read the facts of a machine, such as firmware and memory, and put them together as a Host."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from patchkit.errors import HostError
from patchkit.runtime.host.gpu import read_gpus
from patchkit.runtime.host.host import Host, Memory, System
from patchkit.runtime.host.machine_root import (
    LIVE,
    Reader,
    RecordingWriter,
    parse_whole,
    printable,
)
from patchkit.runtime.host.network_devices import read_network_devices
from patchkit.runtime.host.software import read_software
from patchkit.runtime.rules.releases import read_env_data

_DMI = "sys/class/dmi/id"
_KERNEL = "proc/sys/kernel"
_ARM = "0x41"  # the implementer Arm, whose part numbers hardware.toml has


def probe(
    root: Path = LIVE,
    *,
    python: str | None = None,
    environment: Mapping[str, str],
    copy: RecordingWriter | None = None,
) -> Host:
    """Read the facts of the machine at a root; needs no rights and no GPU.

    ``environment`` are the variables with which libraries would be loaded. ``copy`` records all
    that is read. Software is read only if the root is /, or if ``python`` names an interpreter.
    Raises SourceError for a root without sys and proc, HostError if ``python`` does not answer.
    """
    reader = Reader(root, copy)
    netdevs, rdma = read_network_devices(reader)
    host = Host(
        system=read_system(reader),
        memory=read_memory(reader),
        gpus=read_gpus(reader),
        netdevs=netdevs,
        rdma=rdma,
    )

    if reader.live or python:
        try:
            host = replace(host, software=read_software(python, environment))
        except HostError as error:
            if python:
                raise
            # A Python that the user did not name may fail.
            reader.notes.append(f"no Python tells what is installed: {error.what}")

    if copy:
        copy.finish()
    return replace(host, notes=tuple(reader.notes))


def read_system(reader: Reader) -> System:
    """Return the facts of DMI, the device tree and the kernel."""
    cores = _read_cores(reader)
    ranked = sorted(Counter(cores).items(), key=lambda item: (-item[1], item[0]))

    dmi_product = reader.line(f"{_DMI}/product_name")
    product = dmi_product or reader.line("proc/device-tree/model")
    if not product:
        reader.notes.append(f"neither /{_DMI} nor /proc/device-tree names the product")

    # In this order by os-release(5).
    release = reader.settings("etc/os-release") or reader.settings("usr/lib/os-release")
    words = reader.line("proc/cmdline").split()
    # If several options have one name, the last one counts.
    options = dict(word.partition("=")[::2] for word in words)

    # Linux has the file since 6.1.
    machine = reader.line(f"{_KERNEL}/arch")
    if reader.live and not machine:
        machine = os.uname().machine

    files = {
        "hostname": f"{_KERNEL}/hostname",
        "vendor": f"{_DMI}/sys_vendor",
        "bios": f"{_DMI}/bios_version",
        "bios_date": f"{_DMI}/bios_date",
        "kernel": f"{_KERNEL}/osrelease",
    }
    return System(
        **{name: reader.line(file) for name, file in files.items()},
        product=product,
        kho=options.get("kho", ""),
        os=release.get("PRETTY_NAME", ""),
        machine=machine,
        cpu=", ".join(f"{count} x {name}" for name, count in ranked if name),
        cores=len(cores),
    )


def _read_cores(reader: Reader) -> list[str]:
    """Return the model of each core: x86 names it, arm64 has an implementer and a part number."""
    parts = read_env_data("hardware")["cpu_parts"]
    cores = []
    text = reader.text("proc/cpuinfo", needed=True)
    for block in text.split("\n\n"):
        core = _read_pairs(block)
        if "processor" not in core:
            continue

        part = core.get("CPU part", "")
        model = f"CPU part {part}" if part else ""
        if core.get("CPU implementer") == _ARM:
            model = parts.get(part, model)
        cores.append(core.get("model name") or model)
    return cores


def read_memory(reader: Reader) -> Memory | None:
    """Return the sizes of /proc/meminfo, None and a note if it has no MemTotal.

    Where CPU and GPU share memory, no other source is right.
    """
    pairs = _read_pairs(reader.text("proc/meminfo", needed=True))
    sizes = {}
    for key, value in pairs.items():
        size = parse_whole(value.removesuffix(" kB"))
        if size is not None:
            sizes[key] = size
    if "MemTotal" not in sizes:
        if pairs:
            reader.notes.append("/proc/meminfo: does not tell MemTotal")
        return None

    return Memory(
        total=sizes["MemTotal"],
        # Before Linux 3.14, and in some containers, there is no MemAvailable.
        available=sizes.get("MemAvailable", sizes.get("MemFree", 0)),
        swap_total=sizes.get("SwapTotal", 0),
        cma_total=sizes.get("CmaTotal"),
        cma_free=sizes.get("CmaFree"),
    )


def _read_pairs(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {printable(key): printable(value) for key, _, value in pairs}
