"""Read from the lines of NCCL_DEBUG=INFO which network each rank took, and judge it. Pure.

``host:pid:tid [gpu] NCCL INFO`` stands before each form, and before that whatever Ray, vLLM,
journald or docker put there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from patchkit.doctor.peers.node_report import make_finding
from patchkit.finding import Finding
from patchkit.records import RECIPES, read_toml

_HCA, _OFF, _NET = "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_NET"
_COMPARED = (_HCA, "NCCL_SOCKET_IFNAME", _OFF, _NET)
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LINE = re.compile(
    r"(?P<host>[\w.-]{1,64}):(?P<pid>\d{1,9}):\d{1,9} \[-?\d{1,3}\] "
    r"(?:\S{1,80}:\d{1,6} )?NCCL (?:INFO|WARN) (?P<text>.*)"
)
_INIT = re.compile(r"\brank (\d+) n[rR]anks (\d+)\b.*(?:Init |COMPLETE|localRank)")
_SET = re.compile(r"(NCCL_\w+) set (?:by environment )?to (\S+?)\.?(?:\s|$)")
_TEXTS = read_toml(dict[str, str], RECIPES / "doctor" / "nccl.toml", key="forms")
_FORMS = {form: re.compile(text) for form, text in _TEXTS.items()}
_ENTRY = re.compile(r"\[\d+\]([^:\s]+):")
_LONGEST, _MOST = 4096, 4096  # characters of a line, and processes that are kept


@dataclass(slots=True, kw_only=True)
class NcclRank:
    """Hold what one process said: by form what came first, devices, and the variables it was given.

    ``network`` is the one that its channels go over, else the one that was chosen, as ``evidence``
    says; "" if unknown. ``ranks`` is the size of its largest group.
    """

    name: str
    ranks: int = 0
    network: str = ""
    evidence: str = ""
    said: dict[str, str] = field(default_factory=dict)
    devices: dict[str, None] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)

    def read_line(self, text: str) -> None:
        """Take what one line says."""
        if given := _SET.match(text):
            self.settings.setdefault(given[1], given[2])
        elif (init := _INIT.search(text)) and int(init[2]) > self.ranks:
            # A process is in several groups; in the largest is what people call its rank.
            self.name, self.ranks = f"rank {init[1]}", int(init[2])
        for form, pattern in _FORMS.items():
            if found := pattern.match(text):
                self.said.setdefault(form, found[1])
                if form == "channel" or (
                    form == "network" and "channel" not in self.said
                ):
                    self.network, self.evidence = found[1], text
                elif form == "devices":
                    self.devices = dict.fromkeys(_ENTRY.findall(found[1]))
                elif form == "virtual":  # both halves of a cable, or one
                    self.devices |= dict.fromkeys(found[1].split("+"))


def read_nccl(lines: Iterable[str]) -> list[NcclRank]:
    """Return what each process said in the lines of a log; lines of others are passed over."""
    found: dict[tuple[str, str], NcclRank] = {}
    for whole in lines:
        if "NCCL" not in whole:
            continue
        line = _ANSI.sub("", whole[:_LONGEST]).rstrip()
        if match := _LINE.search(line):
            host, pid = key = match["host"], match["pid"]
            if key in found or len(found) < _MOST:
                rank = found.setdefault(key, NcclRank(name=f"process {pid} on {host}"))
                rank.read_line(match["text"])
    return [*found.values()]


def nccl_findings(
    where: str, ranks: Sequence[NcclRank], meant: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield what a node's ranks took, against the variables of its env file.

    Values that reached NCCL come first, since they decide.
    """
    if not ranks:
        yield make_finding("nccl-silent", where)
    for rank in ranks:
        if rank.ranks == 1:
            yield make_finding("nccl-alone", where)
            continue
        if not rank.network:
            yield make_finding("nccl-not-said", where, rank=rank.name)
            continue
        # NCCL's own IB, or the plugin of HPC-X, which is IBext_v10.
        sockets = _ENTRY.findall(rank.said.get("sockets", ""))
        used = ", ".join((rank.network.startswith("IB") and rank.devices) or sockets)
        common = {
            "rank": rank.name,
            "evidence": rank.evidence,
            "used": used or "what it hides",
        }
        differs = False
        for name in _COMPARED:
            if (
                name in meant
                and (taken := rank.settings.get(name, meant[name])) != meant[name]
            ):
                values = {
                    "name": name,
                    "taken": taken,
                    "meant": meant[name] or "nothing",
                }
                yield make_finding("nccl-value", where, **common, **values)
                differs = True
        off = (
            meant.get(_OFF, "") not in ("", "0")
            or meant.get(_NET, "").casefold() == "socket"
        )
        no_ib = rank.said.get("no_ib", "")
        if rank.network == "Socket" and not off and (no_ib or meant.get(_HCA)):
            yield make_finding(
                "nccl-socket", where, seen=no_ib and f": {no_ib}", **common
            )
        elif not differs:
            version, bootstrap = (
                rank.said.get("version", ""),
                rank.said.get("bootstrap", ""),
            )
            yield make_finding(
                "nccl-took",
                where,
                version=version and f"{version} ",
                network=f"NET/{rank.network}",
                interface=bootstrap and f"; the ranks meet over {bootstrap}",
                **common,
            )
