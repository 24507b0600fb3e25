"""Replace what names people, machines and secrets in texts, values of JSON and names of files.

Names that the nodes report are replaced wherever they occur, in any spelling; other private values
are recognised by their form. The same value always gets the same placeholder. One pass over a text
replaces all of them, so that a placeholder is never taken for a name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from pathlib import Path
from typing import Any

from patchkit.doctor.private_names import MAC, PrivateNames, mac_form, mac_key
from patchkit.records import RECIPES, read_toml
from patchkit.runtime.rules.secret_texts import holds_secret, secret_spans

_Address = IPv4Address | IPv6Address
_SHORT = 6  # characters: a shorter name or key may be a part of any word
_LABELS = 5  # at the end of a host's name, by which a public domain is known
_BEFORE = 80  # characters before a number that say whether it is a version
_ANSI = re.compile(
    r"\x1b\[[0-9;:?]*[A-Za-z]"
)  # a colour's last letter would be part of a name
_NCCL = re.compile(r"2\.\d{2}\.\d{1,2}\.\d")
_SIGN = r"[\"']?\s{0,3}[:=]\s{0,3}[\"']?"
# worker@1.service is an instance of a unit, image@sha256: a digest.
_NO_ACCOUNT = (
    r"(?!@(?:sha256:|[\w.-]*\.(?:service|socket|target|timer|slice|mount|scope)|\d+)\b)"
)
_END_OF_IPV6 = r"(?:(?:\d{1,3}\.){3}\d{1,3}|[0-9a-f]{1,4})?(?![0-9a-z]|:[0-9a-z:])"
# Where two kinds begin at one place, the first one counts: names before numbers.
_NAMES = (
    ("email", rf"(?<![\w.+-])[\w.+-]{{1,64}}{_NO_ACCOUNT}@(?:[\w-]+\.)+[\w-]+"),
    ("home", r"(?:(?<=/home/)|(?<=/Users/))[^\s/:\"'`,;)\]}<>*]+"),
    (
        "account",
        rf"(?<![\w.-])[\w.-]{{1,64}}{_NO_ACCOUNT}@(?:[a-z][\w-]*(?![\w.(-])|(?=[\w-]))",
    ),
)
# Devices make EUI-64 of a MAC: ff:fe or ff:ff between its halves, mlx5 03:00.
_NUMBERS = (
    (
        "mac",
        r"(?<![0-9a-f:])(?:[0-9a-f]{2}:){5,19}[0-9a-f]{2}(?![0-9a-f:])|(?<=enx)[0-9a-f]{12}\b",
    ),
    ("mac", r"(?<![\w-])(?=[\d-]*[a-f])(?:[0-9a-f]{2}-){5}[0-9a-f]{2}(?![\w-])"),
    ("mac", r"(?<![\w.])(?=[\d.]*[a-f])(?:[0-9a-f]{4}\.){2}[0-9a-f]{4}(?![\w.])"),
    ("mac", r"(?<![0-9a-z])(?:0x)?[0-9a-f]{6}(?:fff[ef]|0300)[0-9a-f]{6}(?![0-9a-z])"),
    ("mac", r"(?<![0-9a-f:])(?:[0-9a-f]{4}:){3}[0-9a-f]{4}(?![0-9a-f:])"),
    (
        "uuid",
        r"(?<![0-9a-z])(?:[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}|[0-9a-f]{32})(?!\w)",
    ),
    ("address", r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?!\.?\d)"),
    ("address6", rf"(?<![0-9a-z:.])(?:[0-9a-f]{{0,4}}:){{2,8}}{_END_OF_IPV6}"),
)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Up to the environment's packages a path is its owner's, from there on everybody's.
_PATH = re.compile(
    r"""(?<=file://)/[^\s"'`,;:()\[\]{}<>|*]+
    |(?<=["'])/(?:(?!\ [-/])[^"'\n:]){1,300}(?=["'])
    |(?:(?<![^\s"'`=(\[{,;:@])|(?<=\\n))/(?!/)[^\s"'`,;:()\[\]{}<>|*]+""",
    re.VERBOSE,
)
_PACKAGES = re.compile(r"/(?:site|dist)-packages(?:/|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RedactionData:
    """Hold recipes/doctor/redaction.toml.

    ``value_patterns`` are by kind; each has a group ``value``, which is replaced.
    """

    accounts: frozenset[str]
    hosts: frozenset[str]
    models: frozenset[str]
    paths: frozenset[str]
    source_file_pattern: str
    networks: tuple[str, ...]
    serial_keys: frozenset[str]
    schema_keys: frozenset[str]
    version_prefix_pattern: str
    value_patterns: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Span:
    """A part of a text that is replaced."""

    start: int
    stop: int
    place: str


@cache
def redaction_data() -> RedactionData:
    return read_toml(RedactionData, RECIPES / "doctor" / "redaction.toml")


@cache
def _common_networks() -> tuple[IPv4Network | IPv6Network, ...]:
    return tuple(map(ip_network, redaction_data().networks))


@cache
def _value_patterns() -> Mapping[str, tuple[re.Pattern[str], ...]]:
    flags = re.IGNORECASE | re.MULTILINE
    return {
        kind: tuple(re.compile(pattern, flags) for pattern in patterns)
        for kind, patterns in redaction_data().value_patterns.items()
    }


class Redactor:
    """Replaces what is private; with ``paths`` also folders that are no system's.

    ``learn`` is for all texts before the first is replaced: a key or a host that is named in one
    of them is found in the others without its name.
    """

    def __init__(self, names: PrivateNames, *, paths: bool = False) -> None:
        self._data = redaction_data()
        self._paths = paths
        self._known: dict[str, str] = {}  # in small letters → placeholder
        self._macs: set[str] = set()  # of the nodes, as their key
        self._numbers: dict[str, dict[object, int]] = {}  # of each kind
        self._pattern: re.Pattern[str] | None = None
        self.taken: Counter[str] = Counter()
        """How often each placeholder stands for something."""

        for number, node_names in enumerate(names.hosts, start=1):
            for host in node_names:
                self._know_host(host, f"node-{number}")
        for user in names.users:
            if user and user not in self._data.accounts:
                self._know(user, self._number("user", user))
        for serial in names.serials:
            self._know_serial(serial)
        for model in names.models:
            self._know_model(model)

        addresses = [
            address for text in names.addresses if (address := _private_address(text))
        ]
        self._addresses = {
            address: self._number("address", address) for address in addresses
        }
        for address, place in self._addresses.items():
            self._know(str(address).replace(".", "-"), place)

    # What is known

    def _know(self, value: str, place: str) -> None:
        if value and not _parse_address(value):
            self._known.setdefault(value.casefold(), place)
            self._pattern = None

    def _know_host(self, host: str, place: str) -> None:
        """Take note of a node's name, and of the domains that it is in."""
        if host.casefold() in self._data.hosts or _parse_address(host):
            return
        self._know(host, place)
        domain = host.partition(".")[2].casefold()
        while "." in domain and not self._is_public(domain):
            self._know(domain, self._number("domain", domain))
            domain = domain.partition(".")[2]

    def _know_serial(self, serial: str) -> None:
        if not serial:
            return
        if MAC.fullmatch(serial):
            self._macs.add(mac_key(serial))
            self._number("mac", mac_key(serial))
            self._pattern = None
        else:
            self._know(serial, self._number("serial", serial))

    def _know_model(self, model: str) -> None:
        """Take note of a model's name or folder; a Hub's name and one like a word are left."""
        if self._is_public_model(model):
            return
        place = self._number("model", model)
        for name in (model, Path(model).name):
            if _is_distinctive(name):
                self._know(name, place)

    def _number(self, kind: str, value: object) -> str:
        """Return the placeholder of a value, a new one if it has none; not counted."""
        numbers = self._numbers.setdefault(kind, {})
        key = value.casefold() if isinstance(value, str) else value
        return f"{kind}-{numbers.setdefault(key, len(numbers) + 1)}"

    def learn(self, value: object, key: str = "") -> None:
        """Take note of the secrets and names in a text, or in what JSON has under a key."""
        text = _ANSI.sub("", str(value))
        for start, stop in (
            [(0, len(text))] if holds_secret(key) else secret_spans(text)
        ):
            secret = text[start:stop]
            # Of USER:WORD the word may stand alone elsewhere.
            for word in (secret, secret.partition(":")[2]):
                if len(word) >= _SHORT and not self._is_name(secret):
                    self._know(word, self._number("secret", word))

        for kind, word in self._form_names(text):
            # One that could be a word of a sentence is replaced in its form alone.
            if _is_distinctive(word) and self._known_spelling(word) not in self._known:
                self._know(word, self._number(kind, word))

    def _form_names(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield hosts, users and models by the forms in which they are named, with their kind."""
        for kind, _start, _stop, word in self._form_values(text):
            if kind in ("host", "user", "model"):
                yield kind, word

    def _is_name(self, word: str) -> bool:
        """Return whether what logs in to a URL is the name of a user, and no token."""
        known = self._known.get(word.casefold(), "")
        return known.startswith(("user-", "node-")) or word in self._data.accounts

    def _is_public(self, host: str) -> bool:
        """Return whether a host names nobody: this machine, an address, or a server for all."""
        plain = host.casefold().strip(".")
        if not plain or _parse_address(plain):
            return True
        parts = plain.split(".")[-_LABELS:]
        return any(
            ".".join(parts[number:]) in self._data.hosts for number in range(len(parts))
        )

    def _is_public_model(self, model: str) -> bool:
        is_hub_name = _HUB_NAME.fullmatch(model) is not None
        return not model or is_hub_name or model.casefold() in self._data.models

    # Texts

    def text(self, text: str) -> str:
        """Return a text without what is private."""
        clean = _ANSI.sub("", text)
        parts = []
        end = 0
        for span in self._find_spans(clean):
            parts += [clean[end : span.start], span.place]
            self.taken[span.place] += 1
            end = span.stop
        return "".join((*parts, clean[end:]))

    def _find_spans(self, text: str) -> Iterator[Span]:
        """Yield what is replaced: what a form names, and between that what is known by itself."""
        end = 0
        for named in _without_overlaps(self._spans_named_by_form(text)):
            yield from self._known_spans_between(text, end, named.start)
            yield named
            end = named.stop
        yield from self._known_spans_between(text, end, len(text))

    def _known_spans_between(self, text: str, start: int, stop: int) -> Iterator[Span]:
        for match in self._whole_pattern().finditer(text, start, stop):
            yield from self._spans_of_match(match)

    def _spans_named_by_form(self, text: str) -> Iterator[Span]:
        """Yield what stands behind the name of a secret, or in the form of a host, user or path."""
        for start, stop in secret_spans(text):
            word = text[start:stop]
            if not self._is_name(word):
                yield Span(
                    start=start, stop=stop, place=self._placeholder_for("secret", word)
                )
        for kind, start, stop, word in self._form_values(text):
            yield Span(
                start=start,
                stop=stop,
                place=self._placeholder_for(kind, self._known_spelling(word)),
            )
        if self._paths:
            yield from self._path_spans(text)

    def _form_values(self, text: str) -> Iterator[tuple[str, int, int, str]]:
        """Yield kind, place and word of what a form of recipes/doctor/redaction.toml names."""
        for kind, patterns in _value_patterns().items():
            for pattern in patterns:
                for match in pattern.finditer(text):
                    word = match["value"]
                    if not self._names_nobody(kind, word):
                        yield kind, *match.span("value"), word

    def _names_nobody(self, kind: str, word: str) -> bool:
        match kind:
            case "host":
                return self._is_public(word)
            case "user":
                return word in self._data.accounts
            case "model":
                return self._is_public_model(word)
            case _:
                return False

    def _path_spans(self, text: str) -> Iterator[Span]:
        """Yield folders that are their owner's: of packages of an environment what is before."""
        for match in _PATH.finditer(text):
            path = match.group().rstrip(".")
            if self._is_systems(path):
                continue
            packages = _PACKAGES.search(path)
            private = path[: packages.start()] if packages else path
            start = match.start()
            place = self._number("path", private.rstrip("/"))
            yield Span(start=start, stop=start + len(private), place=place)

    def _is_systems(self, path: str) -> bool:
        """Return whether a path is the system's, or a source file's of a library that is built."""
        top = re.split("[/?]", path, maxsplit=2)[1].casefold()
        is_source = (
            re.fullmatch(self._data.source_file_pattern, path, re.IGNORECASE)
            is not None
        )
        return top in self._data.paths or is_source

    def _whole_pattern(self) -> re.Pattern[str]:
        """Return one pattern of all that is known and of all that a form of its own tells."""
        if self._pattern is None:
            words = sorted(
                self._known, key=lambda word: (-len(word), word)
            )  # longest first
            known = "|".join(map(self._known_form, words)) or "(?!)"
            macs = "|".join(map(mac_form, sorted(self._macs))) or "(?!)"
            names = "|".join(map(re.escape, sorted(self._data.serial_keys - {"uuid"})))
            serials = rf"\b(?:{names.replace('_', '[ _]')}){_SIGN}[\w.-]{{4,}}"

            kinds = (
                *_NAMES,
                ("mac", macs),
                ("known", known),
                ("serial", serials),
                *_NUMBERS,
            )
            whole = "|".join(
                f"(?P<{kind}_{number}>{form})"
                for number, (kind, form) in enumerate(kinds)
            )
            self._pattern = re.compile(whole, re.IGNORECASE)
        return self._pattern

    def _known_form(self, word: str) -> str:
        """Return the pattern of a known word, in the spellings and with the borders of its kind."""
        form = re.escape(word)
        kind = self._known[word].rpartition("-")[0]
        match kind:
            case "address":
                return rf"(?<![\d.]){form}(?!\.?\d)"
            case "domain":
                return rf"(?<![\w.-])(?:[\w-]+\.)*{form}"
            case "model":
                return rf"(?<![\w./-]){form}(?![\w-])"
        if kind in ("node", "host") and len(word.replace("-", "")) >= _SHORT:
            form = form.replace(r"\-", "[-_]?")
        is_user_like_a_word = kind == "user" and not _is_distinctive(word)
        if len(word) < _SHORT or is_user_like_a_word:
            # Behind the \n of a text within a text a word begins, too.
            form = rf"(?:(?<![A-Za-z0-9])|(?<=\\[nrt])){form}(?![A-Za-z0-9])"
        return form

    def value(self, value: Any, key: str = "") -> Any:
        """Return what JSON has under a key, without what is private."""
        if holds_secret(key):
            return self._counted("secret", str(value))
        if key in self._data.schema_keys:
            return value
        if key.casefold() in self._data.serial_keys:
            return self._counted("serial", str(value))
        if not isinstance(value, str):
            return value
        if key == "model" and not value.startswith(("/", "~", ".")):
            return (
                value if self._is_public_model(value) else self._counted("model", value)
            )
        return self.text(value)

    def _placeholder_for(self, kind: str, value: str) -> str:
        """Return what stands for a value, whether it was known before or not."""
        known = self._known.get(value.casefold())
        return known or self._number(kind, value)

    def _counted(self, kind: str, value: str) -> str:
        place = self._placeholder_for(kind, value)
        self.taken[place] += 1
        return place

    def _spans_of_match(self, match: re.Match[str]) -> Iterator[Span]:
        """Yield what is replaced of a match: without the name before it, or nothing."""
        kind = (match.lastgroup or "").partition("_")[0]
        word = match.group()
        start, stop = match.span()
        match kind:
            case "address" | "address6":
                yield from self._address_spans(match)
            case "serial":
                start += self._length_of_name(word)
                place = self._placeholder_for("serial", match.string[start:stop])
                yield Span(start=start, stop=stop, place=place)
            case "email":
                yield from self._email_spans(word, start, stop)
            case "account" | "home":
                yield from self._account_spans(word, start, stop)
            case "mac":
                yield Span(
                    start=start, stop=stop, place=self._number("mac", mac_key(word))
                )
            case "known":
                yield Span(
                    start=start,
                    stop=stop,
                    place=self._placeholder_for("host", self._known_spelling(word)),
                )
            case _:
                yield Span(
                    start=start, stop=stop, place=self._placeholder_for(kind, word)
                )

    def _known_spelling(self, word: str) -> str:
        """Return a known word as it is known: a host may be written without its dashes."""
        small = word.casefold()
        if small in self._known:
            return small
        bare = re.sub("[-_]", "", small)
        spelled = (known for known in self._known if re.sub("[-_]", "", known) == bare)
        return next(spelled, small)

    def _length_of_name(self, word: str) -> int:
        """Return how long the name of a serial number is, with the sign behind it."""
        name = re.match(rf"[\w /-]+?{_SIGN}", word)
        return name.end() if name else 0

    def _account_spans(self, word: str, start: int, stop: int) -> Iterator[Span]:
        """Yield a user and, if it is named behind an @, the host where he logs in."""
        user, _, host = word.partition("@")
        middle = start + len(user)
        if user != "root":
            yield Span(
                start=start, stop=middle, place=self._placeholder_for("user", user)
            )
        if not self._is_public(host):
            yield Span(
                start=middle + 1,
                stop=stop,
                place=self._placeholder_for("host", self._known_spelling(host)),
            )

    def _email_spans(self, word: str, start: int, stop: int) -> Iterator[Span]:
        user, _, domain = word.rpartition("@")
        if domain.casefold() not in self._known and not _parse_address(domain):
            yield Span(
                start=start, stop=stop, place=self._placeholder_for("email", word)
            )
            return
        middle = start + len(user)
        if user != "root":
            yield Span(
                start=start, stop=middle, place=self._placeholder_for("user", user)
            )
        address = _parse_address(domain)
        place = (
            self._number("address", address)
            if address
            else self._placeholder_for("host", domain)
        )
        yield Span(start=middle + 1, stop=stop, place=place)

    def _address_spans(self, match: re.Match[str]) -> Iterator[Span]:
        """Yield an address that somebody has; a mask and a version of four numbers are none."""
        word = match.group()
        # The colon of a sentence, as in `::2: no route`.
        text = word if _parse_address(word) else word.removesuffix(":")
        address = _private_address(text)
        if address is None or text.startswith("255.25"):  # a mask
            return
        if (
            address.version == 4
            and address not in self._addresses
            and self._is_version(match, text)
        ):
            return
        place = self._addresses.get(address) or self._number("address", address)
        yield Span(start=match.start(), stop=match.start() + len(text), place=place)

    def _is_version(self, match: re.Match[str], text: str) -> bool:
        """Return whether four numbers are a version; NCCL's stands alone in columns."""
        before = match.string[max(0, match.start() - _BEFORE) : match.start()]
        is_network = match.string.startswith("/", match.end())
        line = "" if is_network else before.rpartition("\n")[2]
        named = re.search(self._data.version_prefix_pattern, line, re.IGNORECASE)
        return named is not None or _NCCL.fullmatch(text) is not None


def _without_overlaps(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield spans in order; one that begins within another is what it has beyond that."""
    end = 0
    for span in sorted(spans, key=lambda span: (span.start, -span.stop)):
        if span.stop > end:
            yield replace(span, start=max(span.start, end))
            end = span.stop


def _is_distinctive(word: str) -> bool:
    """Return whether a name is found anywhere: it is long, and no word of a language."""
    return len(word) >= _SHORT and re.search(r"[\d_./-]", word) is not None


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
    address = _parse_address(text)
    if (
        address is None
        or address.is_loopback
        or address.is_unspecified
        or address.is_multicast
    ):
        return None
    return (
        None if any(address in network for network in _common_networks()) else address
    )
