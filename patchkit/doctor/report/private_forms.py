"""Know the forms of what names people and machines: one pattern for each kind. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from patchkit.doctor.report.address_names import FORM
from patchkit.paths import RECIPES
from patchkit.records import read_toml

SHORT = 6  # characters: a shorter name or key may be a part of any word
SERIAL_SIGN = r"[\"']?\s{0,3}[:=]\s{0,3}[\"']?"

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
