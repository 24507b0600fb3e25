"""Read from the lines of NCCL_DEBUG=INFO which network each rank took. Pure.

The forms are those of NCCL's own sources, 2.4 to 2.30: net_ib/init.cc, net_socket.cc, net.cc,
bootstrap.cc, param.cc and init.cc; ``host:pid:tid [gpu] NCCL INFO`` stands before each, and before
that whatever Ray, vLLM, journald or docker put there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LINE = re.compile(
    r"(?P<host>[\w.-]{1,64}):(?P<pid>\d{1,9}):\d{1,9} \[-?\d{1,3}\] "
    r"(?:\S{1,80}:\d{1,6} )?NCCL (?:INFO|WARN) (?P<text>.*)"
)
_VERSION = re.compile(r"NCCL version (?P<version>\d+\.\d+\.\d+\S*?)(?:\+cuda[\d.]+)?(?:\s|$)")
_INIT = re.compile(r"\brank (?P<rank>\d+) n[rR]anks (?P<ranks>\d+)\b.*(?:Init |COMPLETE|localRank)")
_IB = re.compile(r"NET/IB ?: Using (?P<list>.*?)(?:\[RO\])?\s*; OOB (?P<oob>[^:\s]*)")
_SOCKET = re.compile(r"NET/Socket ?: Using (?P<list>.*)")
_BOOTSTRAP = re.compile(r"Bootstrap ?: Using (?:\[\d+\])?(?P<interface>[^:\s]+):")
_NETWORK = re.compile(r"(?:Using network|Assigned NET plugin) (?P<name>\S+)")
_CHANNEL = re.compile(
    r"Channel \d+/\d+ : .*\[(?:send|receive)\] via NET/(?P<name>[^/\s]+)/(?P<device>\d+)"
)
_VIRTUAL = re.compile(r"NET/IB ?: Made virtual device \[(?P<number>\d+)\] name=(?P<names>\S+)")
_SET = re.compile(r"(?P<name>NCCL_\w+) set (?:by environment )?to (?P<value>\S+?)\.?(?:\s|$)")
_NO_IB = re.compile(r"NET/IB ?: No device found|Failed to initialize NET plugin IB\w*")
_ENTRY = re.compile(r"\[(?P<number>\d+)\](?P<name>[^:\s]+):(?P<rest>\S*)")
_LONGEST, _MOST = 4096, 4096  # characters of a line, and processes that are kept


@dataclass(slots=True, kw_only=True)
class NcclRank:
    """What one process said; ``rank`` is None, and texts and lists are empty, where it did not.

    ``devices`` are RDMA devices and ports as offered, ``used`` those that channels go over,
    ``sockets`` the interfaces of NET/Socket, ``bootstrap`` the one where ranks meet. ``settings``
    are the variables that NCCL says it was given, ``no_ib`` its words for having no RDMA device.
    """

    host: str
    pid: int
    rank: int | None = None
    ranks: int = 0
    version: str = ""
    network: str = ""
    devices: dict[int, tuple[str, int]] = field(default_factory=dict)
    virtual: dict[int, tuple[str, ...]] = field(default_factory=dict)
    channels: Counter[tuple[str, int]] = field(default_factory=Counter)
    sockets: tuple[str, ...] = ()
    bootstrap: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    no_ib: str = ""
    evidence: str = ""

    @property
    def taken(self) -> str:
        """Return the network: the one that channels go over, else the one that was chosen."""
        return self.channels.most_common(1)[0][0][0] if self.channels else self.network

    @property
    def over_ib(self) -> bool:
        """Return whether it is RDMA: NCCL's own IB, or the plugin of HPC-X, which is IBext_v10."""
        return self.taken.startswith("IB")

    @property
    def used(self) -> tuple[str, ...]:
        """Return the names of the devices that carry data; those that are offered, if unknown."""
        numbers = sorted({number for name, number in self.channels if name == self.taken})
        if not self.over_ib:
            return tuple(self.sockets[each] for each in numbers if each < len(self.sockets))
        names = [name for number in numbers for name in self._behind(number)]
        return tuple(dict.fromkeys(names)) or self.offered

    @property
    def offered(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for name, _ in self.devices.values()))

    def _behind(self, number: int) -> tuple[str, ...]:
        """Return the devices of a channel's number: a virtual one may be both halves of a cable."""
        if number in self.virtual:
            return self.virtual[number]
        return (self.devices[number][0],) if number in self.devices else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclLog:
    """What a log says of NCCL: its ranks, and versions that no process' name stands before."""

    ranks: tuple[NcclRank, ...] = ()
    versions: tuple[str, ...] = ()


def read_nccl(lines: Iterable[str]) -> NcclLog:
    """Return what the lines of a log say; lines of others are passed over."""
    found: dict[tuple[str, int], NcclRank] = {}
    versions: dict[str, None] = {}
    for whole in lines:
        if "NCCL" not in whole:
            continue
        line = _ANSI.sub("", whole[:_LONGEST]).rstrip()
        match = _LINE.search(line)
        if match is None:
            if version := _VERSION.search(line):
                versions[version["version"]] = None
            continue
        key = match["host"], int(match["pid"])
        if key not in found and len(found) >= _MOST:
            continue
        rank = found.setdefault(key, NcclRank(host=key[0], pid=key[1]))
        _take(rank, match["text"])
    return NcclLog(ranks=tuple(found.values()), versions=tuple(versions))


def _take(rank: NcclRank, text: str) -> None:
    """Take what one line says."""
    if match := _CHANNEL.match(text):
        if not rank.channels:
            rank.evidence = text
        rank.channels[match["name"], int(match["device"])] += 1
    elif match := _IB.match(text):
        entries = _ENTRY.finditer(match["list"])
        rank.devices = {int(e["number"]): (e["name"], _port(e["rest"])) for e in entries}
    elif match := _SOCKET.match(text):
        rank.sockets = tuple(each["name"] for each in _ENTRY.finditer(match["list"]))
    elif match := _BOOTSTRAP.match(text):
        rank.bootstrap = match["interface"]
    elif match := _VIRTUAL.match(text):
        rank.virtual[int(match["number"])] = tuple(match["names"].split("+"))
    elif match := _SET.match(text):
        rank.settings.setdefault(match["name"], match["value"])
    elif _NO_IB.match(text):
        rank.no_ib = rank.no_ib or text
    else:
        _take_init(rank, text)


def _take_init(rank: NcclRank, text: str) -> None:
    if match := _NETWORK.match(text):
        rank.network, rank.evidence = match["name"], rank.evidence or text
    elif match := _VERSION.match(text):
        rank.version = match["version"]
    elif (match := _INIT.search(text)) and int(match["ranks"]) > rank.ranks:
        # A process is in several groups; its number in the largest is what people call its rank.
        rank.rank, rank.ranks = int(match["rank"]), int(match["ranks"])


def _port(rest: str) -> int:
    number = rest.partition("/")[0]
    return int(number) if number.isdigit() and len(number) < 4 else 1
