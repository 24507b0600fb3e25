"""Collect the names of a cluster's people and machines, and match a MAC in each spelling."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from patchkit.doctor.peers.node_report import NodeReport
from patchkit.frozen import frozen

MAC = re.compile(r"(?:[0-9a-f]{2}[:-]){5}[0-9a-f]{2}", re.IGNORECASE)
_FIRST_LABEL = re.compile(r"(?!\d+\.)[^.]{3,}(?=\.)")
_LOCAL_BIT = 0x02  # of a MAC's first octet; the EUI-64 of a MAC has this bit inverted


@frozen
class PrivateNames:
    """The names in the reports of nodes: ``hosts`` has a list of names for each node.

    ``models`` are names and folders of models. ``serials`` are MAC addresses and serial numbers.
    """

    hosts: Sequence[Sequence[str]] = ()
    users: Sequence[str] = ()
    addresses: Sequence[str] = ()
    serials: Sequence[str] = ()
    models: Sequence[str] = ()


def mac_key(text: str) -> str:
    """Return a key that is the same for a MAC and for the EUI-64 that is made of it.

    It is the MAC's hexadecimal digits without separators, with the local bit cleared.
    """
    digits = re.sub(r"^0x|[:.-]", "", text.casefold())
    is_eui_64 = digits[6:10] in ("fffe", "ffff", "0300")
    if len(digits) == 16 and is_eui_64:
        digits = digits[:6] + digits[10:]

    if len(digits) != 12:
        return digits

    return f"{int(digits[:2], 16) & ~_LOCAL_BIT:02x}{digits[2:]}"


def mac_form(key: str) -> str:
    """Return a regular expression for a MAC in each spelling, and for its EUI-64.

    ``key`` is what ``mac_key`` returns.
    """
    octets = re.findall("..", key)
    local = f"{int(octets[0], 16) | _LOCAL_BIT:02x}"

    sign = "[:.-]?"
    first_half = sign.join((f"(?:{octets[0]}|{local})", *octets[1:3]))

    middle = rf"(?:{sign}[0-9a-f]{{2}}{sign}[0-9a-f]{{2}})?"
    last_half = sign.join(octets[3:])
    return rf"(?<![0-9a-f])(?:0x)?{first_half}{middle}{sign}{last_half}(?![0-9a-f])"


def private_names(reports: Iterable[NodeReport]) -> PrivateNames:
    """Return the names in the reports of nodes."""
    hosts: list[list[str]] = []
    users: list[str] = []
    addresses: list[str] = []
    serials: list[str] = []

    models: set[str] = set()
    for report in reports:
        models.update(model_print.folder for model_print in report.models or ())
        if report.placed:
            models |= {report.placed.model, report.placed.folder}

        user, _, host = report.node.rpartition("@")
        users.append(user)

        names = [host]
        if facts := report.facts:
            names.append(facts.host.system.hostname)
            users += [facts.user, Path(facts.home).name]
            for netdev in facts.host.netdevs:
                addresses += [address.address for address in netdev.addresses]
                serials.append(netdev.mac)
            for rdma in facts.host.rdma:
                addresses += [gid.address for gid in rdma.gids]

        # People shorten a host's name to its first label; an IP address has no such label.
        labels = map(_FIRST_LABEL.match, names)
        hosts.append([*names, *(label[0] for label in labels if label)])

    return PrivateNames(
        hosts=hosts,
        users=users,
        addresses=addresses,
        serials=serials,
        models=sorted(models),
    )
