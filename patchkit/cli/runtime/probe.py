"""List the facts of this machine: `patchkit probe`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from patchkit.cli.next_step import next_step, program
from patchkit.cli.out import Shown, shown, style, table, tell
from patchkit.cli.render import Block, Record, rendered
from patchkit.finding import Finding, Level
from patchkit.quoting import quoted
from patchkit.runtime.host import hardware
from patchkit.runtime.host.advice import remarks
from patchkit.runtime.host.host import Gpu, Host, Memory, Nccl, Netdev, Rdma, Software, System
from patchkit.runtime.host.machine_root import LIVE, RecordingWriter
from patchkit.runtime.host.probe import probe
from patchkit.runtime.rules.variables import newest_vllm
from patchkit.units import KIB_PER_GIB

_KINDS = ("ethernet", "wifi", "virtual", "loopback")
_MARKS = {Level.ERROR: ("✗ ", "red"), Level.WARNING: ("! ", "yellow"), Level.NOTE: ("- ", None)}
_HEADS = ("netdev", "state", "speed", "MTU", "addresses", "RDMA", "GID", "twin", "cage")


@click.command()
@click.option(
    "--root",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=LIVE,
    help="Another machine's files, such as --save writes.",
)
@click.option(
    "--save",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Copy all that is read to a new folder: for a bug report, and for --root.",
)
@click.option("--python", metavar="EXE", help="The Python that has vLLM. Default: the present one.")
@rendered
def command(*, root: Path, save: Path | None, python: str | None) -> Iterator[Block]:
    """List the facts of this machine: GPU, memory, network, RDMA, cables, software.

    Reads sysfs and /proc, and asks nvidia-smi if it is there: no rights, no GPU and no tool is
    needed. What cannot be read becomes a note.
    """
    copy = RecordingWriter(root, save) if save else None
    host = probe(root, python=python, environment=os.environ, copy=copy)
    yield Record(asdict(host))
    yield from host_lines(host)
    yield from _next_probe_steps(host, root)
    if copy:
        archive = quoted("tar", "-czf", Path(f"{copy.home.name}.tar.gz"), Path(copy.home.name))
        tell(f"saved: {copy.files} files in {copy.home}; attach them: {archive}")


def _next_probe_steps(host: Host, root: Path) -> Iterator[Shown]:
    """Yield the command that comes next on a device that patchkit knows: of cables, or of vLLM."""
    known = hardware.facts()["capabilities"].values()
    if not any(gpu.capability in known for gpu in host.gpus):
        return
    there = () if root == LIVE else ("--root", root)
    if host.cabled:
        yield next_step(*program(), "net", "plan", "--role", "head", *there)
    if host.software and host.software.vllm:
        yield next_step(*program(), "env", "--role", "single", "-o", "single.env", *there)
    else:
        yield next_step(*program(), "repack", f"vllm=={newest_vllm()}")


def host_lines(host: Host) -> Iterator[str]:
    yield style(host.system.hostname or "host", bold=True) + _product_text(host.system)
    yield from table(_summary_rows(host), "  ")
    yield ""
    yield from table(_network_rows(host), "  ", heads=_HEADS)
    if host.software:
        yield ""
        yield from table(_software_rows(host.software), "  ")
    found = remarks(host)
    if found or host.notes:
        yield ""
    for remark in found:
        yield from _remark_lines(remark)
    for note in host.notes:
        yield style(f"  - {note}", dim=True)


def _product_text(system: System) -> str:
    """Return ``: NVIDIA NVIDIA_DGX_Spark, BIOS 5.36 (08/06/2025)``."""
    firmware = f"BIOS {system.bios} ({system.bios_date})" if system.bios else ""
    told = ", ".join(filter(None, (f"{system.vendor} {system.product}".strip(), firmware)))
    return f": {told}" if told else ""


def _summary_rows(host: Host) -> Iterator[tuple[str, str]]:
    system = host.system
    kernel = " ".join(filter(None, ("Linux", system.kernel, system.machine)))
    yield "system", ", ".join(filter(None, (system.os, kernel)))
    yield "CPU", f"{system.cores} cores" + (f": {system.cpu}" if system.cpu else "")
    yield "memory", _memory_text(host.memory)
    yield from (("GPU", _gpu_text(gpu)) for gpu in host.gpus)
    if not host.gpus:
        yield "GPU", style("none found", fg="yellow")
    yield "cabled", ", ".join(map(_cage_text, host.cabled)) or "no QSFP cage"


def _memory_text(memory: Memory | None) -> str:
    if memory is None:
        return style("unknown", fg="yellow")
    swap = f"swap {_gib_text(memory.swap_total)}" if memory.swap_total else "no swap"
    return f"{_gib_text(memory.total)}, {_gib_text(memory.available)} available, {swap}"


def _gib_text(kib: int) -> str:
    return f"{kib / KIB_PER_GIB:.1f} GiB"


def _gpu_text(gpu: Gpu) -> str:
    """Describe a GPU. GB10 and Thor have no memory of their own: NVML reports none."""
    unified = gpu.capability in hardware.facts()["capabilities"].values()
    missing = "its memory is the system's" if unified else "memory unknown"
    own = _gib_text(gpu.memory << 10) if gpu.memory else missing
    capability = f"capability {gpu.capability}" if gpu.capability else "capability unknown"
    driver = f"driver {gpu.driver}" if gpu.driver else "driver unknown"
    return style(gpu.name, bold=True) + ", " + ", ".join((capability, driver, own))


def _cage_text(number: int) -> str:
    place = hardware.place(number)
    return f"cage {number}" + (f" ({place})" if place else "")


def _network_rows(host: Host) -> Iterator[tuple[str, ...]]:
    owned = {each.netdev: each for each in host.rdma if each.netdev}
    for netdev in sorted(host.netdevs, key=_netdev_rank):
        yield _netdev_row(netdev, owned.get(netdev.name))
    # A device without an interface is in none of the rows above.
    for each in host.rdma:
        if not each.netdev:
            yield ("-", *[""] * 4, *_rdma_cells(each), each.twin, _cage_number(each.cage))


def _netdev_rank(netdev: Netdev) -> tuple[bool, int, int, str, str]:
    """Return a sort key: cages first, with their halves side by side, then other hardware."""
    kind = _KINDS.index(netdev.kind)
    return netdev.cage is None, netdev.cage or 0, kind, netdev.pci, netdev.name


def _netdev_row(netdev: Netdev, device: Rdma | None) -> tuple[str, ...]:
    return (
        style(netdev.name, bold=True) if netdev.up else netdev.name,
        style(netdev.state, fg="green") if netdev.up else netdev.state,
        f"{netdev.speed / 1000:g}G" if netdev.speed else "-",
        str(netdev.mtu or "?"),
        _address_text(netdev) or "-",
        *(_rdma_cells(device) if device else ("-", "-")),
        netdev.twin or "-",
        _cage_number(netdev.cage),
    )


def _address_text(netdev: Netdev) -> str:
    """Return the addresses, without fe80, which every interface that is up has."""
    told = (each for each in netdev.addresses if each.family == "inet" or not each.link_local)
    return " ".join(f"{each.address}/{each.prefix}" for each in told)


def _rdma_cells(device: Rdma) -> tuple[str, str]:
    """Return name and state, and the indices of the GIDs that RoCE v2 over IPv4 takes."""
    state = device.state or "unknown"
    told = shown(f"{device.name} ") + (style(state, fg="green") if device.active else state)
    taken = (gid for gid in device.gids if gid.address and gid.kind == "RoCE v2")
    return told, " ".join(f"{gid.index}" for gid in taken) or "-"


def _cage_number(cage: int | None) -> str:
    return "-" if cage is None else str(cage)


def _software_rows(software: Software) -> Iterator[tuple[str, str]]:
    yield "python", software.python
    cuda = f" (CUDA {software.cuda})" if software.cuda else ""
    yield "vllm", software.vllm or "not installed"
    yield "torch", f"{software.torch}{cuda}" if software.torch else "not installed"
    others = {"triton": software.triton, "ray": software.ray}
    yield from ((name, version) for name, version in others.items() if version)
    for who, taken in (("torch", software.torch_nccl), ("vLLM", software.vllm_nccl)):
        if taken:
            yield f"{who}'s NCCL", _nccl_text(taken)


def _nccl_text(taken: Nccl) -> str:
    found = f"{taken.version or 'unknown version'}, {taken.path}" if taken.path else "none"
    return f"{found} ({taken.why})" if taken.why else found


def _remark_lines(remark: Finding) -> Iterator[str]:
    mark, color = _MARKS[remark.level]
    yield "  " + style(mark, fg=color) + remark.what
    yield style(f"    {remark.why} [{remark.source}]", dim=True)
    if remark.hint:
        yield f"    next: {remark.hint}"
