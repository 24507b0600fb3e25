"""Read the facts of a machine, such as firmware and memory, and put them together as a Host."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from patchkit.errors import HostError
from patchkit.runtime.host.gpu import gpus
from patchkit.runtime.host.host import Host, Memory, System
from patchkit.runtime.host.links import read_links
from patchkit.runtime.host.machine_root import (
    LIVE,
    Reader,
    RecordingWriter,
    printable,
    whole,
)
from patchkit.runtime.host.software import software
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
    """Read the machine at a root; needs no rights and no GPU.

    ``environment`` is what libraries would be loaded under. ``copy`` takes all that is read.
    Software is read for the root / alone, or where ``python`` names an interpreter. Raises
    SourceError for a root without sys and proc, HostError for a Python that does not answer.
    """
    reader = Reader(root, copy)
    netdevs, rdma = read_links(reader)
    firmware, pool, devices, installed = (
        system(reader),
        memory(reader),
        gpus(reader),
        None,
    )
    if reader.live or python:
        try:
            installed = software(python, environment)
        except HostError as error:
            if python:
                raise
            # A Python that the user did not name may fail.
            reader.notes.append(f"no Python tells what is installed: {error.what}")
    if copy:
        copy.finish()
    return Host(
        system=firmware,
        memory=pool,
        gpus=devices,
        netdevs=netdevs,
        rdma=rdma,
        software=installed,
        notes=tuple(reader.notes),
    )


def system(reader: Reader) -> System:
    """Return what DMI, the device tree and the kernel say."""
    # One block for each processor.
    blocks = map(_read_pairs, reader.text("proc/cpuinfo", needed=True).split("\n\n"))
    models, parts = [], read_env_data("hardware")["cpu_parts"]
    for core in (block for block in blocks if "processor" in block):
        # x86 names the model, arm64 has numbers of an implementer and its part.
        part = core.get("CPU part", "")
        known = parts if core.get("CPU implementer") == _ARM else {}
        unknown = part and f"CPU part {part}"
        models.append(core.get("model name") or str(known.get(part, unknown)))
    ranked = sorted(Counter(models).items(), key=lambda item: (-item[1], item[0]))
    product = reader.line(f"{_DMI}/product_name") or reader.line(
        "proc/device-tree/model"
    )
    if not product:
        reader.notes.append(f"neither /{_DMI} nor /proc/device-tree names the product")
    # In this order by os-release(5).
    release = reader.settings("etc/os-release") or reader.settings("usr/lib/os-release")
    # Of several options of one name the last one counts.
    options = dict(
        word.partition("=")[::2] for word in reader.line("proc/cmdline").split()
    )
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
        machine=reader.line(f"{_KERNEL}/arch")
        or (os.uname().machine if reader.live else ""),
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
        cma_total=sizes.get("CmaTotal"),
        cma_free=sizes.get("CmaFree"),
    )


def _read_pairs(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {printable(key): printable(value) for key, _, value in pairs}
