"""Know the forms of secrets and of what names a machine: one pattern for each kind. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from patchkit.paths import RECIPES
from patchkit.records import read_toml
from patchkit.runtime.report.address_names import FORM
from patchkit.runtime.rules.sensitive_names import is_secret, secret_forms

SHORT = 6  # characters: a shorter name or key may be a part of any word

_VALUE = r"""(?:"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[^\s,;"'}\])]+)"""
_FLAG = r"--[a-z-]*(?:api-key|token|password|secret)[= ]+"
_BEARER = r"\bAuthorization[\"']?\s{0,3}[=:]\s{0,3}[\"']?(?:(?:Bearer|Basic)\s+)?|\bBearer\s+"
_WHOLE_LINE = re.compile(r"[ \t]*(?:export[ \t]+|Environment=)?([A-Za-z_]\w*)=(.*)")
_LOGIN = r"://[^\s/@:\"'<>]{0,100}:([^\s/@\"'<>]{1,200})@"
_QUERY = r"(?<=[?&])(?:[\w-]*(?:token|key|secret|sig|signature)|X-Amz-\w+)"
_PLAIN = (
    ("pem", r"-----BEGIN [A-Z ]{0,40}KEY-----[\s\S]*?(?:-----END [A-Z ]{0,40}KEY-----|\Z)"),
    ("url", r"(?<=://)[^\s/@\"'<>]{1,300}@"),
    ("query", rf"{_QUERY}=[^&\s\"'<>]+"),
    ("bearer", rf"(?:{_BEARER})[\w.~+/=-]{{{SHORT},}}"),
)
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
    ("address", FORM),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedactionData:
    """What recipes/doctor/redaction.toml holds."""

    accounts: frozenset[str]
    hosts: frozenset[str]
    tokens: tuple[str, ...]
    secrets: frozenset[str]
    no_secrets: frozenset[str]
    serials: frozenset[str]
    versions: str


@cache
def redaction_data() -> RedactionData:
    return read_toml(RedactionData, RECIPES / "doctor" / "redaction.toml")


def holds_secret(name: str) -> bool:
    """Return whether a variable, or a key of JSON, holds a secret."""
    data = redaction_data()
    known = is_secret(name) or name.casefold() in data.secrets
    return known and name.upper() not in data.no_secrets


@cache
def assigned() -> str:
    """Return the pattern of what sets a secret, up to its value."""
    words = (each.replace("*", "[A-Za-z0-9_]*") for each in secret_forms())
    names = "|".join([*words, *map(re.escape, sorted(redaction_data().secrets))])
    return rf"(?<![A-Za-z0-9_])(?:{names})[\"']?\s{{0,3}}[=:]\s{{0,3}}"


def named_secrets(text: str) -> Iterator[str]:
    """Yield the values of secrets that a text names: of variables, flags and headers."""
    for line in text.splitlines():
        # To the end of the line: such a value may hold blanks, quotes and further = signs.
        if (whole := _WHOLE_LINE.match(line)) and holds_secret(whole[1]):
            yield whole[2].strip().strip("\"'")
    for match in re.finditer(rf"({assigned()})({_VALUE})", text, re.IGNORECASE):
        if holds_secret(first_word(match[1])):
            yield _bare(match[2])
    for match in re.finditer(rf"(?:{_FLAG})({_VALUE})", text, re.IGNORECASE):
        yield _bare(match[1])
    for form in (rf"(?:{_BEARER})([\w.~+/=-]{{{SHORT},}})", _LOGIN, rf"{_QUERY}=([^&\s\"'<>]+)"):
        for match in re.finditer(form, text, re.IGNORECASE):
            yield match[1]


def _bare(value: str) -> str:
    """Return a value without its quotes, or without the sign that ends a sentence after it."""
    return value.strip("\"'") if value[:1] in "\"'" else value.rstrip(":.!?>")


def first_word(text: str) -> str:
    """Return the name that a text begins with."""
    return re.split(r"[^A-Za-z0-9_-]", text, maxsplit=1)[0]


def private_pattern(known: Mapping[str, str]) -> re.Pattern[str]:
    """Return one pattern for everything; its groups are the kinds. ``known`` is name → kind.

    Where two kinds begin at one place, the first one counts: secrets before names before numbers.
    """
    secrets = _longest_first(each for each, kind in known.items() if kind == "secret")
    values = "|".join([*map(re.escape, secrets), _VALUE])
    data = redaction_data()
    serials = "|".join(map(re.escape, sorted(data.serials - {"uuid"}))).replace("_", "[ _]")
    words = "|".join(_bounded(each, known[each]) for each in _longest_first(known)) or "(?!)"
    kinds = (
        *_PLAIN,
        ("token", f"(?<![A-Za-z0-9])(?:{'|'.join(data.tokens)})"),
        ("flag", f"(?:{_FLAG})(?:{values})"),
        ("assigned", f"{assigned()}(?:{values})"),
        *_NAMES,
        ("known", words),
        ("serial", rf"\b(?:{serials})[\"']?\s{{0,3}}[:=]\s{{0,3}}[\"']?[\w.-]{{4,}}"),
        *_NUMBERS,
    )
    return re.compile("|".join(f"(?P<{kind}>{form})" for kind, form in kinds), re.IGNORECASE)


def after_sign(kind: str, text: str) -> int:
    """Return where the value begins in a text of a kind that has a name before it."""
    heads = {"assigned": assigned(), "flag": _FLAG, "bearer": _BEARER, "query": "[^=]*="}
    match = re.match(heads.get(kind, r"[^:=]*[:=]\s*[\"']?"), text, re.IGNORECASE)
    return match.end() if match else 0


def _longest_first(words: Iterable[str]) -> list[str]:
    return sorted(words, key=lambda each: (-len(each), each))


def _bounded(word: str, kind: str) -> str:
    """Return the pattern of a known word: a short one may be a part of others."""
    if kind == "address":
        return rf"(?<![\d.]){re.escape(word)}(?!\.?\d)"
    if len(word) >= SHORT:
        return re.escape(word)
    return rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])"
