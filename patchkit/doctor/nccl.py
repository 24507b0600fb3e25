"""Read from the lines of NCCL_DEBUG=INFO which network each rank took, and judge it. Pure.

The forms are those of NCCL's own sources, 2.4 to 2.30: net_ib/init.cc, net_socket.cc, net.cc,
bootstrap.cc, param.cc and init.cc; ``host:pid:tid [gpu] NCCL INFO`` stands before each, and before
that whatever Ray, vLLM, journald or docker put there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from patchkit.cluster.ssh.ssh import there
from patchkit.doctor.peers.check import make_finding
from patchkit.finding import Finding

_HCA, _OFF, _NET = "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_NET"
_COMPARED = (_HCA, "NCCL_SOCKET_IFNAME", _OFF, _NET)
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
_CHANNEL = re.compile(r"Channel \d+/\d+ : .*\[(?:send|receive)\] via NET/(?P<name>[^/\s]+)/\d+")
_VIRTUAL = re.compile(r"NET/IB ?: Made virtual device \[\d+\] name=(?P<names>\S+)")
_SET = re.compile(r"(?P<name>NCCL_\w+) set (?:by environment )?to (?P<value>\S+?)\.?(?:\s|$)")
_NO_IB = re.compile(r"NET/IB ?: No device found|Failed to initialize NET plugin IB\w*")
_ENTRY = re.compile(r"\[\d+\](?P<name>[^:\s]+):")
_LONGEST, _MOST = 4096, 4096  # characters of a line, and processes that are kept


@dataclass(slots=True, kw_only=True)
class NcclRank:
    """Hold what one process said; ``rank`` is None, texts and lists are empty where it did not.

    ``network`` is the one that its channels go over, else the one that was chosen; ``devices`` are
    RDMA devices, ``sockets`` the interfaces of NET/Socket, ``bootstrap`` the one
    where ranks meet. ``settings`` are the variables that NCCL says it was given, ``no_ib`` its
    words for having no RDMA device.
    """

    host: str
    pid: int
    rank: int | None = None
    ranks: int = 0
    version: str = ""
    network: str = ""
    devices: dict[str, None] = field(default_factory=dict)
    sockets: tuple[str, ...] = ()
    bootstrap: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    no_ib: str = ""
    evidence: str = ""

    @property
    def over_ib(self) -> bool:
        """Return whether it is RDMA: NCCL's own IB, or the plugin of HPC-X, which is IBext_v10."""
        return self.network.startswith("IB")

    @property
    def used(self) -> str:
        """Return the devices, or for sockets the interfaces, that carry data; "" if unknown."""
        return ", ".join((self.over_ib and self.devices) or self.sockets)

    @property
    def name(self) -> str:
        """Return what people call it."""
        return f"process {self.pid} on {self.host}" if self.rank is None else f"rank {self.rank}"


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
        if key in found or len(found) < _MOST:
            rank = found.setdefault(key, NcclRank(host=key[0], pid=key[1]))
            _read_line(rank, match["text"])
    return NcclLog(ranks=tuple(found.values()), versions=tuple(versions))


def _read_line(rank: NcclRank, text: str) -> None:
    """Take what one line says."""
    if match := _CHANNEL.match(text):
        rank.network, rank.evidence = match["name"], text
    elif match := _IB.match(text):
        rank.devices = dict.fromkeys(found["name"] for found in _ENTRY.finditer(match["list"]))
    elif match := _VIRTUAL.match(text):  # both halves of a cable, or one
        rank.devices |= dict.fromkeys(match["names"].split("+"))
    elif match := _SOCKET.match(text):
        rank.sockets = tuple(entry["name"] for entry in _ENTRY.finditer(match["list"]))
    elif match := _SET.match(text):
        rank.settings.setdefault(match["name"], match["value"])
    elif match := _NETWORK.match(text):
        if not _CHANNEL.match(rank.evidence):
            rank.network, rank.evidence = match["name"], text
    elif _NO_IB.match(text):
        rank.no_ib = rank.no_ib or text
    else:
        _read_start(rank, text)


def _read_start(rank: NcclRank, text: str) -> None:
    if match := _BOOTSTRAP.match(text):
        rank.bootstrap = match["interface"]
    elif match := _VERSION.match(text):
        rank.version = match["version"]
    elif (match := _INIT.search(text)) and int(match["ranks"]) > rank.ranks:
        # A process is in several groups; its number in the largest is what people call its rank.
        rank.rank, rank.ranks = int(match["rank"]), int(match["ranks"])


def nccl_findings(where: str, log: NcclLog, meant: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what a node's ranks took, against the variables of its env file.

    ``where`` is the node, for what to do there.
    """
    if not log.ranks:
        versions = f"the log has NCCL's version alone ({', '.join(log.versions)})"
        reason = versions if log.versions else "the log has no line of NCCL"
        yield make_finding("nccl-silent", where, reason=reason)
    for rank in log.ranks:
        if rank.ranks == 1:
            yield make_finding("nccl-alone", where)
        elif not rank.network:
            yield make_finding("nccl-not-said", where, rank=rank.name)
        else:
            yield from _compare_settings(where, rank, meant) or [_describe_network(where, rank)]


def nccl_agreement(logs: Mapping[str, NcclLog]) -> Iterator[Finding]:
    """Yield what the ranks of all nodes do not agree on; ``logs`` by node."""
    ranks = [rank for log in logs.values() for rank in log.ranks if rank.network]
    where = ", ".join(logs)
    if len({rank.over_ib for rank in ranks}) > 1:
        networks = ", ".join(f"{rank.name}: {rank.network}" for rank in ranks)
        yield make_finding("nccl-networks", where, networks=networks)
    versions = {rank.version for rank in ranks if rank.version}
    versions |= {version for log in logs.values() for version in log.versions}
    if len(versions) > 1:
        yield make_finding("nccl-versions", where, versions=", ".join(sorted(versions)))


def _compare_settings(where: str, rank: NcclRank, meant: Mapping[str, str]) -> list[Finding]:
    """Return what differs from the env file; values that reached NCCL first, since they decide."""
    found = []
    for name in _COMPARED:
        if name in meant and (taken := rank.settings.get(name, meant[name])) != meant[name]:
            values = {"name": name, "taken": taken, "meant": meant[name] or "nothing"}
            found.append(make_finding("nccl-value", where, rank=rank.name, **values))
    off = _is_switched_on(meant.get(_OFF, "")) or meant.get(_NET, "").casefold() == "socket"
    if rank.network != "Socket" or off or not (rank.no_ib or meant.get(_HCA)):
        return found
    because, hint = "", there(where, "patchkit", "probe")
    if _is_switched_on(rank.settings.get(_OFF, "")) or rank.settings.get(_NET) == "Socket":
        because = f"; {_OFF} or {_NET} reached this rank and turned RoCE off"
        hint = "check the file that this rank was started with: patchkit check FILE"
    elif rank.no_ib:
        value = rank.settings.get(_HCA, meant.get(_HCA, ""))
        because = (
            f"; no RDMA device is active here, or none fits {_HCA}={value}, which "
            "takes names of RDMA devices (rocep1s0f0), not of interfaces; in a container "
            "/dev/infiniband may be missing"
        )
    socket = make_finding(
        "nccl-socket",
        where,
        rank=rank.name,
        interfaces=rank.used or "an unknown interface",
        seen=f": {rank.no_ib}" if rank.no_ib else "",
        because=because,
        hint=hint,
        evidence=rank.evidence,
    )
    return [*found, socket]


def _describe_network(where: str, rank: NcclRank) -> Finding:
    return make_finding(
        "nccl-took",
        where,
        rank=rank.name,
        version=f"{rank.version} " if rank.version else "",
        network=f"NET/{rank.network}",
        devices=rank.used or "devices that it does not name",
        interface=f"; the ranks meet over {rank.bootstrap}" if rank.bootstrap else "",
        evidence=rank.evidence,
    )


def _is_switched_on(value: str) -> bool:
    """Return whether a number turns a switch on, as NCCL reads it: any but 0."""
    return value.strip().lstrip("+-").isdigit() and int(value) != 0
