"""List the facts of this machine: `patchkit probe`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from patchkit.cli.out import FOLDER, PATH, next_step, program, shown, style, table, tell
from patchkit.cli.render import Block, Record, finding_blocks, rendered
from patchkit.quoting import quoted
from patchkit.runtime.host.advice import find_remarks
from patchkit.runtime.host.host import Host, Netdev, Rdma
from patchkit.runtime.host.machine_root import LIVE, RecordingWriter
from patchkit.runtime.host.probe import probe
from patchkit.runtime.rules.releases import read_env_data
from patchkit.runtime.rules.variables import variable_table
from patchkit.units import KIB_PER_GIB

_KINDS = ("ethernet", "wifi", "virtual", "loopback")
_HEADS = ("netdev", "state", "speed", "MTU", "addresses", "RDMA", "GID", "twin", "cage")


@click.command("probe")
@click.option("--root", type=FOLDER, default=LIVE, help="A copy that --save made.")
@click.option(
    "--save", type=PATH, help="Copy all that is read, for --root and bug reports."
)
@click.option(
    "--python",
    metavar="EXE",
    help="The Python that has vLLM. Default: the present one.",
)
@rendered
def probe_command(
    *, root: Path, save: Path | None, python: str | None
) -> Iterator[Block]:
    """List the facts of this machine: GPU, memory, network, RDMA, cables, software.

    Reads sysfs and /proc, and asks ip and nvidia-smi if they are there: no rights and no GPU is
    needed. What cannot be read becomes a note.
    """
    copy = RecordingWriter(root, save) if save else None
    host = probe(root, python=python, environment=os.environ, copy=copy)
    yield Record(asdict(host))
    yield from host_lines(host)
    capabilities = read_env_data("hardware")["capabilities"].values()
    if any(
        gpu.capability in capabilities for gpu in host.gpus
    ):  # a device that patchkit knows
        there = () if root == LIVE else ("--root", root)
        if host.cabled and not host.masters(
            half for half in host.netdevs if half.cage is not None
        ):
            yield next_step(*program(), "net", "plan", "--role", "head", *there)
        if host.software and host.software.vllm:
            yield next_step(
                *program(), "env", "--role", "single", "-o", "single.env", *there
            )
        else:
            yield next_step(
                *program(), "repack", f"vllm=={variable_table('vllm').newest}"
            )
    if copy:
        archive = quoted(
            "tar", "-czf", Path(f"{copy.home.name}.tar.gz"), Path(copy.home.name)
        )
        tell(f"saved: {copy.files} files in {copy.home}; attach them: {archive}")


def host_lines(host: Host) -> Iterator[Block]:
    """Yield what is known of a machine: system, network, software, and remarks."""
    system = host.system
    firmware = f"BIOS {system.bios} ({system.bios_date})" if system.bios else ""
    product = ", ".join(
        filter(None, (f"{system.vendor} {system.product}".strip(), firmware))
    )
    name = style(system.hostname or "host", bold=True)
    yield name + (f": {product}" if product else "")
    yield from table(_summary_rows(host), "  ")
    yield ""
    yield from table(_network_rows(host), "  ", heads=_HEADS)
    if software := host.software:
        cuda = f" (CUDA {software.cuda})" if software.cuda else ""
        torch = f"{software.torch}{cuda}" if software.torch else "not installed"
        facts = {
            "python": software.python,
            "vllm": software.vllm or "not installed",
            "torch": torch,
            "triton": software.triton,
            "ray": software.ray,
        }
        for who, taken in (
            ("torch", software.torch_nccl),
            ("vLLM", software.vllm_nccl),
        ):
            if taken:
                version = f"{taken.version or 'unknown version'}, {taken.path}"
                why = f" ({taken.why})" if taken.why else ""
                facts[f"{who}'s NCCL"] = (version if taken.path else "none") + why
        yield ""
        yield from table(((name, it) for name, it in facts.items() if it), "  ")
    found = find_remarks(host)
    if found or host.notes:
        yield ""
    yield from finding_blocks(found, verbose=True)
    yield from (style(f"- {note}", dim=True) for note in host.notes)


def _summary_rows(host: Host) -> Iterator[tuple[str, str]]:
    system, memory = host.system, host.memory
    kernel = " ".join(filter(None, ("Linux", system.kernel, system.machine)))
    yield "system", ", ".join(filter(None, (system.os, kernel)))
    yield "CPU", f"{system.cores} cores" + (f": {system.cpu}" if system.cpu else "")
    if memory:
        swap = (
            f"swap {_gib_text(memory.swap_total)}" if memory.swap_total else "no swap"
        )
        free = f"{_gib_text(memory.available)} available"
        yield "memory", f"{_gib_text(memory.total)}, {free}, {swap}"
    else:
        yield "memory", style("unknown", fg="yellow")
    for gpu in host.gpus:
        # GB10 and Thor have no memory of their own: NVML reports none.
        unified = gpu.capability in read_env_data("hardware")["capabilities"].values()
        own = "its memory is the system's" if unified else "memory unknown"
        own = _gib_text(gpu.memory << 10) if gpu.memory else own
        facts = f"capability {gpu.capability or 'unknown'}, driver {gpu.driver or 'unknown'}, {own}"
        yield "GPU", style(gpu.name, bold=True) + f", {facts}"
    if not host.gpus:
        yield "GPU", style("none found", fg="yellow")
    places = [cage["place"] for cage in read_env_data("hardware")["connectx"]["cages"]]
    cages = ((cage, places[cage]) for cage in host.cabled)
    names = [f"cage {cage}" + (f" ({place})" if place else "") for cage, place in cages]
    yield "cabled", ", ".join(names) or "no QSFP cage"


def _gib_text(kib: int) -> str:
    return f"{kib / KIB_PER_GIB:.1f} GiB"


def _network_rows(host: Host) -> Iterator[tuple[str, ...]]:
    """Yield cages first, with their halves side by side, then other hardware."""
    owned = {device.netdev: device for device in host.rdma if device.netdev}
    order = sorted(
        host.netdevs,
        key=lambda it: (
            it.cage is None,
            it.cage or 0,
            _KINDS.index(it.kind),
            it.pci,
            it.name,
        ),
    )
    pairs: list[tuple[Netdev | None, Rdma | None]] = [
        (it, owned.get(it.name)) for it in order
    ]
    pairs += [(None, device) for device in host.rdma if not device.netdev]
    for netdev, device in pairs:
        own, rdma, part = ("-", "", "", "", ""), ("-", "-"), netdev or device
        if netdev:
            # Every interface that is up has an fe80.
            known = (
                it
                for it in netdev.addresses
                if it.family == "inet" or not it.link_local
            )
            own = (
                style(netdev.name, bold=netdev.up),
                style(netdev.state, fg="green" if netdev.up else None),
                f"{netdev.speed / 1000:g}G" if netdev.speed else "-",
                str(netdev.mtu or "?"),
                " ".join(f"{it.address}/{it.prefix}" for it in known) or "-",
            )
        if device:
            # The GIDs that RoCE v2 over IPv4 takes.
            state = style(
                device.state or "unknown", fg="green" if device.active else None
            )
            taken = (
                str(it.index)
                for it in device.gids
                if it.address and it.kind == "RoCE v2"
            )
            rdma = shown(f"{device.name} ") + state, " ".join(taken) or "-"
        if part:
            yield (
                *own,
                *rdma,
                part.twin or "-",
                "-" if part.cage is None else str(part.cage),
            )
