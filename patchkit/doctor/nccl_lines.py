"""Read from the lines of NCCL_DEBUG=INFO which network each rank took, and judge it. Pure.

Each line of NCCL begins with ``host:pid:tid [gpu] NCCL INFO``; Ray, vLLM, journald or docker may
write a prefix before that.
"""

import re
from collections.abc import (
    Iterable,
    Sequence,
)
from dataclasses import dataclass, field

from patchkit.cluster.ssh.ssh import make_finding
from patchkit.doctor.symptoms.lines import ESCAPES
from patchkit.finding import Findings
from patchkit.frozen import Values
from patchkit.records import RECIPES, read_toml

_COMPARED = (
    "NCCL_IB_HCA",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_DISABLE",
    "NCCL_NET",
)
_LINE = re.compile(
    r"(?P<host>[\w.-]{1,64}):(?P<pid>\d{1,9}):\d{1,9} \[-?\d{1,3}\] "
    r"(?:\S{1,80}:\d{1,6} )?NCCL (?:INFO|WARN) (?P<text>.*)"
)
_INIT = re.compile(r"\brank (\d+) n[rR]anks (\d+)\b.*(?:Init |COMPLETE|localRank)")
_SET = re.compile(r"(NCCL_\w+) set (?:by environment )?to (\S+?)\.?(?:\s|$)")
_TEXTS = read_toml(
    dict[str, str],
    RECIPES / "doctor" / "nccl.toml",
    key="forms",
)
_FORMS = {form: re.compile(text) for form, text in _TEXTS.items()}
_ENTRY = re.compile(r"\[\d+\]([^:\s]+):")
_LONGEST = 4096  # characters of a line
_MOST_RANKS = 4096


@dataclass(slots=True, kw_only=True)
class NcclRank:
    """What one process wrote about its network.

    ``words`` is form → the words of its first match, ``settings`` the variables of NCCL that the
    process got. ``network`` is that of the channels, else the one that NCCL chose, "" if unknown;
    ``evidence`` is the line that says so. ``ranks`` is the size of the process's largest group.
    """

    name: str
    ranks: int = 0
    network: str = ""
    evidence: str = ""
    words: dict[str, str] = field(default_factory=dict)
    devices: dict[str, None] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)

    def read_line(self, text: str) -> None:
        """Add the facts of one line, given without its prefix."""
        setting = _SET.match(text)

        group = _INIT.search(text)
        if setting:
            self.settings.setdefault(setting[1], setting[2])
        elif group and int(group[2]) > self.ranks:
            # A process is in several groups; it is named by its rank in the largest one.
            self.name = f"rank {group[1]}"
            self.ranks = int(group[2])

        for form, pattern in _FORMS.items():
            if match := pattern.match(text):
                self.words.setdefault(form, match[1])
                self._read_form(form, match)

    def _read_form(self, form: str, match: re.Match[str]) -> None:
        words = match[1]
        match form:
            case "network" if "channel" in self.words:
                pass  # a line of a channel has told the network that is really used
            case "network" | "channel":
                self.network = words
                self.evidence = match.string
            case "devices":
                self.devices = dict.fromkeys(_ENTRY.findall(words))
            case "virtual":  # a device that joins others: both halves of a port, or one
                self.devices |= dict.fromkeys(words.split("+"))

    @property
    def interfaces(self) -> str:
        """Return the RDMA devices, or interfaces of sockets, of the network; "" if unknown."""
        # The network is IB in NCCL itself, and IBext_v10 in the plugin of HPC-X.
        if self.network.startswith("IB") and self.devices:
            return ", ".join(self.devices)

        sockets = self.words.get("sockets", "")
        return ", ".join(_ENTRY.findall(sockets))


def read_nccl(lines: Iterable[str]) -> list[NcclRank]:
    """Return what each process of NCCL wrote in a log; lines of other programs are ignored."""
    ranks: dict[str, NcclRank] = {}
    for line in lines:
        if "NCCL" not in line:
            continue

        plain = ESCAPES.sub("", line[:_LONGEST]).rstrip()
        match = _LINE.search(plain)
        if match is None:
            continue

        name = f"process {match['pid']} on {match['host']}"
        if len(ranks) < _MOST_RANKS:
            ranks.setdefault(name, NcclRank(name=name))

        if name in ranks:
            ranks[name].read_line(match["text"])

    return list(ranks.values())


def nccl_findings(
    where: str,
    ranks: Sequence[NcclRank],
    variables: Values,
) -> Findings:
    """Yield the findings about the network of a node's ranks.

    ``variables`` are those of the node's env file. For each rank, values of variables that
    differ from the env file come first, since they decide the network.
    """
    if not ranks:
        yield make_finding("nccl-silent", where)

    for rank in ranks:
        if rank.ranks == 1:
            yield make_finding("nccl-alone", where)
        elif not rank.network:
            yield make_finding("nccl-not-said", where, rank=rank)
        else:
            yield from _judge_rank(where, rank, variables)


def _judge_rank(
    where: str,
    rank: NcclRank,
    variables: Values,
) -> Findings:
    common = {"rank": rank, "used": rank.interfaces or "what it hides"}
    changed = False
    for name in _COMPARED:
        meant = variables.get(name)
        taken = rank.settings.get(name, meant)
        if meant is None or taken == meant:
            continue

        changed = True
        yield make_finding(
            "nccl-value",
            where,
            name=name,
            taken=taken,
            meant=meant or "nothing",
            **common,
        )

    no_ib = rank.words.get("no_ib", "")
    wants_ib = no_ib or variables.get("NCCL_IB_HCA")
    is_disabled = variables.get("NCCL_IB_DISABLE", "") not in ("", "0")
    is_off = is_disabled or variables.get("NCCL_NET", "").casefold() == "socket"
    if rank.network == "Socket" and wants_ib and not is_off:
        reason = f": {no_ib}" if no_ib else ""
        yield make_finding(
            "nccl-socket",
            where,
            seen=reason,
            **common,
        )
    elif not changed:
        version = rank.words.get("version")
        bootstrap = rank.words.get("bootstrap")
        yield make_finding(
            "nccl-took",
            where,
            version=f"{version} " if version else "",
            network=f"NET/{rank.network}",
            interface=f"; the ranks meet over {bootstrap}" if bootstrap else "",
            **common,
        )
