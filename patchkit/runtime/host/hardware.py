"""Read what names and numbers mean on a Spark (recipes/env/hardware.toml), and pair twins."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from patchkit.paths import RECIPES
from patchkit.records import read_toml

_PORT = re.compile(r"p(?P<number>\d)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """The cage of a ConnectX function, and the PCI address of its other half, "" for none."""

    cage: int
    twin: str


@cache
def facts() -> dict[str, Any]:
    """Return hardware.toml: ``cpu_parts``, ``capabilities``, ``connectx``, ``remark``."""
    return read_toml(dict[str, Any], RECIPES / "env" / "hardware.toml")


def is_uplink(port: str) -> bool:
    """Return whether a phys_port_name may be that of a cage: ``p0`` or "", but not ``pf0vf1``."""
    return not port or _PORT.fullmatch(port) is not None


def is_connectx(pci: str, driver: str = "") -> bool:
    """Decide by the driver; where none is known, by the addresses that a Spark has."""
    return driver == facts()["connectx"]["driver"] if driver else _known(pci) is not None


def halves(functions: Mapping[str, str]) -> dict[str, Half]:
    """Return PCI address → half of a cage, for ConnectX functions and their phys_port_name.

    Addresses decide, since names depend on udev. Those of a Spark are known; on another board, two
    functions that differ in nothing but the PCI domain are the halves of a cage.
    """
    found = {}
    for pci, port in functions.items():
        known = _known(pci)
        twins = [other for other in functions if _mirror(pci, other)]
        # The halves of a cage have the same port, where the driver names any.
        alike = len(twins) == 1 and (not port or functions[twins[0]] in ("", port))
        twin = twins[0] if alike else ""
        match = _PORT.fullmatch(port)
        number = int(match["number"]) if match else known
        if number is not None and (twin or known is not None):
            found[pci] = Half(cage=number, twin=twin)
    return found


def place(cage: int) -> str:
    """Return where a Spark's cage is; "" if there is none of that number."""
    cages = facts()["connectx"]["cages"]
    return str(cages[cage]["place"]) if cage < len(cages) else ""


def one_half_fills(speed: int | None) -> bool:
    """Return whether one half of a cage carries all of a link; ``speed`` in Mbit/s, or unknown."""
    return speed is not None and speed <= facts()["connectx"]["half_gbits"] * 1000


def _known(pci: str) -> int | None:
    """Return the cage that a Spark has at this address."""
    cages = enumerate(facts()["connectx"]["cages"])
    return next((number for number, each in cages if pci in each["functions"]), None)


def _mirror(one: str, other: str) -> bool:
    """Return whether bus, slot and function are the same, and the domain is another."""
    return one != other and one.partition(":")[2] == other.partition(":")[2]
