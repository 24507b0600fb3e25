"""Judge values of variables: by values.toml and vllm_values.tsv, as addresses, as placeholders."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from ipaddress import ip_address

from patchkit.records import RECIPES
from patchkit.runtime.rules.releases import read_env_data, read_table, release
from patchkit.runtime.rules.variables import lifetime

ONE, SEVERAL, INTEGER, NUMBER = "one of", "some of", "integer", "number"
TAKEN = RECIPES / "env" / "vllm_values.tsv"
_SHOWN = 8  # words in a message
ADDRESSES = (
    "VLLM_HOST_IP",
    "MASTER_ADDR",
    "RAY_NODE_IP_ADDRESS",
    "RAY_OVERRIDE_NODE_IP_ADDRESS",
)
_HOST_NAMES = {"MASTER_ADDR"}  # may be a host's name as well
_NO_ADDRESS = "no IP address"
_NUMBER = re.compile(
    r"[+-]?(0[xX][0-9a-fA-F]{1,16}|[0-9]{1,20})"
)  # as strtoll takes it, base 0
_LONGEST = 200  # characters; a placeholder is short, and the patterns go over a text many times
_FORMS = {
    name: re.compile(form) for name, form in read_env_data("values")["forms"].items()
}
ADDRESS_NAMES = _FORMS["address_names"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueProblem:
    """Why a variable cannot have a value; ``stops`` if a launch on several nodes ends with it."""

    what: str
    why: str
    hint: str
    source: str = ""
    stops: bool = False


def find_value_problems(
    name: str, value: str, role: str = ""
) -> Iterator[ValueProblem]:
    """Yield what is wrong with a value; a variable's default is always right."""
    if not value or is_placeholder(name, value):
        return
    alone, trouble = role in ("", "single"), ""
    try:
        address = ip_address(value) if name in ADDRESSES else None
    except ValueError:
        address, trouble = None, "" if name in _HOST_NAMES else _NO_ADDRESS
    if address and address.is_unspecified:
        trouble = "every address, so none that others can connect to"
    elif (
        address and address.is_loopback and not alone
    ):  # a node alone may well use its own
        trouble = "each node itself"
    if trouble:
        yield ValueProblem(
            what=trouble,
            why="The other nodes get this address, and connect to it.",
            hint="write the address that this node has on the network between the nodes",
            source="vLLM network_utils.get_ip" if name == "VLLM_HOST_IP" else "",
            stops=not alone and trouble != _NO_ADDRESS,
        )
    rows = (
        row for kind in ("number", "choice") for row in read_env_data("values")[kind]
    )
    row, life = (
        next((row for row in rows if name in row["names"]), None),
        lifetime(name),
    )
    if row is None or (life is not None and life.default == value):
        return
    if "words" in row:
        fits, takes = value.upper() in row["words"], ", ".join(row["words"])
    else:
        number, takes = read_number(value), f"{row['from']} to {row['to']}"
        fits = number is not None and row["from"] <= number <= row["to"]
    if not fits:
        yield ValueProblem(
            what=f"it takes {takes}",
            why=row["why"],
            hint=f"write one of these, or leave {name} out",
            source=row["source"],
        )


def read_number(value: str) -> int | None:
    """Return the number that NCCL reads, None for what is none."""
    if not _NUMBER.fullmatch(value):
        return None
    octal = re.fullmatch(r"[+-]?0[0-7]+", value)
    return int(value, 8) if octal else int(value, 16 if "x" in value.lower() else 10)


def is_placeholder(name: str, value: str) -> bool:
    """Return whether the value of a variable is still to be filled in."""
    if len(value) > _LONGEST:
        return False
    address = value.rpartition(":")[0] or value
    if ADDRESS_NAMES.fullmatch(name) and _FORMS["open_address"].fullmatch(address):
        return True
    if _FORMS["device_names"].fullmatch(name) and any(
        map(_FORMS["open_device"].fullmatch, value.split(","))
    ):
        return True
    return _FORMS["placeholder"].fullmatch(value) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Takes:
    """The values at whose lack a vLLM stops: ``how`` is a word above, ``words`` its choices."""

    how: str
    words: tuple[str, ...] = ()
    any_case: bool = False

    @classmethod
    def parse(cls, text: str) -> Takes:
        """Read a row of vllm_values.tsv: ``one of: a, b`` or ``one of, any case: a, b``."""
        kind, _, words = text.partition(": ")
        how, _, case = kind.partition(", ")
        return cls(
            how=how, words=tuple(filter(None, words.split(", "))), any_case=bool(case)
        )

    @property
    def in_words(self) -> str:
        """Return what it takes, for messages."""
        if not self.words:
            return {INTEGER: "a whole number", NUMBER: "a number"}[self.how]
        more = len(self.words) - _SHOWN
        return ", ".join(self.words[:_SHOWN]) + (
            f" and {more} others" if more > 0 else ""
        )

    def has(self, value: str) -> bool:
        """Return whether a value is taken, as ``envs.py`` decides it."""
        if self.how in (INTEGER, NUMBER):
            try:
                (int if self.how == INTEGER else float)(value)
            except ValueError:
                return False
            return True
        words, given = [*self.words], [value]
        if self.how == SEVERAL:
            given = list(filter(None, map(str.strip, value.split(","))))
        if self.any_case:
            words, given = (
                [text.lower() for text in texts] for texts in (words, given)
            )
        return {*given} <= {*words}


@cache
def vllm_values(version: str) -> Mapping[str, Takes]:
    """Return name → values that a known release takes, "": any release. Raises UsageError."""
    table = read_table(TAKEN)
    if version:
        is_known = table.oldest <= release(version) <= release(table.newest)
        return {
            name: Takes.parse(text)
            for name, text in table.at(version).items()
            if is_known
        }
    found: dict[str, Takes] = {}
    for row in table.rows:
        takes = Takes.parse(row.default)
        before = found.get(row.name, takes)
        words = tuple(dict.fromkeys((*before.words, *takes.words)))
        any_case = before.any_case or takes.any_case
        found[row.name] = Takes(how=takes.how, words=words, any_case=any_case)
    return found
