"""Know the forms of what names people and machines; number addresses by networks. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from patchkit.paths import RECIPES
from patchkit.records import read_toml

SHORT = 6  # characters: a shorter name or key may be a part of any word
SERIAL_SIGN = r"[\"']?\s{0,3}[:=]\s{0,3}[\"']?"

_Address = IPv4Address | IPv6Address
_MASK = re.compile(r"255\.(?:255|254|252|248|240|224|192|128|0)\.")
_NCCL = re.compile(r"2\.\d{2}\.\d{1,2}\.\d")  # what no name stands before, as in a column
_ADDRESS = (
    r"(?:(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?!\.?\d)(?:/\d{1,2}(?!\w))?"
    r"|(?<![0-9a-z:.])(?:[0-9a-f]{0,4}:){2,8}(?:(?:\d{1,3}\.){3}\d{1,3}|[0-9a-f]{1,4})?"
    r"(?![0-9a-z]|:[0-9a-z:])"
    r"(?:/\d{1,3}(?!\w))?)"
)
_AFTER = re.compile(r"/\d{1,3}\Z")
_NAMES = (
    ("email", r"(?<![\w.+-])[\w.+-]{1,64}@(?:[\w-]+\.)+[\w-]+"),
    ("home", r"(?:(?<=/home/)|(?<=/Users/))[^\s/:\"'`,;)\]}<>*]+"),
    ("account", r"(?<![\w.-])[\w.-]{1,64}(?=@[\w-])"),
)
_NUMBERS = (
    ("mac", r"(?<![0-9a-f:])(?:[0-9a-f]{2}:){5,19}[0-9a-f]{2}(?![0-9a-f:])"),
    ("enx", r"(?<=\benx)[0-9a-f]{12}\b"),
    ("guid", r"(?<![0-9a-f:])(?:[0-9a-f]{4}:){3}[0-9a-f]{4}(?![0-9a-f:])"),
    ("uuid", r"(?<![0-9a-z])[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}(?![0-9a-z])"),
    ("id", r"(?<![0-9a-z])[0-9a-f]{32}(?![0-9a-z])"),
    ("address", _ADDRESS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedactionData:
    """What recipes/doctor/redaction.toml holds."""

    accounts: frozenset[str]
    hosts: frozenset[str]
    serials: frozenset[str]
    versions: str


@cache
def redaction_data() -> RedactionData:
    return read_toml(RedactionData, RECIPES / "doctor" / "redaction.toml")


def private_pattern(known: Mapping[str, str]) -> re.Pattern[str]:
    """Return one pattern for everything; its groups are the kinds. ``known`` is name → kind.

    Where two kinds begin at one place, the first one counts: names before numbers.
    """
    serials = "|".join(map(re.escape, sorted(redaction_data().serials - {"uuid"})))
    longest_first = sorted(known, key=lambda word: (-len(word), word))
    words = "|".join(_bounded(word, known[word]) for word in longest_first) or "(?!)"
    kinds = (
        *_NAMES,
        ("known", words),
        ("serial", rf"\b(?:{serials.replace('_', '[ _]')}){SERIAL_SIGN}[\w.-]{{4,}}"),
        *_NUMBERS,
    )
    return re.compile("|".join(f"(?P<{kind}>{form})" for kind, form in kinds), re.IGNORECASE)


def _bounded(word: str, kind: str) -> str:
    """Return the pattern of a known word: a short one may be a part of others."""
    if kind == "address":
        return rf"(?<![\d.]){re.escape(word)}(?!\.?\d)"
    if len(word) >= SHORT:
        return re.escape(word)
    return rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])"


class AddressNames:
    """Gives each address its placeholder: ``address-1/24 (net-1)``."""

    def __init__(self, version: re.Pattern[str]) -> None:
        self._version = version
        self._known: set[_Address] = set()
        self._numbers: dict[_Address, int] = {}
        self._nets: dict[str, int] = {}

    def know(self, text: str) -> Iterator[tuple[str, str]]:
        """Take note of a node's own address; yield other forms of it, with the placeholder."""
        address = _parse_address(text)
        if address is not None and not _says_nothing(address):
            self._known.add(address)
            place = self.place(text)
            if isinstance(address, IPv4Address):
                yield str(address).replace(".", "-"), place

    def is_address(self, text: str) -> bool:
        return _parse_address(text) is not None

    def place(self, text: str, suffix: str = "") -> str:
        """Return the placeholder of an address; one mapped into IPv6 has that of its own."""
        address = _parse_address(text)
        if address is None:
            return text
        number = self._numbers.setdefault(address, len(self._numbers) + 1)
        net = str(ip_network(f"{address}/{24 if address.version == 4 else 64}", strict=False))
        group = self._nets.setdefault(net, len(self._nets) + 1)
        return f"address-{number}{suffix} (net-{group})"

    def replaced(self, before: str, whole: str) -> str | None:
        """Return what stands in the place of a text that looks like an address; None: it stays."""
        # The colon of a sentence, as in `::2: no route`.
        if _parse_address(whole) is None and whole.endswith(":"):
            found = self.replaced(before, whole[:-1])
            return found and f"{found}:"
        after = _AFTER.search(whole)
        suffix = after.group() if after else ""
        text = whole.removesuffix(suffix)
        address = _parse_address(text)
        if address is None or _says_nothing(address) or _MASK.match(text):
            return None
        if address not in self._known and address.version == 4 and not suffix:
            line = before.rpartition("\n")[2]
            if self._version.search(line) or _NCCL.fullmatch(text):
                return None
        return self.place(text, suffix)


def _parse_address(text: str) -> _Address | None:
    try:
        found = ip_address(text)
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return mapped or found


def _says_nothing(address: _Address) -> bool:
    return (
        address.is_loopback
        or address.is_unspecified
        or address.is_multicast
        or (str(address) == "255.255.255.255")
    )
