"""List the facts of this machine: `patchkit probe`."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import click

from patchkit.cli.out import (
    bold,
    dim,
    next_verb,
    shown,
    style,
    table,
    tell,
)
from patchkit.cli.render import (
    Blocks,
    Lines,
    Row,
    dashed,
    fact_lines,
    finding_blocks,
    options_of,
    rendered,
)
from patchkit.quoting import quoted
from patchkit.runtime.host.advice import find_remarks
from patchkit.runtime.host.host import Gpu, Host, Nccl, Netdev, Rdma, Software
from patchkit.runtime.host.probe import LIVE, RecordingWriter, probe
from patchkit.runtime.rules.releases import read_env_data, variable_table
from patchkit.target import is_unified
from patchkit.units import KIB_PER_GIB

_KINDS = ("ethernet", "wifi", "virtual", "loopback")
_HEADS = ("netdev", "state", "speed", "MTU", "addresses", "RDMA", "GID", "twin", "cage")


@click.command
@options_of("probe")
@rendered
def probe_command(root: Path, save: Path | None, python: str | None) -> Blocks:
    """List the facts of this machine: GPU, memory, network, RDMA, cables, software.

    Reads sysfs and /proc, and asks ip and nvidia-smi if they are there; needs no rights and no GPU.
    A fact that cannot be read becomes a note.
    """
    copy = RecordingWriter(root, save) if save else None
    host = probe(root, python=python, copy=copy)
    yield asdict(host)
    yield from host_lines(host)

    if any(is_unified(gpu.target) for gpu in host.gpus):
        yield from _next_steps(host, root)

    if copy:
        folder = copy.home.name
        archive = quoted("tar", "-czf", Path(f"{folder}.tar.gz"), Path(folder))
        tell(f"saved: {copy.files} files in {copy.home}; attach them: {archive}")


def _next_steps(host: Host, root: Path) -> Lines:
    at_root = () if root == LIVE else ("--root", root)

    halves = [netdev for netdev in host.netdevs if netdev.cage is not None]
    if host.cabled and not host.masters(halves):
        yield next_verb("net", "plan", "--role", "head", *at_root)

    if host.software and host.software.vllm:
        yield next_verb("env", "--role", "single", "-o", "single.env", *at_root)
    else:
        yield next_verb("repack", f"vllm=={variable_table('vllm').newest}")


def host_lines(host: Host) -> Blocks:
    """Yield the facts of a machine: system, network, software, and remarks."""
    system = host.system
    parts = [f"{system.vendor} {system.product}".strip()]
    if system.bios:
        parts.append(f"BIOS {system.bios} ({system.bios_date})")

    name = bold(system.hostname or "host")
    product = ", ".join(filter(None, parts))

    yield name + f": {product}" if product else name
    yield from table(_summary_rows(host), "  ")

    yield ""
    yield from table(_network_rows(host), "  ", heads=_HEADS)

    if host.software:
        yield ""
        yield from fact_lines(_software_facts(host.software))

    remarks = find_remarks(host)
    if remarks or host.notes:
        yield ""
    yield from finding_blocks(remarks, verbose=True)
    yield from (dim(f"- {note}") for note in host.notes)


def _software_facts(software: Software) -> Mapping[str, str]:
    torch = software.torch or "not installed"
    if software.torch and software.cuda:
        torch += f" (CUDA {software.cuda})"

    return {
        "python": software.python,
        "vllm": software.vllm or "not installed",
        "torch": torch,
        "triton": software.triton,
        "ray": software.ray,
        "torch's NCCL": _nccl_text(software.torch_nccl),
        "vLLM's NCCL": _nccl_text(software.vllm_nccl),
    }


def _nccl_text(nccl: Nccl | None) -> str:
    if nccl is None:
        return ""

    text = "none"
    if nccl.path:
        version = nccl.version or "unknown version"
        text = f"{version}, {nccl.path}"
    if nccl.why:
        text += f" ({nccl.why})"
    return text


def _summary_rows(host: Host) -> Iterator[tuple[str, str]]:
    system = host.system
    kernel = " ".join(filter(None, ("Linux", system.kernel, system.machine)))
    yield "system", ", ".join(filter(None, (system.os, kernel)))

    memory = ""
    if amounts := host.memory:
        swap = "no swap"
        if amounts.swap_total:
            swap = f"swap {_gib_text(amounts.swap_total)}"
        free = f"{_gib_text(amounts.available)} available"
        memory = f"{_gib_text(amounts.total)}, {free}, {swap}"

    cores = f"{system.cores} cores"
    yield "CPU", f"{cores}: {system.cpu}" if system.cpu else cores
    yield "memory", memory or style("unknown", fg="yellow")

    for gpu in host.gpus:
        yield "GPU", _gpu_text(gpu)
    if not host.gpus:
        yield "GPU", style("none found", fg="yellow")

    yield "cabled", _cages_text(host)


def _gpu_text(gpu: Gpu) -> str:
    capability = f"capability {gpu.capability or 'unknown'}"
    driver = f"driver {gpu.driver or 'unknown'}"
    memory = "memory unknown"
    if gpu.memory:
        memory = _gib_text(gpu.memory << 10)
    elif is_unified(gpu.target):
        memory = "its memory is the system's"

    return bold(gpu.name) + f", {capability}, {driver}, {memory}"


def _cages_text(host: Host) -> str:
    cages = read_env_data("hardware")["connectx"]["cages"]
    names = [f"cage {number} ({cages[number]['place']})" for number in host.cabled]
    return ", ".join(names) or "no QSFP cage"


def _gib_text(kib: int) -> str:
    return f"{kib / KIB_PER_GIB:.1f} GiB"


def _network_rows(host: Host) -> Iterator[Row]:
    """Yield the interfaces of QSFP cages first, those of a cage together, then the rest."""
    rdma_by_netdev = {device.netdev: device for device in host.rdma}
    for netdev in sorted(host.netdevs, key=_netdev_order):
        device = rdma_by_netdev.get(netdev.name)
        rdma = _rdma_cells(device) if device else ("-", "-")
        yield *_netdev_cells(netdev), *rdma, *_place_cells(netdev)

    for device in host.rdma:
        if not device.netdev:
            yield "-", "", "", "", "", *_rdma_cells(device), *_place_cells(device)


def _netdev_order(netdev: Netdev) -> tuple[bool, int, int, str, str]:
    kind = _KINDS.index(netdev.kind)
    cage = netdev.cage
    return cage is None, cage or 0, kind, netdev.pci, netdev.name


def _netdev_cells(netdev: Netdev) -> Row:
    # Every interface that is up has a link-local address of IPv6, fe80::….
    addresses = [
        f"{address.address}/{address.prefix}"
        for address in netdev.addresses
        if address.family == "inet" or not address.link_local
    ]
    colour = "green" if netdev.up else None
    speed = ""
    if netdev.speed:
        speed = f"{netdev.speed / 1000:g}G"

    return dashed(
        style(netdev.name, bold=netdev.up),
        style(netdev.state, fg=colour),
        speed,
        str(netdev.mtu or "?"),
        " ".join(addresses),
    )


def _rdma_cells(device: Rdma) -> Row:
    """Return the cells of an RDMA device: its name, its state, its GIDs for RoCE v2 over IPv4."""
    colour = "green" if device.active else None
    state = style(device.state or "unknown", fg=colour)
    gids = [
        str(gid.index) for gid in device.gids if gid.address and gid.kind == "RoCE v2"
    ]
    return dashed(shown(f"{device.name} ") + state, " ".join(gids))


def _place_cells(device: Netdev | Rdma) -> Row:
    cage = "" if device.cage is None else str(device.cage)
    return dashed(device.twin, cage)
