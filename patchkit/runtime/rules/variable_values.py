"""Judge values of variables: by tables, as addresses, and whether they are placeholders.

The tables are values.toml, and vllm_values.tsv with the values that releases of vLLM take.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from ipaddress import ip_address

from patchkit.frozen import Texts, frozen
from patchkit.records import RECIPES
from patchkit.runtime.rules.releases import lifetime, read_env_data, read_table, release

ONE = "one of"
SEVERAL = "some of"
INTEGER = "integer"
NUMBER = "number"
_READERS: Mapping[str, Callable[[str], float]] = {INTEGER: int, NUMBER: float}
TAKEN = RECIPES / "env" / "vllm_values.tsv"
_SHOWN = 8  # allowed words that a message shows
ADDRESSES = (
    "VLLM_HOST_IP",
    "MASTER_ADDR",
    "RAY_NODE_IP_ADDRESS",
    "RAY_OVERRIDE_NODE_IP_ADDRESS",
)
_HOST_NAMES = {"MASTER_ADDR"}  # variables that may also hold a host's name
_NO_ADDRESS = "no IP address"
# Numbers that C's strtoll reads with base 0, but octal ones, which nobody writes.
_NUMBER = r"[+-]?(0[xX][0-9a-fA-F]{1,16}|[0-9]{1,20})"
_LONGEST = 200  # characters of a placeholder; on long texts the patterns would be slow


@frozen
class ValueProblem:
    """Why a variable cannot have a value.

    ``stops`` says that with this value, a launch on several nodes fails.
    """

    what: str
    why: str
    hint: str
    source: str
    stops: bool = False


def find_value_problems(name: str, value: str, role: str) -> Iterator[ValueProblem]:
    """Yield the problems of a variable's value in the role of a node; "": a role that is unknown.

    An empty value, a placeholder and a variable's default have no problem.
    """
    if not value or is_placeholder(name, value):
        return

    is_alone = role in ("", "single")
    trouble = _address_trouble(name, value, is_alone=is_alone)
    if trouble:
        yield ValueProblem(
            what=trouble,
            why="The other nodes get this address, and connect to it.",
            hint="write the address that this node has on the network between the nodes",
            source="vLLM network_utils.get_ip" if name == "VLLM_HOST_IP" else "",
            stops=not is_alone and trouble != _NO_ADDRESS,
        )

    yield from _check_by_table(name, value)


def _address_trouble(name: str, value: str, *, is_alone: bool) -> str:
    """Return why other nodes cannot connect to the address of a node, "" if they can."""
    if name not in ADDRESSES:
        return ""

    try:
        address = ip_address(value)
    except ValueError:
        return "" if name in _HOST_NAMES else _NO_ADDRESS

    if address.is_unspecified:
        return "every address, so none that others can connect to"

    # A node that serves alone may use a loopback address.
    return "each node itself" if address.is_loopback and not is_alone else ""


def _check_by_table(name: str, value: str) -> Iterator[ValueProblem]:
    """Yield a problem if values.toml has other words or numbers for a variable."""
    tables = read_env_data("values")
    rows = (*tables["number"], *tables["choice"])
    row = next((row for row in rows if name in row["names"]), None)
    life = lifetime(name)

    is_default = life is not None and life.default == value
    if row is None or is_default:
        return

    if "words" in row:
        fits = value.upper() in row["words"]
        takes = ", ".join(row["words"])
    else:
        number = read_nccl_number(value)
        fits = number is not None and row["from"] <= number <= row["to"]
        takes = f"{row['from']} to {row['to']}"

    if not fits:
        yield ValueProblem(
            what=f"it takes {takes}",
            why=row["why"],
            hint=f"write one of these, or leave {name} out",
            source=row["source"],
        )


def read_nccl_number(value: str) -> int | None:
    """Return the number that NCCL reads from a text, None if it is no number."""
    if not re.fullmatch(_NUMBER, value):
        return None

    return int(value, 16 if "x" in value.lower() else 10)


@cache
def form(name: str) -> re.Pattern[str]:
    """Return a pattern of values.toml. It is compiled when it is first needed."""
    return re.compile(read_env_data("values")["forms"][name])


def is_placeholder(name: str, value: str) -> bool:
    """Return whether a value is a placeholder, which somebody still has to replace."""
    if len(value) > _LONGEST:
        return False

    if form("placeholder").fullmatch(value):
        return True

    if form("address_names").fullmatch(name):
        address = value.rpartition(":")[0] or value
        if form("open_address").fullmatch(address):
            return True

    is_open_device = form("open_device").fullmatch
    is_of_device = form("device_names").fullmatch(name) is not None
    return is_of_device and any(map(is_open_device, value.split(",")))


@frozen
class AllowedValues:
    """The values that vLLM takes for a variable or a flag; with any other value it does not start.

    ``how`` is a constant of this module: ONE, SEVERAL, INTEGER or NUMBER. ``words`` are the choices
    for ONE and SEVERAL. With ``any_case``, upper and lower case do not matter.
    """

    how: str
    words: Texts = ()
    any_case: bool = False

    @classmethod
    def parse(cls, text: str) -> AllowedValues:
        """Read a row of vllm_values.tsv: ``one of: a, b`` or ``one of, any case: a, b``."""
        kind, _sign, words = text.partition(": ")
        how, _sign, case = kind.partition(", ")

        choices = tuple(words.split(", ")) if words else ()
        return cls(how=how, words=choices, any_case=bool(case))

    @property
    def description(self) -> str:
        """Return the values that are taken, in words for messages."""
        if self.how == INTEGER:
            return "a whole number"
        if self.how == NUMBER:
            return "a number"

        shown = ", ".join(self.words[:_SHOWN])
        more = len(self.words) - _SHOWN
        return f"{shown} and {more} others" if more > 0 else shown

    def allows(self, value: str) -> bool:
        """Return whether vLLM takes a value, decided as in its ``envs.py``."""
        if self.how in _READERS:
            try:
                _READERS[self.how](value)
            except ValueError:
                return False
            return True

        parts = [value]
        if self.how == SEVERAL:
            parts = [part.strip() for part in value.split(",") if part.strip()]
        if self.any_case:
            words = {word.lower() for word in self.words}
            return words.issuperset(part.lower() for part in parts)

        return set(parts).issubset(self.words)


@cache
def vllm_values(version: str) -> Mapping[str, AllowedValues]:
    """Return variable → the values that a release takes; for "", that any release takes.

    Return nothing for a release outside the table. Raises UsageError if it is no version.
    """
    table = read_table(TAKEN)
    if version and not table.oldest <= release(version) <= release(table.newest):
        return {}

    rows = [(row.name, row.default) for row in table.rows]
    if version:
        rows = [*table.at(version).items()]

    # A name has several rows if its values changed: their words are joined.
    by_name: dict[str, AllowedValues] = {}
    for name, text in rows:
        allowed = AllowedValues.parse(text)
        before = by_name.get(name, allowed)
        by_name[name] = replace(
            allowed,
            words=tuple(dict.fromkeys((*before.words, *allowed.words))),
            any_case=before.any_case or allowed.any_case,
        )

    return by_name
