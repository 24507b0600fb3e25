"""Write the netplan file of a plan: a few lines of YAML, with strict values."""

from __future__ import annotations

import re

from patchkit.cluster.net.cages import letter
from patchkit.cluster.net.plan import Line, NetPlan
from patchkit.errors import HostError

# At most 15 characters: IFNAMSIZ of Linux less its NUL.
_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]{0,14}")
# What YAML could read as a number, a boolean (1.1: also y, no, on) or null is quoted.
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_WORDS = re.compile(r"y|n|yes|no|on|off|true|false|null", re.IGNORECASE)


def render(plan: NetPlan) -> str:
    """Return the netplan file: the interfaces that patchkit sets, and none that others do.

    Each has an address: of an interface without any, netplan makes ``ipv4.method=link-local`` for
    NetworkManager (0.106), which then draws one at random. The file names no renderer, so the
    machine's applies: NetworkManager on a desktop, networkd on a server. Naming one would take the
    interfaces from the other, and start networkd on a machine without it, where its wait-online can
    delay every boot. Links may be absent at boot (``optional``); nothing but the planned addresses
    is configured on them.
    """
    lines = [
        "# Written by `patchkit net apply`; `patchkit net undo` puts back what was here.",
        "network:",
        "  version: 2",
        "  ethernets:",
    ]
    for line in plan.written:
        lines += [
            f"    {_key(line.netdev)}: # {place(line)}",
            "      optional: true",
            "      dhcp4: false",
            "      dhcp6: false",
            "      link-local: []",
            f"      mtu: {line.mtu}",
            "      addresses:",
            *(f"        - {each.with_prefixlen}" for each in line.addresses),
        ]
    return "\n".join(lines) + "\n"


def place(line: Line) -> str:
    """Return ``cage 0, twin A``."""
    return f"cage {line.cage}, twin {letter(line.twin)}" if line.cage is not None else "by name"


def _key(name: str) -> str:
    """Return the name of an interface as a YAML key. Raises HostError for one that has no form."""
    if not _NAME.fullmatch(name):
        raise HostError(
            f"an interface is called {name!r}",
            why="netplan files take letters, digits, '_', '.' and '-' from patchkit, up to 15",
            hint="rename it, or configure it by hand",
        )
    plain = _PLAIN.fullmatch(name) and not _WORDS.fullmatch(name)
    return name if plain else f'"{name}"'
