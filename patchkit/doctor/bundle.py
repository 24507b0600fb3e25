"""Write what a bug report needs into one file, without what names people, machines and secrets.

All that is private is found in one pass over a text, so that a placeholder is never taken for a
name; what is equal stays equal. What the nodes say of themselves is known and found in any place;
the rest is known by its form.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

from patchkit.cluster.agent.node_facts import NodeFacts
from patchkit.durable.atomic import replacing
from patchkit.errors import UsageError, translated
from patchkit.records import RECIPES, read_toml
from patchkit.runtime.rules.secret_texts import holds_secret, secret_spans

_NOTE = (
    "Placeholders stand for what names people, machines and secrets; the same one is the same "
    "thing everywhere. A name or a key in a form that patchkit does not know may be left: look."
)
_Address = IPv4Address | IPv6Address
_SHORT = 6  # characters: a shorter name or key may be a part of any word
_BEFORE = 80  # characters before a number that say whether it is a version
_ANSI = re.compile(r"\x1b\[[0-9;:?]*[A-Za-z]")  # a colour's last letter would be part of a name
_NCCL = re.compile(r"2\.\d{2}\.\d{1,2}\.\d")
_SIGN = r"[\"']?\s{0,3}[:=]\s{0,3}[\"']?"
# worker@1.service is an instance of a unit.
_NO_UNIT = r"(?!@(?:[\w.-]*\.(?:service|socket|target|timer|slice|mount|scope)|\d+)\b)"
_END_OF_IPV6 = r"(?:(?:\d{1,3}\.){3}\d{1,3}|[0-9a-f]{1,4})?(?![0-9a-z]|:[0-9a-z:])"
# Where two kinds begin at one place, the first one counts: names before numbers.
_NAMES = (
    ("email", rf"(?<![\w.+-])[\w.+-]{{1,64}}{_NO_UNIT}@(?:[\w-]+\.)+[\w-]+"),
    ("home", r"(?:(?<=/home/)|(?<=/Users/))[^\s/:\"'`,;)\]}<>*]+"),
    ("account", rf"(?<![\w.-])[\w.-]{{1,64}}{_NO_UNIT}(?=@[\w-])"),
)
_NUMBERS = (
    ("mac", r"(?<![0-9a-f:])(?:[0-9a-f]{2}:){5,19}[0-9a-f]{2}(?![0-9a-f:])|(?<=enx)[0-9a-f]{12}\b"),
    ("guid", r"(?<![0-9a-f:])(?:[0-9a-f]{4}:){3}[0-9a-f]{4}(?![0-9a-f:])"),
    ("uuid", r"(?<![0-9a-z])(?:[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}|[0-9a-f]{32})(?!\w)"),
    ("address", r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?!\.?\d)"),
    ("address6", rf"(?<![0-9a-z:.])(?:[0-9a-f]{{0,4}}:){{2,8}}{_END_OF_IPV6}"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateNames:
    """What nodes say of themselves: ``hosts`` are the names of each node, one list a node."""

    hosts: Sequence[Sequence[str]] = ()
    users: Sequence[str] = ()
    addresses: Sequence[str] = ()
    serials: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RedactionData:
    """Hold recipes/doctor/redaction.toml."""

    accounts: frozenset[str]
    hosts: frozenset[str]
    serials: frozenset[str]
    versions: str


class Redactor:
    """Replaces what is private in texts, values of JSON and names of files.

    ``learn`` is for all texts before the first is replaced: a key that is named in one of them is
    found in the others without its name.
    """

    def __init__(self, names: PrivateNames) -> None:
        data = read_toml(RedactionData, RECIPES / "doctor" / "redaction.toml")
        self._versions = re.compile(data.versions, re.IGNORECASE)
        self._accounts, self._serials = data.accounts, data.serials
        self._known: dict[str, str] = {}  # in small letters → placeholder
        self._numbers: dict[str, dict[object, int]] = {}  # of each kind
        self._pattern: re.Pattern[str] | None = None
        self.taken: Counter[str] = Counter()
        """How often each placeholder stands for something."""
        for number, own in enumerate(names.hosts, start=1):
            for host in own:
                if host.casefold() not in data.hosts:
                    self._know(host, f"node-{number}")
        for kind, values in (("user", names.users), ("serial", names.serials)):
            for value in values:
                if value not in data.accounts:
                    self._know(value, self._number(kind, value))
        found = [each for text in names.addresses if (each := _private_address(text))]
        self._own = {each: self._number("address", each) for each in found}
        for address, place in self._own.items():
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

    def learn(self, value: object, key: str = "") -> None:
        """Take note of the secrets in a text, or in what JSON has under a key."""
        text = _ANSI.sub("", str(value))
        for start, stop in [(0, len(text))] if holds_secret(key) else secret_spans(text):
            secret = text[start:stop]
            # Of USER:WORD the word may stand alone elsewhere.
            for word in (secret, secret.partition(":")[2]):
                if len(word) >= _SHORT and not self._is_name(secret):
                    self._know(word, self._number("secret", word))

    def _is_name(self, word: str) -> bool:
        """Return whether what logs in to a URL is the name of a user, and no token."""
        known = self._known.get(word.casefold(), "")
        return known.startswith(("user-", "node-")) or word in self._accounts

    def text(self, text: str) -> str:
        """Return a text without what is private."""
        clean = _ANSI.sub("", text)
        if self._pattern is None:
            words = []
            for word in sorted(self._known, key=lambda word: (-len(word), word)):  # longest first
                form = re.escape(word)
                if self._known[word].startswith("address-"):
                    form = rf"(?<![\d.]){form}(?!\.?\d)"
                elif len(word) < _SHORT:
                    form = rf"(?<![A-Za-z0-9]){form}(?![A-Za-z0-9])"
                words.append(form)
            serials = "|".join(map(re.escape, sorted(self._serials - {"uuid"})))
            serials = rf"\b(?:{serials.replace('_', '[ _]')}){_SIGN}[\w.-]{{4,}}"
            known = "|".join(words) or "(?!)"
            kinds = (*_NAMES, ("known", known), ("serial", serials), *_NUMBERS)
            whole = "|".join(f"(?P<{kind}>{form})" for kind, form in kinds)
            self._pattern = re.compile(whole, re.IGNORECASE)
        spans = [span for span in secret_spans(clean) if not self._is_name(clean[slice(*span)])]
        parts, end = [], 0
        for start, stop in (*spans, (len(clean), len(clean))):
            for match in self._pattern.finditer(clean, end, start):
                parts += [clean[end : match.start()], self._replaced(match.lastgroup or "", match)]
                end = match.end()
            parts.append(clean[end:start])
            parts += [self._place("secret", clean[start:stop])] if stop > start else []
            end = stop
        return "".join(parts)

    def value(self, value: Any, key: str = "") -> Any:
        """Return what JSON has under a key, without what is private."""
        if holds_secret(key):
            return self._place("secret", str(value))
        if not isinstance(value, str):
            return value
        is_serial = key.casefold() in self._serials
        return self._place("serial", value) if is_serial else self.text(value)

    def _place(self, kind: str, value: str) -> str:
        """Return what stands for a value, whether it was known before or not, and count it."""
        place = self._known.get(value.casefold()) or self._number(kind, value)
        self.taken[place] += 1
        return place

    def _replaced(self, kind: str, match: re.Match[str]) -> str:
        word = match.group()
        if kind.startswith("address"):
            # The colon of a sentence, as in `::2: no route`.
            text = word if _parse_address(word) else word.removesuffix(":")
            address = _private_address(text)
            if address is None or text.startswith("255.25"):  # a mask
                return word
            before = match.string[max(0, match.start() - _BEFORE) : match.start()]
            is_network = match.string.startswith("/", match.end())
            line = "" if is_network else before.rpartition("\n")[2]
            # A version may have four numbers, and NCCL's stands alone in columns.
            version = self._versions.search(line) or _NCCL.fullmatch(text)
            if version and address not in self._own and address.version == 4:
                return word
            place = self._own.get(address) or self._number("address", address)
            self.taken[place] += 1
            return f"{place}{word.removeprefix(text)}"
        if kind == "serial":
            start = re.match(rf"[\w -]+?{_SIGN}", word)
            name = start.group() if start else ""
            return name + self._place("serial", word.removeprefix(name))
        if kind == "email":
            user, _, domain = word.rpartition("@")
            if domain.casefold() not in self._known and not _parse_address(domain):
                return self._place("email", word)
            return f"{user if user == 'root' else self._place('user', user)}@{self.text(domain)}"
        if kind in ("home", "account"):
            return word if word == "root" else self._place("user", word)
        return self._place(kind, word)


def _walk(value: Any, act: Callable[[Any, str], Any], key: str = "") -> Any:
    """Return a value of JSON with what ``act`` makes of each text, number and name of a key."""
    if isinstance(value, Mapping):
        pairs = ((str(name), part) for name, part in value.items())
        return {act(name, ""): _walk(part, act, name) for name, part in pairs}
    if isinstance(value, list | tuple):
        return [_walk(part, act, key) for part in value]
    return act(value, key) if value and not isinstance(value, bool) else value


def _parse_address(text: str) -> _Address | None:
    """Return an address, that of its own for one that is mapped into IPv6; None for no address."""
    try:
        found = ip_address(text)
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return mapped or found


def _private_address(text: str) -> _Address | None:
    """Return an address that somebody has, None for one that names nobody."""
    found = _parse_address(text)
    nobody = found and (found.is_loopback or found.is_unspecified or found.is_multicast)
    return None if nobody else found


def private_names(nodes: Iterable[tuple[str, NodeFacts | None]]) -> PrivateNames:
    """Return what nodes say of themselves: destinations as ssh takes them, with known facts."""
    hosts, users, addresses, serials = [], [], [], []
    for destination, facts in nodes:
        user, _, host = destination.rpartition("@")
        own = [host]
        users.append(user)
        if facts is not None:
            own.append(facts.host.system.hostname)
            users += [facts.user, Path(facts.home).name]
            addresses += [its.address for dev in facts.host.netdevs for its in dev.addresses]
            addresses += [gid.address for rdma in facts.host.rdma for gid in rdma.gids]
            serials += [dev.mac for dev in facts.host.netdevs]
        # The first part of a host's name is its name as well; an address has none.
        short = [name.partition(".")[0] for name in own if "." in name]
        own += [name for name in short if not name.isdigit() and len(name) > 2]
        hosts.append(own)
    return PrivateNames(hosts=hosts, users=users, addresses=addresses, serials=serials)


def pack_report(parts: Mapping[str, Any], names: PrivateNames) -> tuple[str, dict[str, int]]:
    """Return parts by name, as JSON takes them, as a text; and how often a placeholder is in it.

    A part that is a text becomes a list of its lines.
    """
    redactor = Redactor(names)
    _walk(parts, redactor.learn)
    clean = _walk(parts, redactor.value)
    lines = {name: part.splitlines() for name, part in clean.items() if isinstance(part, str)}
    taken = dict(sorted(redactor.taken.items()))
    whole = {"note": _NOTE, "taken_out": taken, **clean, **lines}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n", taken


def save_report(report: bytes, path: Path) -> None:
    """Write a report for its owner alone. Raises UsageError if the file is there, StorageError."""
    if os.path.lexists(path):
        raise UsageError(f"{path}: is there already", hint="name a new file")
    with translated("no report was written", at=path), replacing(path, private=True) as file:
        file.write(report)
