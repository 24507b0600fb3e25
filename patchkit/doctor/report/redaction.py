"""Take out of texts what names people, machines and secrets; what is equal stays equal. Pure.

Everything is found in one pass over a text, so that a placeholder is never taken for a name. What
the nodes say of themselves is known and found in any place; the rest is known by its form.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from patchkit.doctor.report.private_forms import (
    SERIAL_SIGN,
    SHORT,
    AddressNames,
    private_pattern,
    redaction_data,
)
from patchkit.runtime.rules.secret_texts import holds_secret, secret_spans

_BEFORE = 80  # characters before a number that say whether it is a version
_UNIT = re.compile(r"@(?:[\w.-]*\.(?:service|socket|target|timer|slice|mount|scope)|\d+)\b")
_ANSI = re.compile(r"\x1b\[[0-9;:?]*[A-Za-z]")  # a colour's last letter would be part of a name
_KINDS = {"mac": "mac", "enx": "mac", "guid": "guid", "uuid": "uuid", "id": "uuid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateNames:
    """What nodes say of themselves: ``hosts`` are the names of each node, one list a node."""

    hosts: tuple[tuple[str, ...], ...] = ()
    users: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    serials: tuple[str, ...] = ()


@dataclass(slots=True)
class _Placeholders:
    """Which placeholder stands for what; the same value has the same one."""

    by_value: dict[tuple[str, str], str] = field(default_factory=dict)
    last: Counter[str] = field(default_factory=Counter)
    taken: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)

    def of(self, kind: str, value: str) -> str:
        """Return the placeholder of a value, a new one if it has none; not counted."""
        key = kind, value.casefold()
        if key not in self.by_value:
            self.last[kind] += 1
            self.by_value[key] = f"{kind}-{self.last[kind]}"
        return self.by_value[key]

    def take(self, kind: str, place: str) -> str:
        self.kinds[kind] += 1
        self.taken[place] += 1
        return place


class Redactor:
    """Replaces what is private in texts, values of JSON and names of files.

    ``learn`` is for all texts before the first is replaced: a key that is named in one of them is
    found in the others without its name.
    """

    def __init__(self, names: PrivateNames) -> None:
        data = redaction_data()
        self._placeholders = _Placeholders()
        self._addresses = AddressNames(re.compile(data.versions, re.IGNORECASE))
        self._known: dict[str, tuple[str, str]] = {}  # in small letters → kind and placeholder
        self._pattern: re.Pattern[str] | None = None
        for number, own in enumerate(names.hosts, start=1):
            for host in own:
                if host.casefold() not in data.hosts:
                    self._know("node", host, f"node-{number}")
        for user in names.users:
            if user not in data.accounts:
                self._know("user", user)
        for serial in names.serials:
            self._know("serial", serial)
        for address in names.addresses:
            for form, place in self._addresses.know(address):
                self._know("address", form, place)

    def _know(self, kind: str, value: str, place: str = "") -> None:
        if value and value.casefold() not in self._known and not self._addresses.is_address(value):
            known = place or self._placeholders.of(kind, value)
            self._known[value.casefold()] = kind, known
            self._pattern = None

    def learn(self, value: object) -> None:
        """Take note of the secrets in a text, or in a value of JSON."""
        for key, text in ((key, _ANSI.sub("", text)) for key, text in _strings(value)):
            spans = [(0, len(text))] if holds_secret(key) else secret_spans(text)
            for start, stop in spans:
                secret = text[start:stop]
                # Of USER:WORD the word may stand alone elsewhere.
                for each in {secret, secret.partition(":")[2]}:
                    if len(each) >= SHORT and not self._is_name(secret):
                        self._know("secret", each)

    def text(self, text: str) -> str:
        """Return a text without what is private."""
        if self._pattern is None:
            self._pattern = private_pattern({name: kind for name, (kind, _) in self._known.items()})
        clean = _ANSI.sub("", text)
        parts, end = [], 0
        for start, stop in secret_spans(clean):
            if not self._is_name(clean[start:stop]):
                parts += [*self._without_names(clean, end, start)]
                parts.append(self._place("secret", clean[start:stop]))
                end = stop
        return "".join((*parts, *self._without_names(clean, end, len(clean))))

    def _without_names(self, text: str, start: int, stop: int) -> Iterator[str]:
        assert self._pattern is not None
        for match in self._pattern.finditer(text, start, stop):
            yield text[start : match.start()]
            yield self._replaced(match)
            start = match.end()
        yield text[start:stop]

    def _is_name(self, word: str) -> bool:
        """Return whether what logs in to a URL is the name of a user, and no token."""
        kind, _ = self._known.get(word.casefold(), ("", ""))
        return kind in ("user", "node") or word in redaction_data().accounts

    def value(self, value: Any, key: str = "") -> Any:
        """Return a value of JSON without what is private; ``key`` is what it stands under."""
        if isinstance(value, Mapping):
            pairs = ((str(name), each) for name, each in value.items())
            return {self.text(name): self.value(each, name) for name, each in pairs}
        if isinstance(value, list | tuple):
            return [self.value(each, key) for each in value]
        if not value or isinstance(value, bool):
            return value
        if holds_secret(key):
            return self._place("secret", str(value))
        if not isinstance(value, str):
            return value
        if key.casefold() in redaction_data().serials:
            return self._place("serial", value)
        return self.text(value)

    def report(self) -> dict[str, dict[str, int]]:
        """Return what was taken out: how often by kind, and by placeholder."""
        return {
            "kinds": dict(sorted(self._placeholders.kinds.items())),
            "placeholders": dict(sorted(self._placeholders.taken.items())),
        }

    def _place(self, kind: str, value: str) -> str:
        """Return what stands for a value, whether it was known before or not."""
        if value.casefold() in self._known:
            return self._placeholders.take(*self._known[value.casefold()])
        return self._placeholders.take(kind, self._placeholders.of(kind, value))

    def _replaced(self, match: re.Match[str]) -> str:
        kind, word = match.lastgroup or "", match.group()
        if kind == "address":
            before = match.string[max(0, match.start() - _BEFORE) : match.start()]
            place = self._addresses.replaced(before, word)
            return word if place is None else self._placeholders.take("address", place)
        if kind == "serial":
            sign = re.match(rf"[\w -]+?{SERIAL_SIGN}", word)
            start = sign.end() if sign else 0
            return word[:start] + self._place("serial", word[start:])
        if kind == "email":
            return self._email(word)
        if kind == "account" and _UNIT.match(match.string, match.end()):
            # worker@1.service is an instance of a unit.
            known = self._known.get(word.casefold())
            return self._placeholders.take(*known) if known else self.text(word)
        if kind in ("home", "account"):
            return self._user(word)
        return self._place(_KINDS.get(kind, "secret"), word)

    def _email(self, whole: str) -> str:
        user, _, domain = whole.rpartition("@")
        if _UNIT.fullmatch(f"@{domain}"):
            return f"{self.text(user)}@{self.text(domain)}"
        if domain.casefold() in self._known or self._addresses.is_address(domain):
            return f"{self._user(user)}@{self.text(domain)}"
        return self._place("email", whole)

    def _user(self, user: str) -> str:
        return user if user == "root" else self._place("user", user)


def _strings(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts of a value of JSON, each with the key that it stands under."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield "", str(name)
            yield from _strings(each, str(name))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each, key)
    elif isinstance(value, str | int) and not isinstance(value, bool):
        yield key, str(value)
