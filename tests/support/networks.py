"""QSFP networks as owners have them, beside those of ``hosts``: ``MACHINES["bare_half"]()``.

Addresses, MTUs and links are those of real machines, seen in what their owners published; all else
is that of ``hosts``. What worked for the owner is in the docstring. Files about variables have no
rows for them: nothing but ``patchkit net`` asks whether 10.0.1.2 or 192.168.11.13 is an address.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from support import hosts
from support.machine_files import Machine, write

A0, B0 = "enp1s0f0np0", "enP2p1s0f0np0"
A1, B1 = "enp1s0f1np1", "enP2p1s0f1np1"


MACHINES: dict[str, Callable[[], Machine]] = {}


def machine(make: Callable[[], Machine]) -> Callable[[], Machine]:
    """Register a machine by its name."""
    MACHINES[make.__name__] = make
    return make


def _cabled(**addresses: str) -> Machine:
    """A Spark whose named halves have a link and one address, or none for ``""``."""
    return _with(
        hosts.cable_out(0),
        **{
            name: {
                "up": True,
                "speed": hosts.RATE,
                "mtu": 9000,
                "addresses": (each,) if each else (),
            }
            for name, each in addresses.items()
        },
    )


def _with(machine: Machine, **changes: dict[str, object]) -> Machine:
    cards = (replace(card, **changes.get(card.name, {})) for card in machine.cards)
    return replace(machine, cards=tuple(cards))


@machine
def fresh() -> Machine:
    """A cable, and nothing configured."""
    return _cabled(**{A0: "", B0: ""})


@machine
def fresh_port1() -> Machine:
    return _cabled(**{A1: "", B1: ""})


@machine
def fresh_both() -> Machine:
    """Two cables, and nothing configured."""
    return _cabled(**{A0: "", B0: "", A1: "", B1: ""})


@machine
def playbook() -> Machine:
    """The head of NVIDIA's two-node playbook."""
    return _cabled(**{A0: "192.168.100.10/24", B0: "192.168.101.10/24"})


@machine
def thirteen() -> Machine:
    """Numbers that follow no rule; the other node has its cable in cage 1. Works."""
    return _cabled(**{A0: "192.168.11.13/24", B0: "192.168.12.13/24"})


@machine
def bare_half() -> Machine:
    """The second half has no address, cage 1 one without a cable. 22.96 GB/s with both HCAs."""
    machine = _cabled(**{A0: "192.168.10.11/24", B0: ""})
    return _with(machine, **{A1: {"addresses": ("192.168.20.11/24",), "mtu": 9000}})


@machine
def set_link_local() -> Machine:
    """A link-local address that was set by hand, none on the other half. 23.85 GB/s."""
    return _cabled(**{A1: "169.254.207.1/16", B1: ""})


@machine
def drawn_pair() -> Machine:
    """Both halves have drawn theirs (works), or only the second one (ibv_modify_qp fails)."""
    return _cabled(**{A1: "169.254.207.1/16", B1: "169.254.83.14/16"})


@machine
def drawn_first() -> Machine:
    """The same with the halves the other way round."""
    return _cabled(**{A1: "169.254.83.14/16", B1: "10.100.0.1/24"})


@machine
def second_cable() -> Machine:
    """Both cages are cabled, one has addresses. Works."""
    return _cabled(**{A0: "10.0.1.2/24", B0: "10.0.2.2/24", A1: "", B1: ""})


@machine
def small_mtu() -> Machine:
    """One address, and the MTU of a LAN. Works."""
    machine = _cabled(**{A0: "10.0.1.1/24", B0: ""})
    return _with(machine, **{A0: {"mtu": 1500}, B0: {"mtu": 1500}})


@machine
def ring() -> Machine:
    """A node of a ring of three, with numbers of its owner's."""
    first = {A0: "192.168.10.1/24", B0: "192.168.11.1/24"}
    return _cabled(**first, **{A1: "192.168.30.2/24", B1: "192.168.31.2/24"})


def build(folder: Path, name: str) -> Path:
    """Write a machine of these, or node 0 of ``hosts``, below ``folder``; return that root."""
    if name not in MACHINES:
        return hosts.build(folder, name)
    root = folder / name
    write(root, MACHINES[name]())
    return root
