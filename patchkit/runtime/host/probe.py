"""Read the facts of a machine, such as firmware and memory, and put them together as a Host.

Files are read below a root, and the answers of tools with them. A missing fact is no error: it
becomes an empty value and, if it matters, a note. A root other than / is a recording: the files
that a probe read, in the layout of /, with relative links so that tar can carry them. In a
recording commands/ has the answers of tools, and notes.txt the facts that could not be read, with
the reasons.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import posixpath
import re
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

from patchkit.errors import HostError, SourceError, UsageError
from patchkit.foreign import read_json
from patchkit.frozen import Fields, Texts, Values, positional
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
from patchkit.runtime.host.software import read_software
from patchkit.runtime.rules.releases import read_env_data

LIVE = Path("/")
# Bytes of a file: /proc/cpuinfo of the largest machines has two million.
_MOST = 1 << 22
_CHUNK = 1 << 14  # /proc/sys allocates the size of a read, and refuses megabytes
_UNKNOWN = (0xFFFF, 0xFFFFFFFF)  # -1 as 16 and as 32 bits
_PCI = re.compile(r"[0-9a-fA-F]+:[0-9a-fA-F]+:[0-9a-fA-F]+\.[0-9a-fA-F]+")
_MISSING = (errno.ENOENT, errno.ENOTDIR)
# Errors by which sysfs says "none": the speed of a link that is down, an empty GID, a gone device.
_NONE = (*_MISSING, errno.EINVAL, errno.ENODEV, errno.EOPNOTSUPP)


class ToolUnavailable(Exception):  # noqa: N818 (no error: the machine has no such tool, and others do)
    """A tool gives no answer; the text is the reason."""


class RecordingWriter:
    """A recording in ``folder`` of everything that a Reader reads below ``root``.

    Raises UsageError for a folder that is not empty.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        is_empty = folder.is_dir() and not any(folder.iterdir())
        if folder.exists() and not is_empty:
            what = f"{folder}: is there, and not empty"
            raise UsageError(what, hint="name a new folder")

        self.root = Path(os.path.realpath(root))
        self.home = folder
        self.files = 0

    def add_file(self, path: str, data: bytes) -> None:
        """Add a file that was read, with its content."""
        place = self._place(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        self.files += not place.exists()
        place.write_bytes(data)

    def add_folder(self, path: str, names: Iterable[str]) -> None:
        """Add a folder and the folders in it; a file is added when it is read."""
        self._place(path).mkdir(parents=True, exist_ok=True)
        for name in names:
            folder = f"{path}/{name}"
            if (self.root / folder).is_dir():
                self._place(folder).mkdir(parents=True, exist_ok=True)

    def finish(self, notes: Iterable[str]) -> None:
        """Write ``notes.txt``, with what could not be read."""
        self.home.mkdir(parents=True, exist_ok=True)
        lines = "".join(f"{note}\n" for note in notes)
        (self.home / "notes.txt").write_text(lines, encoding="utf-8")

    def _place(self, path: str) -> Path:
        """Return where a path lies in the recording; make the links that lead to it."""
        folder = "/"
        for part in path.split("/"):
            step = posixpath.join(folder, part)
            try:
                target = str((self.root / step.lstrip("/")).readlink())
            except OSError:
                folder = step
                continue

            # Absolute or not, a link becomes a relative one within the recording.
            place = posixpath.normpath(posixpath.join(folder, target))
            link = self.home / step.lstrip("/")
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(posixpath.relpath(place, folder))
            folder = place

        return self.home / folder.lstrip("/")


class Reader:
    """A reader of paths relative to a root, such as ``sys/class/net``; ``notes`` name failures.

    Raises SourceError for a root without sys/ and proc/.
    """

    def __init__(self, root: Path, copy: RecordingWriter | None = None) -> None:
        # Resolved, since _place compares links with it.
        self.root = Path(os.path.realpath(root))
        self.live = self.root == LIVE
        self.copy = copy
        self.notes: list[str] = []

        folders = (self.root / "sys", self.root / "proc")
        if not any(map(Path.is_dir, folders)):
            raise SourceError(
                f"{root}: is not a machine root: no sys/ or proc/ directory",
                hint="name / or a folder that `patchkit probe --save` wrote",
            )

    def text(self, path: str, *, needed: bool = False) -> str:
        """Return the text of a file, "" if it cannot be read.

        A failure is noted, but a missing file only if ``needed``.
        """
        try:
            data = self._data(path)
        except OSError as error:
            self._note_failure(path, error, needed=needed)
            return ""

        if self.copy:
            self.copy.add_file(path, data)
        return data.decode(errors="replace")

    def line(self, path: str, *, needed: bool = False) -> str:
        """Return the value that a file of one line holds."""
        return printable(self.text(path, needed=needed))

    def number(self, path: str, *, needed: bool = False) -> int | None:
        """Return the number above 0 in a file, else None. Text that is no number is noted."""
        text = self.line(path, needed=needed)
        number = parse_whole(text)
        if text and number is None:
            self.notes.append(f"/{path}: {text[:40]!r} is not a number")

        # -1, signed or not: the driver does not know.
        is_known = number and number > 0 and number not in _UNKNOWN
        return number if is_known else None

    def settings(self, path: str) -> Values:
        """Return the lines ``NAME=value`` of a file, without quotes around values."""
        values = {}
        for line in self.text(path).splitlines():
            name, sign, value = line.partition("=")
            if sign:
                values[name] = printable(value).strip("\"'")
        return values

    def names(self, path: str, *, needed: bool = False) -> Texts:
        """Return the names in a folder, sorted; none if it cannot be read."""
        try:
            entries = list(self._place(path).iterdir())
        except OSError as error:
            self._note_failure(path, error, needed=needed)
            return ()

        names = sorted(entry.name for entry in entries)
        if self.copy:
            self.copy.add_folder(path, names)
        return tuple(filter(str.isprintable, names))

    def folders(self, path: str, *, needed: bool = False) -> Texts:
        """Return the names of folders in a folder, and of links to folders."""
        folder = self.root / path
        names = self.names(path, needed=needed)
        return tuple(name for name in names if (folder / name).is_dir())

    def real(self, path: str) -> str:
        """Return a path with its links followed, even if it leads to nothing."""
        real = os.path.realpath(self.root / path)
        return os.path.relpath(real, self.root)

    def device(self, path: str) -> tuple[str, str]:
        """Return the PCI address and the driver of a device, "" for none.

        A device without a PCI address has that of its controller.
        """
        fields = self.settings(f"{path}/uevent")
        parts = self.real(path).split("/")
        controllers = filter(_PCI.fullmatch, reversed(parts))
        pci = fields.get("PCI_SLOT_NAME", next(controllers, ""))
        return pci, fields.get("DRIVER", "")

    def answer(self, name: str, ask: Callable[[], str]) -> str:
        """Return the answer of a tool: of ``ask`` on a live machine, else the recorded answer.

        Raises ToolUnavailable.
        """
        path = f"commands/{name}"
        try:
            text = ask() if self.live else self._data(path).decode(errors="replace")
        except (ToolUnavailable, OSError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            if getattr(error, "errno", None) in _MISSING:
                reason = f"/{path}: not in this recording"
            raise ToolUnavailable(reason) from None

        if self.copy:
            self.copy.add_file(path, text.encode())
        return text

    def _data(self, path: str) -> bytes:
        place = self._place(path)
        # A pipe in a recording would wait for a writer for ever.
        if not stat.S_ISREG(place.stat().st_mode):
            raise OSError(errno.EINVAL, "is not a regular file")

        with place.open("rb", buffering=0) as file:
            chunks = iter(lambda: file.read(_CHUNK), b"")
            return b"".join(islice(chunks, _MOST // _CHUNK))

    def _place(self, path: str) -> Path:
        """Return where a path lies.

        Raises OSError if it leads out of the recording.
        """
        place = self.root / path
        if not self.live:
            real = Path(os.path.realpath(place))
            if not real.is_relative_to(self.root):
                raise OSError(errno.EXDEV, "leads out of the recording")
        return place

    def _note_failure(self, path: str, error: OSError, *, needed: bool) -> None:
        if not needed and error.errno in _NONE:
            return

        is_missing = error.errno in _MISSING
        reason = error.strerror or type(error).__name__
        note = f"/{path}: {'is not there' if is_missing else reason}"
        if note not in self.notes:
            self.notes.append(note)


def parse_whole(text: str) -> int | None:
    """Return a text of less than 20 characters as a whole number, None for other text."""
    is_number = text.removeprefix("-").isdecimal()
    return int(text) if is_number and len(text) < 20 else None


def printable(text: str) -> str:
    """Return a text as one line, with blanks for characters that a terminal would obey."""
    letters = text.strip().strip("\0")
    shown = (letter if letter.isprintable() else " " for letter in letters)
    return "".join(shown).strip()


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
