"""Read the facts of a machine, such as firmware and memory, and put them together as a Host."""

from __future__ import annotations

import ipaddress
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from patchkit.errors import HostError
from patchkit.foreign import read_json
from patchkit.frozen import Fields, Values, positional
from patchkit.process import attempt
from patchkit.runtime.host.host import (
    Address,
    Gid,
    Gpu,
    Host,
    Memory,
    Netdev,
    Rdma,
    System,
)
from patchkit.runtime.host.machine_root import (
    LIVE,
    Reader,
    RecordingWriter,
    ToolUnavailable,
    parse_whole,
    printable,
)
from patchkit.runtime.host.software import read_software
from patchkit.runtime.rules.releases import read_env_data

_DMI = "sys/class/dmi/id"
_KERNEL = "proc/sys/kernel"


Device = TypeVar("Device", Netdev, Rdma)
_NET, _RDMA = "sys/class/net", "sys/class/infiniband"
_LOOPBACK = 772  # ARPHRD_LOOPBACK of linux/if_arp.h
_SECONDS = 10.0  # for ip or nvidia-smi, which may have to load the driver

_NO_VALUE = re.compile(r"\[.*|n/a|not supported", re.IGNORECASE)
_QUERY = "--query-gpu=name,compute_cap,driver_version,memory.total,pci.bus_id"


def read_network_devices(
    reader: Reader,
) -> tuple[tuple[Netdev, ...], tuple[Rdma, ...]]:
    """Return the interfaces and the RDMA devices, each with its cage and the name of its twin."""
    links = _read_addresses(reader)
    names = reader.folders(_NET, needed=True)
    netdevs = [
        _read_netdev(reader, name, links.get(name, _KernelLink())) for name in names
    ]

    # p0 may be the port of a cage, pf0vf1 may not.
    uplinks = [netdev for netdev in netdevs if re.fullmatch(r"(p\d)?", netdev.port)]
    uplink_names = {netdev.name for netdev in uplinks}

    devices = [_read_rdma(reader, name, uplink_names) for name in reader.folders(_RDMA)]
    drivers = ("", read_env_data("hardware")["connectx"]["driver"])
    cards = [netdev for netdev in uplinks if netdev.driver in drivers]
    placed = {card.name: _with_cage(card, cards) for card in cards}

    return (
        tuple(placed.get(netdev.name, netdev) for netdev in netdevs),
        tuple(_with_cage(device, devices) for device in devices),
    )


def _read_rdma(reader: Reader, name: str, uplinks: Collection[str]) -> Rdma:
    """Return an RDMA device, without cage and twin; its netdev is one of ``uplinks``."""
    device = f"{_RDMA}/{name}/device"
    port = f"{_RDMA}/{name}/ports/1"
    netdevs = reader.folders(f"{device}/net")
    state = reader.line(f"{port}/state", needed=True)

    return Rdma(
        name=name,
        state=state.rpartition(": ")[2],  # of "4: ACTIVE"
        netdev=next((netdev for netdev in netdevs if netdev in uplinks), ""),
        pci=reader.device(device)[0],
        gids=tuple(_read_gids(reader, port)),
    )


def _read_gids(reader: Reader, port: str) -> Iterator[Gid]:
    """Yield the entries of a port's GID table; sysfs has EINVAL for the type of an empty one."""
    types = f"{port}/gid_attrs/types"
    indices = [int(entry) for entry in reader.names(types) if entry.isdecimal()]
    for index in sorted(indices):
        kind = reader.line(f"{types}/{index}")
        if not kind:
            continue

        try:
            # 0000:…:ffff:c0a8:640a has 192.168.100.10 mapped in.
            gid = ipaddress.IPv6Address(reader.line(f"{port}/gids/{index}"))
        except ValueError:
            gid = ipaddress.IPv6Address(0)
        yield Gid(index=index, kind=kind, address=str(gid.ipv4_mapped or ""))


def _with_cage(device: Device, devices: Iterable[Device]) -> Device:
    """Return a device with its cage and twin, by PCI address, since names depend on udev."""
    for number, cage in enumerate(read_env_data("hardware")["connectx"]["cages"]):
        functions = set(cage["functions"])
        if device.pci in functions:
            functions.remove(device.pci)
            twins = (twin.name for twin in devices if twin.pci in functions)
            return replace(device, cage=number, twin=next(twins, ""))
    return device


def _read_netdev(reader: Reader, name: str, link: _KernelLink) -> Netdev:
    home = f"{_NET}/{name}"
    pci, driver = reader.device(f"{home}/device")
    parts = reader.folders(home)
    master = ""
    if "master" in parts:
        # The bond or bridge: the target of a link, which a recording keeps.
        reader.line(f"{home}/master/address")
        master = printable(Path(reader.real(f"{home}/master")).name)

    return Netdev(
        name=name,
        state=reader.line(f"{home}/operstate", needed=True) or "unknown",
        carrier=reader.line(f"{home}/carrier") == "1",
        mtu=reader.number(f"{home}/mtu", needed=True) or 0,
        speed=reader.number(f"{home}/speed"),
        mac=reader.line(f"{home}/address"),
        driver=driver or link.kind,
        pci=pci,
        port=reader.line(f"{home}/phys_port_name"),
        kind=_read_kind(reader, home, parts),
        addresses=link.addresses,
        lanes=reader.number(f"{home}/device/current_link_width"),
        master=master,
    )


def _read_kind(reader: Reader, home: str, parts: Collection[str]) -> str:
    if reader.line(f"{home}/type") == str(_LOOPBACK):
        return "loopback"
    # Every cfg80211 driver has phy80211; wireless comes from the older interface.
    if "wireless" in parts or "phy80211" in parts:
        return "wifi"
    is_virtual = "/devices/virtual/" in f"/{reader.real(home)}"
    return "virtual" if is_virtual else "ethernet"


@positional
class _KernelLink:
    """The kind of a virtual netdev as `ip` calls it (``bridge``, ``veth``), and its addresses."""

    kind: str = ""
    addresses: tuple[Address, ...] = ()


def _read_addresses(reader: Reader) -> dict[str, _KernelLink]:
    """Return the kind and the addresses of each netdev by its name."""
    try:
        text = reader.answer("ip-address.json", ask_addresses)
    except ToolUnavailable as error:
        reader.notes.append(f"no addresses: {error}")
        return {}

    try:
        links = {}
        for entry in read_json(text):
            kind = entry.get("linkinfo", {}).get("info_kind", "")
            rows = (row for row in entry["addr_info"] if row.get("local"))
            addresses = tuple(_read_address(row) for row in rows)
            links[printable(entry["ifname"])] = _KernelLink(printable(kind), addresses)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reader.notes.append(
            f"no addresses: /commands/ip-address.json is not understood: {error}"
        )
        return {}
    return links


def _read_address(row: Fields) -> Address:
    interface = ipaddress.ip_interface(f"{row['local']}/{row['prefixlen']}")
    return Address(
        address=str(interface.ip),
        prefix=interface.network.prefixlen,
        family="inet" if interface.version == 4 else "inet6",
        link_local=interface.ip.is_link_local,
    )


def ask_addresses() -> str:
    """Return the output of `ip -json -details address`. Raises ToolUnavailable."""
    done = attempt("ip", "-json", "-details", "address", timeout=_SECONDS)
    if done.trouble:
        raise ToolUnavailable(
            f"ip: {printable(done.trouble)[:200]} (sudo apt install iproute2)"
        )
    return done.output


def probe(
    root: Path = LIVE,
    *,
    python: str | None = None,
    environment: Values = os.environ,
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
        copy.finish(reader.notes)
    return replace(host, notes=tuple(reader.notes))


def read_system(reader: Reader) -> System:
    """Return the facts of DMI, the device tree and the kernel."""
    cores = _read_cores(reader)
    ranked = Counter(sorted(cores)).most_common()

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
    """Return the model of each core: x86 names it, arm64 has the number of a part."""
    parts = read_env_data("hardware")["cpu_parts"]
    cores = []
    text = reader.text("proc/cpuinfo", needed=True)
    for block in text.split("\n\n"):
        core = _read_pairs(block)
        if "processor" not in core:
            continue

        part = core.get("CPU part", "")
        cores.append(core.get("model name") or parts.get(part, part))
    return cores


def read_memory(reader: Reader) -> Memory | None:
    """Return the sizes of /proc/meminfo, None if it has no MemTotal.

    Where CPU and GPU share memory, no other source is right.
    """
    pairs = _read_pairs(reader.text("proc/meminfo", needed=True))
    sizes = {}
    for key, value in pairs.items():
        size = parse_whole(value.removesuffix(" kB"))
        if size is not None:
            sizes[key] = size
    if "MemTotal" not in sizes:
        return None

    return Memory(
        total=sizes["MemTotal"],
        available=sizes.get("MemAvailable", 0),
        swap_total=sizes.get("SwapTotal", 0),
        cma_total=sizes.get("CmaTotal"),
        cma_free=sizes.get("CmaFree"),
    )


def _read_pairs(text: str) -> Values:
    pairs = (line.partition(":") for line in text.splitlines())
    return {printable(key): printable(value) for key, _, value in pairs}


def read_gpus(reader: Reader) -> tuple[Gpu, ...]:
    """Return the GPUs. If nvidia-smi names none, return none and add a note to ``reader``."""
    try:
        text = reader.answer("nvidia-smi.csv", lambda: query_gpus(_QUERY))
        rows = parse_rows(text, 5)
    except ToolUnavailable as error:
        reader.notes.append(f"no GPU is found: {error}")
        return ()

    gpus = []
    for name, capability, driver, memory, bus in rows:
        gpu = Gpu(
            name=name,
            capability=capability,
            driver=driver,
            memory=parse_whole(memory),
            # nvidia-smi has 0000000F:01:00.0, and sysfs 000f:01:00.0.
            bus=bus.lower()[-12:],
        )
        gpus.append(gpu)
    return tuple(gpus)


def query_gpus(*options: str) -> str:
    """Return the rows that nvidia-smi prints for these options, as CSV without a header.

    Raises ToolUnavailable if it is missing or fails.
    """
    words = ("nvidia-smi", *options, "--format=csv,noheader,nounits")
    # The locale C has decimal points.
    done = attempt(*words, env={**os.environ, "LC_ALL": "C"}, timeout=_SECONDS)
    if done.trouble:
        raise ToolUnavailable(f"nvidia-smi: {printable(done.trouble)[:200]}")
    return done.output


def parse_rows(text: str, columns: int) -> list[list[str]]:
    """Return the cells of lines such as ``NVIDIA GB10, 12.1, 580.173.02, [N/A], 0000000F:01:00.0``.

    A cell without a value (``[N/A]``, ``Not Supported``, ``[Unknown Error]`` …) becomes "". Raises
    ToolUnavailable if a line has another number of cells than ``columns``, or if there is no line.
    """
    rows = []
    for line in filter(str.strip, text.splitlines()):
        cells = [printable(cell) for cell in line.split(",")]
        if len(cells) != columns:
            shown = printable(text)[:80]
            raise ToolUnavailable(
                f"nvidia-smi: what it says is not understood: {shown!r}"
            )

        rows.append(["" if _NO_VALUE.fullmatch(cell) else cell for cell in cells])
    if not rows:
        raise ToolUnavailable("nvidia-smi: has no GPU")
    return rows
