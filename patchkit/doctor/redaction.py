"""Replace what names people, machines and secrets in texts, values of JSON and names of files.

Names that the nodes report are replaced wherever they occur, in any spelling; other private values
are recognised by their form. The same value always gets the same placeholder. One pass over a text
replaces all of them, so that a placeholder is never taken for a name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from ipaddress import (
    IPv4Address,
    IPv6Address,
    ip_address,
    ip_network,
)
from pathlib import Path
from typing import Any, NamedTuple

from patchkit.doctor.private_names import (
    MAC,
    PrivateNames,
    mac_form,
    mac_key,
)
from patchkit.records import RECIPES, read_toml
from patchkit.runtime.rules.secret_texts import holds_secret, secret_spans

_Address = IPv4Address | IPv6Address
_SHORT = 6  # characters: a shorter name or key may be a part of any word
_LABELS = 5  # at the end of a host's name, by which a public domain is known
_BEFORE = 80  # characters before a number that say whether it is a version
# The last letter of a colour would be part of a name.
_ANSI = re.compile(r"\x1b\[[0-9;:?]*[A-Za-z]")
_NCCL = re.compile(r"2\.\d{2}\.\d{1,2}\.\d")
_SIGN = r"[\"']?\s{0,3}[:=]\s{0,3}[\"']?"
_SERIAL_NAME = re.compile(rf"[\w /-]+?{_SIGN}")
_NOTHING = "(?!)"  # a pattern that matches nothing
# worker@1.service is an instance of a unit, image@sha256: a digest.
_NO_ACCOUNT = (
    r"(?!@(?:sha256:|[\w.-]*\.(?:service|socket|target|timer|slice|mount|scope)|\d+)\b)"
)
_END_OF_IPV6 = r"(?:(?:\d{1,3}\.){3}\d{1,3}|[0-9a-f]{1,4})?(?![0-9a-z]|:[0-9a-z:])"
# If two kinds begin at one place, the first one counts: names before numbers.
_NAMES = (
    ("email", rf"(?<![\w.+-])[\w.+-]{{1,64}}{_NO_ACCOUNT}@(?:[\w-]+\.)+[\w-]+"),
    ("home", r"(?:(?<=/home/)|(?<=/Users/))[^\s/:\"'`,;)\]}<>*]+"),
    (
        "account",
        rf"(?<![\w.-])[\w.-]{{1,64}}{_NO_ACCOUNT}@(?:[a-z][\w-]*(?![\w.(-])|(?=[\w-]))",
    ),
)
# Devices make an EUI-64 of a MAC: they put ff:fe or ff:ff between its halves, mlx5 03:00.
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
# A path is private up to the packages of its environment, which everybody has.
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


class Span(NamedTuple):
    """A part of a text, and the placeholder that replaces it."""

    start: int
    stop: int
    placeholder: str


_DATA = read_toml(RedactionData, RECIPES / "doctor" / "redaction.toml")


@cache
def _value_patterns() -> list[tuple[str, re.Pattern[str]]]:
    """Return the patterns of values with their kinds."""
    flags = re.IGNORECASE | re.MULTILINE
    compiled = []
    for kind, patterns in _DATA.value_patterns.items():
        compiled += [(kind, re.compile(pattern, flags)) for pattern in patterns]
    return compiled


class Redactor:
    """Replaces private values; with ``paths`` also folders that are not the system's.

    Call ``learn`` with all texts before the first one is replaced: a key or a host that one text
    names is then replaced in the others, too, where nothing names it.
    """

    def __init__(self, names: PrivateNames, *, paths: bool = False) -> None:
        self._paths = paths
        self._known: dict[str, str] = {}  # word in small letters → placeholder
        self._macs: set[str] = set()  # keys of the nodes' MACs
        self._numbers: dict[str, dict[object, int]] = {}  # of the values of each kind
        self._pattern: re.Pattern[str] | None = None
        self.counts: Counter[str] = Counter()
        """How often each placeholder stands for something."""

        for number, node_names in enumerate(names.hosts, start=1):
            for host in node_names:
                self._know_host(host, f"node-{number}")

        for user in names.users:
            if user and user not in _DATA.accounts:
                self._know(user, self._number("user", user))
        for serial in names.serials:
            self._know_serial(serial)

        for model in names.models:
            self._know_model(model)

        self._addresses: dict[_Address, str] = {}
        for text in names.addresses:
            self._know_address(_private_address(text))

    # Known names

    def _know(self, value: str, placeholder: str) -> None:
        if value and not _parse_address(value):
            self._known.setdefault(value.casefold(), placeholder)
            self._pattern = None

    def _know_host(self, host: str, placeholder: str) -> None:
        """Take note of a node's name, and of the domains that it is in."""
        if host.casefold() in _DATA.hosts or _parse_address(host):
            return

        self._know(host, placeholder)
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
        """Take note of a model's name or folder, unless it is a Hub's name or like a word."""
        if self._is_public_model(model):
            return

        placeholder = self._number("model", model)
        for name in (model, Path(model).name):
            if _is_distinctive(name):
                self._know(name, placeholder)

    def _know_address(self, address: _Address | None) -> None:
        if address:
            placeholder = self._number("address", address)
            self._addresses[address] = placeholder
            self._know(str(address).replace(".", "-"), placeholder)

    def _number(self, kind: str, value: object) -> str:
        """Return the placeholder of a value, a new one if it has none; not counted."""
        numbers = self._numbers.setdefault(kind, {})

        key = value.casefold() if isinstance(value, str) else value
        return f"{kind}-{numbers.setdefault(key, len(numbers) + 1)}"

    def learn(self, value: object, key: str = "") -> None:
        """Take note of the secrets and names in a text, or in a value that JSON has under a key."""
        text = _ANSI.sub("", str(value))
        spans = [(0, len(text))] if holds_secret(key) else secret_spans(text)

        for start, stop in spans:
            secret = text[start:stop]
            if self._is_name(secret):
                continue
            # WORD of USER:WORD may stand alone elsewhere.
            for word in (secret, secret.partition(":")[2]):
                if len(word) >= _SHORT:
                    self._know(word, self._number("secret", word))

        for kind, match in self._named_values(text):
            word = match["value"]
            is_learned = kind in ("host", "user", "model") and _is_distinctive(word)
            # A word of a sentence is replaced where a form names it, and nowhere else.
            if is_learned and self._known_spelling(word) not in self._known:
                self._know(word, self._number(kind, word))

    def _is_name(self, word: str) -> bool:
        """Return whether the login in a URL is the name of a user, and not a token."""
        placeholder = self._known.get(word.casefold(), "")
        return placeholder.startswith(("user-", "node-")) or word in _DATA.accounts

    def _is_public(self, host: str) -> bool:
        """Return whether a host names nobody: this machine, an address, or a server for all."""
        plain = host.casefold().strip(".")
        if not plain or _parse_address(plain):
            return True

        labels = plain.split(".")[-_LABELS:]
        while labels:
            if ".".join(labels) in _DATA.hosts:
                return True
            del labels[0]
        return False

    def _is_public_model(self, model: str) -> bool:
        if not model or _HUB_NAME.fullmatch(model):
            return True
        return model.casefold() in _DATA.models

    # Texts

    def text(self, text: str) -> str:
        """Return a text without private values."""
        clean = _ANSI.sub("", text)
        parts = []
        end = 0
        for span in self._find_spans(clean):
            parts += [clean[end : span.start], span.placeholder]
            self.counts[span.placeholder] += 1
            end = span.stop

        parts.append(clean[end:])
        return "".join(parts)

    def _find_spans(self, text: str) -> Iterator[Span]:
        """Yield the values that a form names, and between them those that are known."""
        end = 0
        # The last one is empty: it stands for the end of the text.
        text_end = Span(len(text), len(text), "")
        for named in (*_without_overlaps(self._spans_named_by_form(text)), text_end):
            for match in self._whole_pattern().finditer(text, end, named.start):
                yield from self._spans_of_match(match)
            if named.placeholder:
                yield named
            end = named.stop

    def _spans_named_by_form(self, text: str) -> Iterator[Span]:
        """Yield secrets by the names before them, and hosts, users and paths by their forms."""
        for start, stop in secret_spans(text):
            word = text[start:stop]
            if not self._is_name(word):
                yield Span(start, stop, self._placeholder_for("secret", word))

        for kind, match in self._named_values(text):
            word = self._known_spelling(match["value"])
            placeholder = self._placeholder_for(kind, word)
            yield Span(*match.span("value"), placeholder)

        if self._paths:
            yield from self._path_spans(text)

    def _named_values(self, text: str) -> Iterator[tuple[str, re.Match[str]]]:
        """Yield what a form of recipes/doctor/redaction.toml names, with its kind."""
        for kind, pattern in _value_patterns():
            for match in pattern.finditer(text):
                if not self._names_nobody(kind, match["value"]):
                    yield kind, match

    def _names_nobody(self, kind: str, word: str) -> bool:
        match kind:
            case "host":
                return self._is_public(word)
            case "user":
                return word in _DATA.accounts
            case "model":
                return self._is_public_model(word)
            case _:
                return False

    def _path_spans(self, text: str) -> Iterator[Span]:
        """Yield private folders: of a path to a package of an environment, the environment."""
        for match in _PATH.finditer(text):
            path = match.group().rstrip(".")
            if self._is_systems(path):
                continue

            packages = _PACKAGES.search(path)
            private = path[: packages.start()] if packages else path
            stop = match.start() + len(private)
            yield Span(
                match.start(),
                stop,
                self._number("path", private.rstrip("/")),
            )

    def _is_systems(self, path: str) -> bool:
        """Return whether a path is the system's, or a source file of a library."""
        parts = re.split("[/?]", path, maxsplit=2)
        if parts[1].casefold() in _DATA.paths:
            return True

        source_file = _DATA.source_file_pattern
        return re.fullmatch(source_file, path, re.IGNORECASE) is not None

    def _whole_pattern(self) -> re.Pattern[str]:
        """Return one pattern of all known names and of all values with a form of their own."""
        if self._pattern is None:
            longest_first = sorted(self._known, key=lambda word: (-len(word), word))
            known = "|".join(map(self._known_form, longest_first))

            macs = "|".join(map(mac_form, sorted(self._macs)))
            keys = sorted(_DATA.serial_keys - {"uuid"})
            names = "|".join(map(re.escape, keys))
            serials = rf"\b(?:{names.replace('_', '[ _]')}){_SIGN}[\w.-]{{4,}}"

            kinds = [
                *_NAMES,
                ("mac", macs or _NOTHING),
                ("known", known or _NOTHING),
                ("serial", serials),
                *_NUMBERS,
            ]

            forms = []
            for number, (kind, form) in enumerate(kinds):
                forms.append(f"(?P<{kind}_{number}>{form})")
            self._pattern = re.compile("|".join(forms), re.IGNORECASE)
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

        is_host = kind in ("node", "host")
        if is_host and len(word.replace("-", "")) >= _SHORT:
            form = form.replace(r"\-", "[-_]?")

        is_user_like_a_word = kind == "user" and not _is_distinctive(word)
        if len(word) < _SHORT or is_user_like_a_word:
            # Behind the \n of a text within a text a word begins, too.
            form = rf"(?:(?<![A-Za-z0-9])|(?<=\\[nrt])){form}(?![A-Za-z0-9])"
        return form

    def value(self, value: Any, key: str = "") -> Any:
        """Return what JSON has under a key, without private values."""
        if holds_secret(key):
            return self._counted("secret", str(value))
        if key in _DATA.schema_keys:
            return value
        if key.casefold() in _DATA.serial_keys:
            return self._counted("serial", str(value))

        if not isinstance(value, str):
            return value

        if key == "model" and not value.startswith(("/", "~", ".")):
            is_public = self._is_public_model(value)
            return value if is_public else self._counted("model", value)
        return self.text(value)

    def _placeholder_for(self, kind: str, value: str) -> str:
        """Return the placeholder of a value, of whatever kind if it is known already."""

        known = self._known.get(value.casefold())
        return known or self._number(kind, value)

    def _counted(self, kind: str, value: str) -> str:
        placeholder = self._placeholder_for(kind, value)

        self.counts[placeholder] += 1
        return placeholder

    def _spans_of_match(self, match: re.Match[str]) -> Iterator[Span]:
        """Yield the private parts of a match: not the name before a value, maybe nothing."""
        kind = (match.lastgroup or "").partition("_")[0]
        word = match.group()
        start, stop = match.span()
        match kind:
            case "address" | "address6":
                yield from self._address_spans(match)
                return
            case "email" | "account" | "home":
                yield from self._login_spans(kind, word, start)
                return
            case "mac":
                placeholder = self._number("mac", mac_key(word))
            case "known":
                spelling = self._known_spelling(word)
                placeholder = self._placeholder_for("host", spelling)
            case "serial":
                if name := _SERIAL_NAME.match(word):
                    start += name.end()
                serial = match.string[start:stop]
                placeholder = self._placeholder_for("serial", serial)
            case _:
                placeholder = self._placeholder_for(kind, word)
        yield Span(start, stop, placeholder)

    def _known_spelling(self, word: str) -> str:
        """Return a known word as it is known: a host may be written without its dashes."""
        small = word.casefold()
        if small in self._known:
            return small

        bare = re.sub("[-_]", "", small)
        for spelling in self._known:
            if re.sub("[-_]", "", spelling) == bare:
                return spelling
        return small

    def _login_spans(
        self,
        kind: str,
        word: str,
        start: int,
    ) -> Iterator[Span]:
        """Yield a user and, if it is named behind an @, the host of the login."""
        user, _, host = word.partition("@")
        middle = start + len(user)
        stop = start + len(word)

        address = _parse_address(host)
        is_known = host.casefold() in self._known
        if kind == "email" and not address and not is_known:
            yield Span(start, stop, self._placeholder_for("email", word))
            return

        if user != "root":
            yield Span(start, middle, self._placeholder_for("user", user))
        if address:
            yield Span(middle + 1, stop, self._number("address", address))
        elif is_known or not self._is_public(host):
            spelling = self._known_spelling(host)
            yield Span(middle + 1, stop, self._placeholder_for("host", spelling))

    def _address_spans(self, match: re.Match[str]) -> Iterator[Span]:
        """Yield an address that somebody has: no mask, and no version of four numbers."""
        word = match.group()
        # The colon of a sentence, as in `::2: no route`.
        text = word if _parse_address(word) else word.removesuffix(":")

        address = _private_address(text)
        if address is None or text.startswith("255.25"):  # a mask
            return

        placeholder = self._addresses.get(address)
        if placeholder is None:
            if address.version == 4 and self._is_version(match, text):
                return
            placeholder = self._number("address", address)
        stop = match.start() + len(text)
        yield Span(match.start(), stop, placeholder)

    def _is_version(self, match: re.Match[str], text: str) -> bool:
        """Return whether four numbers are a version; NCCL's stands alone in columns."""
        if _NCCL.fullmatch(text):
            return True
        if match.string.startswith("/", match.end()):  # a network
            return False

        begin = max(0, match.start() - _BEFORE)
        before = match.string[begin : match.start()]
        line = before.rpartition("\n")[2]
        prefix = _DATA.version_prefix_pattern
        return re.search(prefix, line, re.IGNORECASE) is not None


def _without_overlaps(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield spans in order; of one that begins within another, the part behind that."""
    end = 0
    for span in sorted(spans, key=lambda span: (span.start, -span.stop)):
        if span.stop > end:
            yield span._replace(start=max(span.start, end))
            end = span.stop


def _is_distinctive(word: str) -> bool:
    """Return whether a name is replaced anywhere: it is long, and not a word of a language."""
    has_sign = re.search(r"[\d_./-]", word) is not None
    return has_sign and len(word) >= _SHORT


def _parse_address(text: str) -> _Address | None:
    """Return an address, IPv4 for one that is mapped into IPv6; None if the text is none."""
    try:
        address = ip_address(text)
    except ValueError:
        return None

    if isinstance(address, IPv6Address):
        return address.ipv4_mapped or address
    return address


def _private_address(text: str) -> _Address | None:
    """Return an address that somebody has, None for one that names nobody."""
    address = _parse_address(text)
    if address is None:
        return None
    if address.is_loopback or address.is_unspecified or address.is_multicast:
        return None

    for network in _DATA.networks:
        if address in ip_network(network):
            return None
    return address
