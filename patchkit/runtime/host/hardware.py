"""What names and numbers mean on a Spark: recipes/env/hardware.toml, and the pairing of twins."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from patchkit.paths import RECIPES

_PORT = re.compile(r"p(?P<number>\d)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """A ConnectX function's cage, and the PCI address of the cage's other half, ``""`` for none."""

    cage: int
    twin: str


@cache
def facts() -> dict[str, Any]:
    """hardware.toml: ``cpu_parts``, ``capabilities``, ``connectx``, ``remark``."""
    return tomllib.loads((RECIPES / "env" / "hardware.toml").read_text(encoding="utf-8"))


def is_uplink(port: str) -> bool:
    """Whether a phys_port_name may be that of a cage: ``p0`` or none, but not ``pf0vf1``."""
    return not port or _PORT.fullmatch(port) is not None


def is_connectx(pci: str, driver: str = "") -> bool:
    """By the driver; by a Spark's own addresses where no driver is told."""
    return driver == facts()["connectx"]["driver"] if driver else _known(pci) is not None


def halves(functions: Mapping[str, str]) -> dict[str, Half]:
    """PCI address → half of a cage, for ConnectX functions given with their phys_port_name.

    Goes by addresses, since names depend on udev. The functions of a Spark are known; of another
    board, a pair in two PCI domains that agrees in everything else counts as the halves of a cage.
    """
    found = {}
    for pci, port in functions.items():
        known = _known(pci)
        twins = [other for other in functions if _mirror(pci, other)]
        twin = twins[0] if len(twins) == 1 and _agree(port, functions[twins[0]]) else ""
        number = _number(port, known)
        if number is not None and (twin or known is not None):
            found[pci] = Half(cage=number, twin=twin)
    return found


def place(cage: int) -> str:
    """Where a Spark's cage is, ``""`` if there is none of that number."""
    cages = facts()["connectx"]["cages"]
    return str(cages[cage]["place"]) if cage < len(cages) else ""


def _known(pci: str) -> int | None:
    cages = enumerate(facts()["connectx"]["cages"])
    return next((number for number, each in cages if pci in each["functions"]), None)


def _number(port: str, known: int | None) -> int | None:
    match = _PORT.fullmatch(port)
    return int(match["number"]) if match else known


def _mirror(one: str, other: str) -> bool:
    """The same bus, slot and function, in another domain."""
    return one != other and one.partition(":")[2] == other.partition(":")[2]


def _agree(port: str, other: str) -> bool:
    return not port or not other or port == other
