"""QSFP networks as owners have them, beside those of ``hosts``: ``MACHINES["bare_half"]``.

Addresses, MTUs and links are those of real machines, seen in what their owners published; all else
is that of ``hosts``. What worked for the owner is said beside it. Files about variables have no
rows for them: nothing but ``patchkit net`` asks whether 10.0.1.2 or 192.168.11.13 is an address.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from support import hosts
from support.hosts import A0, A1, B0, B1
from support.machine_files import Machine, write


def _cabled(
    changes: dict[str, dict[str, object]] | None = None, **addresses: str
) -> Machine:
    """A Spark whose named halves have a link and one address, or none for ``""``."""
    linked = {"up": True, "speed": hosts.RATE, "mtu": 9000}
    halves = {
        name: {**linked, "addresses": (each,) if each else ()}
        for name, each in addresses.items()
    }
    for name, its in (changes or {}).items():
        halves[name] = {**halves.get(name, {}), **its}
    made = hosts.cable_out(0)
    cards = (replace(card, **halves.get(card.name, {})) for card in made.cards)
    return replace(made, cards=tuple(cards))


MACHINES = {
    # Cables, and nothing configured.
    "fresh": _cabled(**{A0: "", B0: ""}),
    "fresh_port1": _cabled(**{A1: "", B1: ""}),
    "fresh_both": _cabled(**{A0: "", B0: "", A1: "", B1: ""}),
    # The head of NVIDIA's two-node playbook.
    "playbook": _cabled(**{A0: "192.168.100.10/24", B0: "192.168.101.10/24"}),
    # Numbers that follow no rule; the other node has its cable in cage 1. Works.
    "thirteen": _cabled(**{A0: "192.168.11.13/24", B0: "192.168.12.13/24"}),
    # The second half has no address, cage 1 one without a cable. 22.96 GB/s with both HCAs.
    "bare_half": _cabled(
        {A1: {"addresses": ("192.168.20.11/24",), "mtu": 9000}},
        **{A0: "192.168.10.11/24", B0: ""},
    ),
    # A link-local address that was set by hand, none on the other half. 23.85 GB/s.
    "set_link_local": _cabled(**{A1: "169.254.207.1/16", B1: ""}),
    # Both halves have drawn theirs (works), or only the second one (ibv_modify_qp fails).
    "drawn_pair": _cabled(**{A1: "169.254.207.1/16", B1: "169.254.83.14/16"}),
    # The same with the halves the other way round.
    "drawn_first": _cabled(**{A1: "169.254.83.14/16", B1: "10.100.0.1/24"}),
    # Both cages are cabled, one has addresses. Works.
    "second_cable": _cabled(**{A0: "10.0.1.2/24", B0: "10.0.2.2/24", A1: "", B1: ""}),
    # One address, and the MTU of a LAN. Works.
    "small_mtu": _cabled(
        {A0: {"mtu": 1500}, B0: {"mtu": 1500}}, **{A0: "10.0.1.1/24", B0: ""}
    ),
    # A node of a ring of three, with numbers of its owner's.
    "own_ring": _cabled(
        **{A0: "192.168.10.1/24", B0: "192.168.11.1/24"},
        **{A1: "192.168.30.2/24", B1: "192.168.31.2/24"},
    ),
}


def build(folder: Path, name: str) -> Path:
    """Write a machine of these, or node 0 of ``hosts``, below ``folder``; return that root."""
    if name not in MACHINES:
        return hosts.build(folder, name)
    root = folder / name
    write(root, MACHINES[name])
    return root
