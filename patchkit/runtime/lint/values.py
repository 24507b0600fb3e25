"""Check values in a file: what a variable can hold, by recipes/env/values.toml, and addresses."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from ipaddress import ip_address
from typing import Any

from patchkit.finding import Finding, Level
from patchkit.paths import RECIPES
from patchkit.records import read_toml
from patchkit.runtime.files.content import Assignment
from patchkit.runtime.lint.placeholders import is_placeholder
from patchkit.runtime.rules.condition import Situation
from patchkit.runtime.rules.variables import lifetime

_NUMBER = re.compile(r"[+-]?(0[xX][0-9a-fA-F]{1,16}|[0-9]{1,20})")  # as strtoll takes it, base 0
_COUNT = re.compile(r"[0-9]{1,20}")
ADDRESSES = ("VLLM_HOST_IP", "MASTER_ADDR", "RAY_NODE_IP_ADDRESS", "RAY_OVERRIDE_NODE_IP_ADDRESS")
_NAMED = {"MASTER_ADDR"}  # may be a host's name as well
_NO_ADDRESS = "no IP address"


@cache
def bounds() -> Mapping[str, Any]:
    """Return the tables of values.toml."""
    return read_toml(dict[str, Any], RECIPES / "env" / "values.toml")


def check_value(assigned: Assignment, situation: Situation) -> Iterator[Finding]:
    """Return what is wrong with a value; a variable's default is always right.

    Programs go on with a wrong value, or take their default: that is a warning. An address that
    leads nowhere is an error where other nodes are known to connect to it.
    """
    if not assigned.literal or not assigned.value or is_placeholder(assigned.name, assigned.value):
        return
    if assigned.name in ADDRESSES and (trouble := _trouble(assigned, situation)):
        alone = situation.get("role", "") in ("", "single") or trouble == _NO_ADDRESS
        yield (assigned.warning if alone else assigned.error)(
            f"{assigned.shown}: {trouble}",
            why="The other nodes get this address, and connect to it.",
            hint="write the address that this node has on the network between the nodes",
            source="vLLM network_utils.get_ip" if assigned.name == "VLLM_HOST_IP" else "",
        )
    for kind, row in _rows().get(assigned.name, ()):
        if _TESTS[kind](assigned.value, row):
            continue
        life = lifetime(assigned.name)
        if life is None or life.default != assigned.value:
            may = f"{row['from']} to {row['to']}" if kind == "number" else ", ".join(row["words"])
            yield assigned.warning(
                f"{assigned.shown}: it takes {may}",
                why=row["why"],
                hint=f"write one of these, or leave {assigned.name} out",
                source=row["source"],
            )


def check_link_local(assigned: Sequence[Assignment]) -> Iterator[Finding]:
    """Return addresses of this node that may be others after the next boot, each one once."""
    seen: set[str] = set()
    for each in assigned:
        if each.name in ADDRESSES and each.value not in seen and _is_link_local(each.value):
            seen.add(each.value)
            yield Finding(
                line=each.line,
                about=each.name,
                level=Level.NOTE,
                what=f"{each.shown}: a link-local address, which changes",
                why="It may be another one after the next boot.",
                hint="give static addresses: `patchkit net plan`",
            )


def fits(assigned: Assignment, name: str, situation: Situation) -> bool:
    """Return whether a value could be that of another variable, as far as that is known."""
    if not assigned.literal:
        return True
    known = lifetime(name)
    if known and _COUNT.fullmatch(known.default) and not _NUMBER.fullmatch(assigned.value):
        return False
    return not any(check_value(replace(assigned, name=name), situation))


@cache
def _rows() -> Mapping[str, Sequence[tuple[str, Mapping[str, Any]]]]:
    """Return for each name the checks of its values: the kind and its row."""
    rows: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for kind in _TESTS:
        for row in bounds()[kind]:
            for name in row["names"]:
                rows.setdefault(name, []).append((kind, row))
    return rows


def check_products(assigned: Sequence[Assignment]) -> Iterator[Finding]:
    """Return numbers that are right alone and too large together; a file's last ones count."""
    last = {each.name: each for each in assigned if each.literal and _COUNT.fullmatch(each.value)}
    for row in bounds()["product"]:
        parts = [last[name] for name in row["names"] if name in last]
        product = math.prod(int(each.value) for each in parts)
        if len(parts) > 1 and product > row["to"]:
            yield Finding(
                line=max(each.line for each in parts),
                about=parts[-1].name,
                level=Level.WARNING,
                what=f"{' * '.join(each.shown for each in parts)} is {product}",
                why=row["why"],
                hint=f"take a product of {row['to']} at most, for example 4 and 4",
                source=row["source"],
            )


def _is_number(value: str, row: Mapping[str, Any]) -> bool:
    if not _NUMBER.fullmatch(value):
        return False
    octal = re.fullmatch(r"[+-]?0[0-7]+", value)
    number = int(value, 8) if octal else int(value, 16 if "x" in value.lower() else 10)
    return bool(row["from"] <= number <= row["to"])


_TESTS: Mapping[str, Callable[[str, Mapping[str, Any]], bool]] = {
    "number": _is_number,
    "choice": lambda value, row: value.upper() in row["words"],
}


def _is_link_local(value: str) -> bool:
    try:
        return ip_address(value).is_link_local
    except ValueError:
        return False


def _trouble(assigned: Assignment, situation: Situation) -> str:
    """Return why other nodes cannot connect to an address; empty if they can, or are not known."""
    try:
        address = ip_address(assigned.value)
    except ValueError:
        return "" if assigned.name in _NAMED else _NO_ADDRESS
    if address.is_unspecified:
        return "every address, so none that others can connect to"
    # A node alone may well use its own loopback.
    if address.is_loopback and situation.get("role", "single") != "single":
        return "each node itself"
    return ""
