"""Replace names of people and machines, and secrets, in texts, values of JSON and names of files.

Names that the nodes report are replaced wherever they occur, in any spelling. Other private values
are recognised by their form. The same value always gets the same placeholder. A text is replaced
in one pass, so that a placeholder is never taken for a name.
"""

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
from patchkit.frozen import Texts, Values, frozen
from patchkit.records import RECIPES, read_toml
from patchkit.runtime.rules.secret_texts import holds_secret, secret_spans

_Address = IPv4Address | IPv6Address
_SHORT = 6  # characters: a name or key with fewer of them may be a part of any word
_BEFORE = 80  # characters before a number, which tell whether the number is a version
# Else the last letter of an escape sequence would be taken as the start of a name.
_ANSI = re.compile(r"\x1b\[[0-9;:?]*[A-Za-z]")
_NCCL = re.compile(r"2\.\d{2}\.\d{1,2}\.\d")
_NOTHING = "(?!)"  # a pattern that matches nothing
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Absolute paths: behind file://, between quotes (may hold blanks), and plain ones.
_PATH = re.compile(
    r"""(?<=file://)/[^\s"'`,;:()\[\]{}<>|*]+
    |(?<=["'])/(?:(?!\ [-/])[^"'\n:]){1,300}(?=["'])
    |(?:(?<![^\s"'`=(\[{,;:@])|(?<=\\n))/(?!/)[^\s"'`,;:()\[\]{}<>|*]+""",
    re.VERBOSE,
)
# The rest of a path from here on is the same for everybody, and stays.
_PACKAGES = re.compile(r"/(?:site|dist)-packages(?:/|$)")


@frozen
class RedactionData:
    """The content of recipes/doctor/redaction.toml.

    The mappings are kind of private value → patterns. Each of ``value_patterns`` has a group
    ``value``: only this group is replaced.
    """

    accounts: frozenset[str]
    hosts: frozenset[str]
    models: frozenset[str]
    public_path_pattern: str
    networks: Texts
    serial_keys: frozenset[str]
    schema_keys: frozenset[str]
    version_prefix_pattern: str
    name_patterns: Values
    number_patterns: Mapping[str, Texts]
    value_patterns: Mapping[str, Texts]


class Span(NamedTuple):
    """A part of a text, and the placeholder that replaces it."""

    start: int
    stop: int
    placeholder: str


Spans = Iterator[Span]


_DATA = read_toml(RedactionData, RECIPES / "doctor" / "redaction.toml")
# Hosts below a public domain are as public as the domain.
_PUBLIC_HOSTS = tuple(f".{host}" for host in _DATA.hosts)


class Redactor:
    """Replace private values; with ``paths`` also folders that are not the system's.

    Call ``learn`` with all texts before the first one is replaced. A text may say of a word that
    it is a key or a host; the word is then replaced in all texts, also where nothing says so.
    """

    def __init__(self, names: PrivateNames, *, paths: bool = False) -> None:
        self._paths = paths
        self._known: dict[str, str] = {}  # word in small letters → placeholder
        self._numbers = defaultdict[str, dict[object, int]](dict)  # of each kind
        self.counts: Counter[str] = Counter()
        """Placeholder → how often it replaced a text."""

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
        """Remember a node's name and the domains in that name, unless they are public."""
        if host.casefold() in _DATA.hosts or _parse_address(host):
            return

        self._know(host, "node", placeholder)

        domain = host.partition(".")[2].casefold()
        while "." in domain and not _is_public("host", domain):
            self._know(domain, "domain")
            domain = domain.partition(".")[2]

    def _know_model(self, model: str) -> None:
        """Remember a model's name or folder, unless it is public or looks like a plain word."""
        if _is_public("model", model):
            return

        placeholder = self._number("model", model)
        for name in (model, Path(model).name):
            if _is_distinctive(name):
                self._know(name, "model", placeholder)

    def _number(self, kind: str, value: object) -> str:
        """Return the placeholder of a value, such as ``user-1``; make one if there is none.

        The use of the placeholder is not counted in ``counts``.
        """
        numbers = self._numbers[kind]

        key = value.casefold() if isinstance(value, str) else value
        return f"{kind}-{numbers.setdefault(key, len(numbers) + 1)}"

    def learn(self, value: object, key: str = "") -> None:
        """Remember the secrets and names in a text, or in a value of JSON under a key."""
        text = _ANSI.sub("", str(value))
        values = self._named_values(text)

        is_secret = holds_secret(key) and not self._is_name(text)
        if is_secret:
            values = iter([("secret", 0, len(text))])

        for kind, start, stop in values:
            word = text[start:stop]
            if kind == "secret":
                # The password of USER:PASSWORD may stand alone elsewhere.
                password = word.partition(":")[2]
                for part in (word, password):
                    if len(part) >= _SHORT:
                        self._know(part, kind)

                continue

            is_named = kind in ("host", "user", "model")
            is_learned = is_named and _is_distinctive(word)

            # A plain word is not remembered: it is replaced only where a pattern names it.
            if is_learned and not self._known_placeholder(word):
                self._know(word, kind)

    def _is_name(self, word: str) -> bool:
        """Return whether a word is the name of a known user or node, or a public account.

        The login in a URL may be such a name instead of a token.
        """
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

    def _find_spans(self, text: str) -> Spans:
        """Yield the private parts of a text in order.

        These are the values that a pattern names and the folders, if these are replaced; between
        them known names and values that are recognised by their own form.
        """
        end = 0
        # An empty last span makes the loop search the rest of the text.
        text_end = Span(len(text), len(text), "")
        spans = [
            Span(start, stop, self._placeholder_for(kind, text[start:stop]))
            for kind, start, stop in self._named_values(text)
        ]
        if self._paths:
            spans += self._path_spans(text)

        for named in chain(_without_overlaps(spans), [text_end]):
            for match in self._whole_pattern.finditer(text, end, named.start):
                yield from self._spans_of_match(match)

            if named.placeholder:
                yield named
            end = named.stop

    def _named_values(self, text: str) -> Iterator[tuple[str, int, int]]:
        """Yield kind, start and end of each secret, and of each value that a pattern names."""
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

    def _path_spans(self, text: str) -> Spans:
        """Yield private paths; a path to an installed package only up to its environment.

        A path of the system, a server or a library names nobody.
        """
        for match in _PATH.finditer(text):
            path = match.group().rstrip(".")
            if not re.fullmatch(_DATA.public_path_pattern, path, re.IGNORECASE):
                private = _PACKAGES.split(path)[0]
                placeholder = self._number("path", private.rstrip("/"))

                start = match.start()
                yield Span(start, start + len(private), placeholder)

    @cached_property
    def _whole_pattern(self) -> re.Pattern[str]:
        """Return one pattern for all known names and all values with a form of their own.

        It has a group for each kind. Where several kinds match, the first group counts: names
        come before numbers.
        """
        forms = {kind: [form] for kind, form in _DATA.name_patterns.items()}
        longest_first = sorted(self._known, key=lambda word: (-len(word), word))
        forms["host"] = [self._known_form(word) for word in longest_first]
        forms["mac"] = [mac_form(str(key)) for key in self._numbers["mac"]]
        for kind, patterns in _DATA.number_patterns.items():
            forms.setdefault(kind, []).extend(patterns)

        # A kind without a form matches nothing.
        groups = [
            f"(?P<{kind}>{'|'.join((*patterns, _NOTHING))})"
            for kind, patterns in forms.items()
        ]
        return re.compile("|".join(groups), re.IGNORECASE)

    def _known_form(self, word: str) -> str:
        """Return the pattern of a known word.

        The word's kind decides which spellings match, and which signs may be beside the word.
        """
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
            # A word may also begin behind an escaped line feed: `\n` in a quoted text.
            form = rf"(?:(?<![A-Za-z0-9])|(?<=\\[nrt])){form}(?![A-Za-z0-9])"

        return form

    def value(self, value: Any, key: str = "") -> Any:
        """Return a value of JSON under ``key`` without private values."""
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
        """Return the placeholder of a value; a known value keeps that of its first kind."""
        return self._known_placeholder(value) or self._number(kind, value)

    def _counted(self, kind: str, value: str) -> str:
        placeholder = self._placeholder_for(kind, value)

        self.counts[placeholder] += 1
        return placeholder

    def _known_placeholder(self, word: str) -> str:
        """Return the placeholder of a known word in any spelling, "" for any other word.

        Dashes and underscores do not count: a host may be written without them.
        """
        small = word.casefold()
        if small in self._known:
            return self._known[small]

        bare = re.sub("[-_]", "", small)
        for spelling, placeholder in self._known.items():
            if re.sub("[-_]", "", spelling) == bare:
                return placeholder

        return ""

    def _spans_of_match(self, match: re.Match[str]) -> Spans:
        """Yield the private parts of a match of ``_whole_pattern``; there may be none."""
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
    ) -> Spans:
        """Yield the user of USER or USER@HOST, and the host if it is private.

        An address of mail at an unknown host is one span; ``root`` stays.
        """
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

    def _address_spans(self, match: re.Match[str]) -> Spans:
        """Yield a private IP address; no network mask, and no version of four numbers."""
        word = match.group()
        # A colon may be punctuation, as in `::2: no route`.
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
    """Return whether a word of a kind names nobody.

    Public are accounts of every system, hosts below public domains, models of the Hub, and what
    is no name at all.
    """
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


def _is_version(match: re.Match[str], text: str) -> bool:
    """Return whether four numbers are a version and no IPv4 address.

    A version of NCCL is recognised by its numbers, since tables show it without a word before it;
    another version by the words before it.
    """
    if _NCCL.fullmatch(text):
        return True

    if match.string.startswith("/", match.end()):  # a network
        return False

    begin = max(0, match.start() - _BEFORE)
    before = match.string[begin : match.start()]

    line = before.rpartition("\n")[2]
    prefix = _DATA.version_prefix_pattern
    return re.search(prefix, line, re.IGNORECASE) is not None


def _without_overlaps(spans: Iterable[Span]) -> Spans:
    """Yield spans in order; a span that begins within another one is cut to the part behind it."""
    end = 0
    in_order = sorted(spans, key=lambda span: (span.start, -span.stop))

    for span in in_order:
        if span.stop > end:
            yield span._replace(start=max(span.start, end))
            end = span.stop


def _is_distinctive(word: str) -> bool:
    """Return whether a name can be replaced everywhere: it is long and no word of a language."""
    has_sign = re.search(r"[\d_./-]", word) is not None
    return has_sign and len(word) >= _SHORT


def _dashed(address: _Address) -> str:
    """Return an address as names of hosts contain it: with dashes for dots."""
    return str(address).replace(".", "-")


def _parse_address(text: str) -> _Address | None:
    """Return a text as an IP address, None if it is not one.

    An IPv4 address that is mapped into IPv6 is returned as IPv4.
    """
    try:
        address = ip_address(text)
    except ValueError:
        return None

    if isinstance(address, IPv6Address):
        return address.ipv4_mapped or address

    return address


def _private_address(text: str) -> _Address | None:
    """Return a text as an IP address that names a machine, else None.

    Loopback, multicast and unspecified addresses and those of public networks name no machine.
    """
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
