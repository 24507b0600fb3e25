"""Read what names and numbers mean on a Spark (recipes/env/hardware.toml), and pair twins."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from patchkit.paths import RECIPES
from patchkit.records import read_toml

_PORT = re.compile(r"p(?P<number>\d)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """The cage of a ConnectX function, and the PCI address of its other half."""

    cage: int
    twin: str


@cache
def facts() -> dict[str, Any]:
    """Return hardware.toml: ``cpu_parts``, ``capabilities``, ``connectx``, ``remark``."""
    return read_toml(dict[str, Any], RECIPES / "env" / "hardware.toml")


def is_uplink(port: str) -> bool:
    """Return whether a phys_port_name may be that of a cage: ``p0`` or "", but not ``pf0vf1``."""
    return not port or _PORT.fullmatch(port) is not None


def half_of(pci: str) -> Half | None:
    """Return the half of a cage that a Spark has at a PCI address: names depend on udev."""
    for number, cage in enumerate(facts()["connectx"]["cages"]):
        if pci in cage["functions"]:
            (twin,) = (other for other in cage["functions"] if other != pci)
            return Half(cage=number, twin=twin)
    return None


def place(cage: int) -> str:
    """Return where a Spark's cage is; "" if there is none of that number."""
    cages = facts()["connectx"]["cages"]
    return str(cages[cage]["place"]) if cage < len(cages) else ""


def one_half_fills(speed: int | None) -> bool:
    """Return whether one half of a cage carries all of a link; ``speed`` in Mbit/s, or unknown."""
    return speed is not None and speed <= facts()["connectx"]["half_gbits"] * 1000
