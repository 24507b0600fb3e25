"""Take out of texts what names people, machines and secrets; what is equal stays equal. Pure.

Everything is found in one pass over a text, so that a placeholder is never taken for a name. What
the nodes say of themselves is known and found in any place; the rest is known by its form.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any

from patchkit.paths import RECIPES
from patchkit.records import read_toml
from patchkit.runtime.rules.secret_texts import holds_secret, secret_spans

_Address = IPv4Address | IPv6Address
_SHORT = 6  # characters: a shorter name or key may be a part of any word
_BEFORE = 80  # characters before a number that say whether it is a version
_UNIT = re.compile(r"@(?:[\w.-]*\.(?:service|socket|target|timer|slice|mount|scope)|\d+)\b")
_ANSI = re.compile(r"\x1b\[[0-9;:?]*[A-Za-z]")  # a colour's last letter would be part of a name
_MASK = re.compile(r"255\.(?:255|254|252|248|240|224|192|128|0)\.")
_NCCL = re.compile(r"2\.\d{2}\.\d{1,2}\.\d")  # what no name stands before, as in a column
_SIGN = r"[\"']?\s{0,3}[:=]\s{0,3}[\"']?"
_SERIAL = re.compile(rf"[\w -]+?{_SIGN}")
_ADDRESS = (
    r"(?:(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?!\.?\d)(?:/\d{1,2}(?!\w))?"
    r"|(?<![0-9a-z:.])(?:[0-9a-f]{0,4}:){2,8}(?:(?:\d{1,3}\.){3}\d{1,3}|[0-9a-f]{1,4})?"
    r"(?![0-9a-z]|:[0-9a-z:])(?:/\d{1,3}(?!\w))?)"
)
# Where two kinds begin at one place, the first one counts: names before numbers.
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
_KINDS = {"enx": "mac", "id": "uuid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateNames:
    """What nodes say of themselves: ``hosts`` are the names of each node, one list a node."""

    hosts: tuple[tuple[str, ...], ...] = ()
    users: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    serials: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RedactionData:
    """Hold recipes/doctor/redaction.toml."""

    accounts: frozenset[str]
    hosts: frozenset[str]
    serials: frozenset[str]
    versions: str


@cache
def _redaction_data() -> RedactionData:
    return read_toml(RedactionData, RECIPES / "doctor" / "redaction.toml")


class Redactor:
    """Replaces what is private in texts, values of JSON and names of files.

    ``learn`` is for all texts before the first is replaced: a key that is named in one of them is
    found in the others without its name.
    """

    def __init__(self, names: PrivateNames) -> None:
        data = _redaction_data()
        self._versions = re.compile(data.versions, re.IGNORECASE)
        self._known: dict[str, str] = {}  # in small letters → placeholder
        self._own: set[_Address] = set()
        self._numbers: dict[str, dict[object, int]] = {}  # of each kind
        self._pattern: re.Pattern[str] | None = None
        self.taken: Counter[str] = Counter()
        """How often each placeholder stands for something."""
        for number, own in enumerate(names.hosts, start=1):
            for host in own:
                if host.casefold() not in data.hosts:
                    self._know(host, f"node-{number}")
        for user in names.users:
            if user not in data.accounts:
                self._know(user, self._number("user", user))
        for serial in names.serials:
            self._know(serial, self._number("serial", serial))
        for text in names.addresses:
            address = _parse_address(text)
            if address and not _names_nobody(address):
                self._own.add(address)
                place = self._address(address)
                if address.version == 4:
                    self._know(str(address).replace(".", "-"), place)

    def _know(self, value: str, place: str) -> None:
        if value and not _parse_address(value):
            self._known.setdefault(value.casefold(), place)
            self._pattern = None

    def _number(self, kind: str, value: object) -> str:
        """Return the placeholder of a value, a new one if it has none; not counted."""
        numbers = self._numbers.setdefault(kind, {})
        key = value.casefold() if isinstance(value, str) else value
        return f"{kind}-{numbers.setdefault(key, len(numbers) + 1)}"

    def _address(self, address: _Address, prefix: str = "") -> str:
        """Return the placeholder of an address with the network that it is in."""
        net = ip_network(f"{address}/{24 if address.version == 4 else 64}", strict=False)
        return f"{self._number('address', address)}{prefix} ({self._number('net', net)})"

    def learn(self, value: object) -> None:
        """Take note of the secrets in a text, or in a value of JSON."""
        for key, raw in _strings(value):
            text = _ANSI.sub("", raw)
            for start, stop in [(0, len(text))] if holds_secret(key) else secret_spans(text):
                secret = text[start:stop]
                # Of USER:WORD the word may stand alone elsewhere.
                for word in (secret, secret.partition(":")[2]):
                    if len(word) >= _SHORT and not self._is_name(secret):
                        self._know(word, self._number("secret", word))

    def _is_name(self, word: str) -> bool:
        """Return whether what logs in to a URL is the name of a user, and no token."""
        known = self._known.get(word.casefold(), "")
        return known.startswith(("user-", "node-")) or word in _redaction_data().accounts

    def text(self, text: str) -> str:
        """Return a text without what is private."""
        clean = _ANSI.sub("", text)
        parts, end = [], 0
        for start, stop in secret_spans(clean):
            if not self._is_name(clean[start:stop]):
                parts += [*self._without_names(clean, end, start)]
                parts.append(self._place("secret", clean[start:stop]))
                end = stop
        return "".join((*parts, *self._without_names(clean, end, len(clean))))

    def _without_names(self, text: str, start: int, stop: int) -> Iterator[str]:
        self._pattern = self._pattern or _private_pattern(self._known)
        for match in self._pattern.finditer(text, start, stop):
            yield text[start : match.start()]
            yield self._replaced(match)
            start = match.end()
        yield text[start:stop]

    def value(self, value: Any, key: str = "") -> Any:
        """Return a value of JSON without what is private; ``key`` is what it stands under."""
        if isinstance(value, Mapping):
            pairs = ((str(name), part) for name, part in value.items())
            return {self.text(name): self.value(part, name) for name, part in pairs}
        if isinstance(value, list | tuple):
            return [self.value(part, key) for part in value]
        if not value or isinstance(value, bool):
            return value
        if holds_secret(key):
            return self._place("secret", str(value))
        if not isinstance(value, str):
            return value
        if key.casefold() in _redaction_data().serials:
            return self._place("serial", value)
        return self.text(value)

    def _place(self, kind: str, value: str) -> str:
        """Return what stands for a value, whether it was known before or not, and count it."""
        place = self._known.get(value.casefold()) or self._number(kind, value)
        self.taken[place] += 1
        return place

    def _replaced(self, match: re.Match[str]) -> str:
        kind, word = match.lastgroup or "", match.group()
        if kind == "address":
            before = match.string[max(0, match.start() - _BEFORE) : match.start()]
            return self._replace_address(before, word)
        if kind == "serial":
            sign = _SERIAL.match(word)
            start = sign.end() if sign else 0
            return word[:start] + self._place("serial", word[start:])
        if kind == "email":
            return self._replace_email(word)
        if kind == "account" and _UNIT.match(match.string, match.end()):
            # worker@1.service is an instance of a unit.
            return self._place("", word) if word.casefold() in self._known else self.text(word)
        if kind in ("home", "account"):
            return word if word == "root" else self._place("user", word)
        return self._place(_KINDS.get(kind, kind), word)

    def _replace_email(self, whole: str) -> str:
        user, _, domain = whole.rpartition("@")
        if _UNIT.fullmatch(f"@{domain}"):
            return f"{self.text(user)}@{self.text(domain)}"
        if domain.casefold() in self._known or _parse_address(domain):
            name = user if user == "root" else self._place("user", user)
            return f"{name}@{self.text(domain)}"
        return self._place("email", whole)

    def _replace_address(self, before: str, whole: str) -> str:
        """Return the placeholder of what looks like an address; what is none stays."""
        # The colon of a sentence, as in `::2: no route`.
        colon = ":" if whole.endswith(":") and not _parse_address(whole) else ""
        text, slash, length = whole.removesuffix(colon).partition("/")
        address = _parse_address(text)
        if address is None or _names_nobody(address) or _MASK.match(text):
            return whole
        if address not in self._own and address.version == 4 and not slash:
            line = before.rpartition("\n")[2]
            if self._versions.search(line) or _NCCL.fullmatch(text):
                return whole
        place = self._address(address, slash + length)
        self.taken[place] += 1
        return f"{place}{colon}"


def _private_pattern(known: Mapping[str, str]) -> re.Pattern[str]:
    """Return one pattern for all that is private; its groups are the kinds."""
    words = []
    for word in sorted(known, key=lambda word: (-len(word), word)):  # the longest first
        pattern = re.escape(word)
        if known[word].startswith("address-"):
            pattern = rf"(?<![\d.]){pattern}(?!\.?\d)"
        elif len(word) < _SHORT:
            pattern = rf"(?<![A-Za-z0-9]){pattern}(?![A-Za-z0-9])"
        words.append(pattern)
    serials = "|".join(map(re.escape, sorted(_redaction_data().serials - {"uuid"})))
    kinds = (
        *_NAMES,
        ("known", "|".join(words) or "(?!)"),
        ("serial", rf"\b(?:{serials.replace('_', '[ _]')}){_SIGN}[\w.-]{{4,}}"),
        *_NUMBERS,
    )
    return re.compile("|".join(f"(?P<{kind}>{form})" for kind, form in kinds), re.IGNORECASE)


def _strings(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts of a value of JSON, each with the key that it stands under."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield "", str(name)
            yield from _strings(part, str(name))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _strings(part, key)
    elif isinstance(value, str | int) and not isinstance(value, bool):
        yield key, str(value)


def _parse_address(text: str) -> _Address | None:
    """Return an address, that of its own for one that is mapped into IPv6; None for no address."""
    try:
        found = ip_address(text)
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return mapped or found


def _names_nobody(address: _Address) -> bool:
    special = address.is_loopback or address.is_unspecified or address.is_multicast
    return special or str(address) == "255.255.255.255"
