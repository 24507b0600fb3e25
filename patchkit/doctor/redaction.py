"""Replace what names people, machines and secrets in texts, values of JSON and names of files.

Names that the nodes report are replaced wherever they occur, in any spelling; other private values
are recognised by their form. The same value always gets the same placeholder. One pass over a text
replaces all of them, so that a placeholder is never taken for a name.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from ipaddress import (
    IPv4Address,
    IPv6Address,
    ip_address,
    ip_network,
)
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from patchkit.doctor.private_names import (
    MAC,
    PrivateNames,
    mac_form,
    mac_key,
)
from patchkit.frozen import frozen
from patchkit.records import RECIPES, read_toml
from patchkit.runtime.rules.secret_texts import holds_secret, secret_spans

_Address = IPv4Address | IPv6Address
_SHORT = 6  # characters: a shorter name or key may be a part of any word
_BEFORE = 80  # characters before a number that say whether it is a version
# The last letter of a colour would be part of a name.
_ANSI = re.compile(r"\x1b\[[0-9;:?]*[A-Za-z]")
_NCCL = re.compile(r"2\.\d{2}\.\d{1,2}\.\d")
_NOTHING = "(?!)"  # a pattern that matches nothing
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# A path is private up to the packages of its environment, which everybody has.
_PATH = re.compile(
    r"""(?<=file://)/[^\s"'`,;:()\[\]{}<>|*]+
    |(?<=["'])/(?:(?!\ [-/])[^"'\n:]){1,300}(?=["'])
    |(?:(?<![^\s"'`=(\[{,;:@])|(?<=\\n))/(?!/)[^\s"'`,;:()\[\]{}<>|*]+""",
    re.VERBOSE,
)
_PACKAGES = re.compile(r"/(?:site|dist)-packages(?:/|$)")


@frozen
class RedactionData:
    """Hold recipes/doctor/redaction.toml.

    Patterns are by kind; each of ``value_patterns`` has a group ``value``, which is replaced.
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
    name_patterns: Mapping[str, str]
    number_patterns: Mapping[str, tuple[str, ...]]
    value_patterns: Mapping[str, tuple[str, ...]]


class Span(NamedTuple):
    """A part of a text, and the placeholder that replaces it."""

    start: int
    stop: int
    placeholder: str


_DATA = read_toml(RedactionData, RECIPES / "doctor" / "redaction.toml")
# What is below a public domain is as public as the domain.
_PUBLIC_HOSTS = tuple(f".{host}" for host in _DATA.hosts)


class Redactor:
    """Replaces private values; with ``paths`` also folders that are not the system's.

    Call ``learn`` with all texts before the first one is replaced: a key or a host that one text
    names is then replaced in the others, too, where nothing names it.
    """

    def __init__(self, names: PrivateNames, *, paths: bool = False) -> None:
        self._paths = paths
        self._known: dict[str, str] = {}  # word in small letters → placeholder
        self._numbers = defaultdict[str, dict[object, int]](dict)  # of each kind
        self.counts: Counter[str] = Counter()
        """How often each placeholder stands for something."""

        for number, node_names in enumerate(names.hosts, start=1):
            for host in node_names:
                self._know_host(host, f"node-{number}")

        for user in names.users:
            if user not in _DATA.accounts:
                self._know(user, "user")

        for serial in names.serials:
            if MAC.fullmatch(serial):
                self._number("mac", mac_key(serial))
            else:
                self._know(serial, "serial")

        for model in names.models:
            self._know_model(model)

        for text in names.addresses:
            if address := _private_address(text):
                placeholder = self._number("address", address)
                self._know(_dashed(address), "address", placeholder)

    # Known names

    def _know(self, value: str, kind: str, placeholder: str = "") -> None:
        if value and not _parse_address(value):
            placeholder = placeholder or self._number(kind, value)

            self._known.setdefault(value.casefold(), placeholder)

    def _know_host(self, host: str, placeholder: str) -> None:
        """Take note of a node's name, and of the domains that it is in."""
        if host.casefold() in _DATA.hosts or _parse_address(host):
            return

        self._know(host, "node", placeholder)

        domain = host.partition(".")[2].casefold()
        while "." in domain and not _is_public("host", domain):
            self._know(domain, "domain")
            domain = domain.partition(".")[2]

    def _know_model(self, model: str) -> None:
        """Take note of a model's name or folder, unless it is a Hub's name or like a word."""
        if _is_public("model", model):
            return

        placeholder = self._number("model", model)
        for name in (model, Path(model).name):
            if _is_distinctive(name):
                self._know(name, "model", placeholder)

    def _number(self, kind: str, value: object) -> str:
        """Return the placeholder of a value, a new one if it has none; not counted."""
        numbers = self._numbers[kind]

        key = value.casefold() if isinstance(value, str) else value
        return f"{kind}-{numbers.setdefault(key, len(numbers) + 1)}"

    def learn(self, value: object, key: str = "") -> None:
        """Take note of the secrets and names in a text, or in a value that JSON has under a key."""
        text = _ANSI.sub("", str(value))
        values = self._named_values(text)

        is_secret = holds_secret(key) and not self._is_name(text)
        if is_secret:
            values = iter([("secret", 0, len(text))])

        for kind, start, stop in values:
            word = text[start:stop]
            if kind == "secret":
                # WORD of USER:WORD may stand alone elsewhere.
                password = word.partition(":")[2]
                for part in (word, password):
                    if len(part) >= _SHORT:
                        self._know(part, kind)

                continue

            is_named = kind in ("host", "user", "model")
            is_learned = is_named and _is_distinctive(word)

            # A word of a sentence is replaced where a form names it, and nowhere else.
            if is_learned and self._known_spelling(word) not in self._known:
                self._know(word, kind)

    def _is_name(self, word: str) -> bool:
        """Return whether the login in a URL is the name of a user, and not a token."""
        placeholder = self._known.get(word.casefold(), "")
        return placeholder.startswith(("user-", "node-")) or word in _DATA.accounts

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
        spans = _without_overlaps(self._spans_named_by_form(text))

        for named in chain(spans, [text_end]):
            for match in self._whole_pattern.finditer(text, end, named.start):
                yield from self._spans_of_match(match)

            if named.placeholder:
                yield named
            end = named.stop

    def _spans_named_by_form(self, text: str) -> Iterator[Span]:
        """Yield what a form names, and private folders if these are replaced."""
        for kind, start, stop in self._named_values(text):
            placeholder = self._placeholder_for(kind, text[start:stop])
            yield Span(start, stop, placeholder)

        if self._paths:
            yield from self._path_spans(text)

    def _named_values(self, text: str) -> Iterator[tuple[str, int, int]]:
        """Yield the kind and the place of secrets, and of what a pattern of the data names."""
        for start, stop in secret_spans(text):
            if not self._is_name(text[start:stop]):
                yield "secret", start, stop

        for kind, patterns in _DATA.value_patterns.items():
            matches = chain.from_iterable(
                re.finditer(pattern, text, re.IGNORECASE | re.MULTILINE)
                for pattern in patterns
            )
            for match in matches:
                if not _is_public(kind, match["value"]):
                    yield kind, match.start("value"), match.end("value")

    def _path_spans(self, text: str) -> Iterator[Span]:
        """Yield private folders: of a path to a package of an environment, the environment."""
        for match in _PATH.finditer(text):
            path = match.group().rstrip(".")
            if not _is_systems(path):
                private = _PACKAGES.split(path)[0]
                placeholder = self._number("path", private.rstrip("/"))

                start = match.start()
                yield Span(start, start + len(private), placeholder)

    @cached_property
    def _whole_pattern(self) -> re.Pattern[str]:
        """Return one pattern of all known names and of all values with a form of their own.

        If two kinds begin at one place, the first one counts: names before numbers.
        """
        longest_first = sorted(self._known, key=lambda word: (-len(word), word))
        known = "|".join(map(self._known_form, longest_first))
        forms = {**_DATA.name_patterns, "host": known or _NOTHING}

        macs = [mac_form(str(key)) for key in self._numbers["mac"]]
        forms["mac"] = "|".join((*macs, _NOTHING))

        for kind, patterns in _DATA.number_patterns.items():
            forms[kind] = "|".join((forms.get(kind, _NOTHING), *patterns))

        groups = [f"(?P<{kind}>{form})" for kind, form in forms.items()]
        return re.compile("|".join(groups), re.IGNORECASE)

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
            is_public = _is_public("model", value)
            return value if is_public else self._counted("model", value)
        return self.text(value)

    def _placeholder_for(self, kind: str, value: str) -> str:
        """Return the placeholder of a value, of whatever kind if it is known already."""
        known = self._known.get(self._known_spelling(value))
        return known or self._number(kind, value)

    def _counted(self, kind: str, value: str) -> str:
        placeholder = self._placeholder_for(kind, value)

        self.counts[placeholder] += 1
        return placeholder

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

    def _spans_of_match(self, match: re.Match[str]) -> Iterator[Span]:
        """Yield the private parts of a match, maybe nothing."""
        kind = match.lastgroup or ""
        word = match.group()
        match kind:
            case "address" | "address6":
                yield from self._address_spans(match)
            case "email" | "account" | "home":
                yield from self._login_spans(kind, word, match.start())
            case _:
                if kind == "mac":
                    word = mac_key(word)
                yield Span(*match.span(), self._placeholder_for(kind, word))

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
        is_address_of_mail = kind == "email" and not (address or is_known)
        if is_address_of_mail:
            yield Span(start, stop, self._placeholder_for("email", word))
            return

        if user != "root":
            yield Span(start, middle, self._placeholder_for("user", user))

        if address:
            yield Span(middle + 1, stop, self._number("address", address))
        elif is_known or not _is_public("host", host):
            yield Span(middle + 1, stop, self._placeholder_for("host", host))

    def _address_spans(self, match: re.Match[str]) -> Iterator[Span]:
        """Yield an address that somebody has: no mask, and no version of four numbers."""
        word = match.group()
        # The colon of a sentence, as in `::2: no route`.
        text = word if _parse_address(word) else word.removesuffix(":")

        address = _private_address(text)
        is_mask = text.startswith("255.25")
        if address is None or is_mask:
            return

        is_of_node = _dashed(address) in self._known
        may_be_version = address.version == 4 and not is_of_node
        if may_be_version and _is_version(match, text):
            return

        start = match.start()
        placeholder = self._number("address", address)
        yield Span(start, start + len(text), placeholder)


def _is_public(kind: str, word: str) -> bool:
    """Return whether a word names nobody: an account, a server or a model that all have."""
    small = word.casefold()
    match kind:
        case "host":
            plain = small.strip(".")
            is_name = plain and not _parse_address(plain)
            return not is_name or f".{plain}".endswith(_PUBLIC_HOSTS)
        case "user":
            return word in _DATA.accounts
        case "model":
            is_hub_name = _HUB_NAME.fullmatch(word) is not None
            return not word or is_hub_name or small in _DATA.models
    return False


def _is_systems(path: str) -> bool:
    """Return whether a path is the system's, or a source file of a library."""
    folder = re.split("[/?]", path)[1]
    if folder.casefold() in _DATA.paths:
        return True

    source_file = _DATA.source_file_pattern
    return re.fullmatch(source_file, path, re.IGNORECASE) is not None


def _is_version(match: re.Match[str], text: str) -> bool:
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
    in_order = sorted(spans, key=lambda span: (span.start, -span.stop))

    for span in in_order:
        if span.stop > end:
            yield span._replace(start=max(span.start, end))
            end = span.stop


def _is_distinctive(word: str) -> bool:
    """Return whether a name is replaced anywhere: it is long, and not a word of a language."""
    has_sign = re.search(r"[\d_./-]", word) is not None
    return has_sign and len(word) >= _SHORT


def _dashed(address: _Address) -> str:
    """Return an address as it stands in the names of hosts."""
    return str(address).replace(".", "-")


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

    is_everybodys = (
        address.is_loopback
        or address.is_unspecified
        or address.is_multicast
        or any(address in ip_network(network) for network in _DATA.networks)
    )
    return None if is_everybodys else address
