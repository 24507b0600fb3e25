"""Values in a file: what a variable can hold, by recipes/env/values.toml, and addresses."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from ipaddress import ip_address
from typing import Any

from patchkit.finding import Finding, Level
from patchkit.paths import RECIPES
from patchkit.runtime.lint.scan import Assignment
from patchkit.runtime.rules.variable_rules import Situation
from patchkit.runtime.rules.variables import lifetime

_NUMBER = re.compile(r"[+-]?(0[xX][0-9a-fA-F]{1,16}|[0-9]{1,20})")  # as strtoll takes it, base 0
_COUNT = re.compile(r"[0-9]{1,20}")
_OPEN = re.compile(r"<.*>|\{.*\}|(?i:.*(your|example|placeholder|changeme|_ip\b|ip_|xxx).*|x+|\.+)")
_ADDRESSES = ("VLLM_HOST_IP", "MASTER_ADDR", "RAY_NODE_IP_ADDRESS", "RAY_OVERRIDE_NODE_IP_ADDRESS")
_NAMED = {"MASTER_ADDR"}  # may be a host's name as well


@cache
def bounds() -> Mapping[str, Any]:
    """The tables of values.toml."""
    return tomllib.loads((RECIPES / "env" / "values.toml").read_text(encoding="utf-8"))


def is_open(value: str) -> bool:
    """Whether a value stands for one that is still to be filled in."""
    return _OPEN.fullmatch(value) is not None


def check_value(found: Assignment, situation: Situation) -> Iterator[Finding]:
    if not found.literal:
        return
    if found.name in _ADDRESSES:
        yield from _address(found, situation)
    for kind, row in _rows().get(found.name, ()):
        if found.value and not _TESTS[kind](found.value, row):
            life = lifetime(found.name)
            if life is None or life.default != found.value:
                yield _outside(found, kind, row)


@cache
def _rows() -> Mapping[str, Sequence[tuple[str, Mapping[str, Any]]]]:
    """Name → what its values are held against: the kind of check and its row."""
    rows: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for kind in _TESTS:
        for row in bounds()[kind]:
            for name in row["names"]:
                rows.setdefault(name, []).append((kind, row))
    return rows


def check_products(all_found: Sequence[Assignment]) -> Iterator[Finding]:
    """Numbers that are right alone and too large together; the last ones of a file count."""
    last = {each.name: each for each in all_found if each.literal and _COUNT.fullmatch(each.value)}
    for row in bounds()["product"]:
        parts = [last[name] for name in row["names"] if name in last]
        product = 1
        for each in parts:
            product *= int(each.value)
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
    return bool(_NUMBER.fullmatch(value)) and row["from"] <= _integer(value) <= row["to"]


def _integer(value: str) -> int:
    octal = re.fullmatch(r"[+-]?0[0-7]+", value)
    return int(value, 8) if octal else int(value, 16 if "x" in value.lower() else 10)


def _is_choice(value: str, row: Mapping[str, Any]) -> bool:
    return value.upper() in row["words"]


_TESTS: Mapping[str, Callable[[str, Mapping[str, Any]], bool]] = {
    "number": _is_number,
    "choice": _is_choice,
}


def _outside(found: Assignment, kind: str, row: Mapping[str, Any]) -> Finding:
    may = f"{row['from']} to {row['to']}" if kind == "number" else ", ".join(row["words"])
    return Finding(
        line=found.line,
        about=found.name,
        level=Level.ERROR,
        what=f"{found.shown}: it takes {may}",
        why=row["why"],
        hint=f"write one of these, or leave {found.name} out",
        source=row["source"],
    )


def _address(found: Assignment, situation: Situation) -> Iterator[Finding]:
    trouble = _trouble(found, alone=situation.get("role") == "single")
    if trouble:
        yield Finding(
            line=found.line,
            about=found.name,
            level=Level.ERROR,
            what=f"{found.shown}: {trouble}",
            why="The other nodes are told this address, and connect to it.",
            hint="write the address that this node has on the network between the nodes",
            source="vLLM network_utils.get_ip" if found.name == "VLLM_HOST_IP" else "",
        )


def _trouble(found: Assignment, *, alone: bool) -> str:
    if is_open(found.value):
        return "still to be filled in"
    try:
        address = ip_address(found.value)
    except ValueError:
        return "" if found.name in _NAMED else "no IP address"
    if address.is_unspecified:
        return "every address, so none that others can connect to"
    if address.is_loopback and not alone:
        return "each node itself"
    return ""
