"""Check the facts in the first line of an env file: a file comes from elsewhere and is a claim.

Every fact that `patchkit env` writes has a pattern of its own here; another name or another form is
a problem, so that nothing of a file is taken over unread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from ipaddress import IPv4Address

from patchkit.errors import SourceError, UsageError
from patchkit.runtime.envfile.syntax import Format
from patchkit.runtime.host.hardware import network_facts as network
from patchkit.runtime.rules.condition import CHOICES
from patchkit.runtime.rules.presets import find
from patchkit.runtime.rules.releases import release

_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+_!-]*", re.ASCII)
_NAMES = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(,[A-Za-z_][A-Za-z0-9_]*)*")
_IDS = re.compile(r"[a-z0-9][a-z0-9-]*(,[a-z0-9][a-z0-9-]*)*")
_NUMBER = re.compile(r"[1-9][0-9]{0,5}")


def nodes_max() -> int:
    """Return how many nodes a cluster may have, by recipes/env/network.toml."""
    return int(network()["plan"]["nodes_max"])


def fact_problems(facts: Mapping[str, str]) -> dict[str, str]:
    """Return what is wrong with each fact that is wrong, in words: name → ``takes …``."""
    found = {}
    for name, value in facts.items():
        is_right, form = _FORMS.get(name, (None, ""))
        if is_right is None:
            found[name] = "is not a fact that this patchkit knows"
        elif not is_right(value):
            found[name] = f"takes {form}"
    return found


def check_facts(facts: Mapping[str, str], where: str) -> None:
    """Raise SourceError for a fact that is unknown, or is not as `patchkit env` writes it."""
    if problems := fact_problems(facts):
        shown = "; ".join(
            f"{name}={facts[name][:60]}: {name} {problems[name]}" for name in problems
        )
        raise SourceError(
            f"{where}:1: {shown}",
            why="the first line was edited, or another patchkit wrote it",
            hint="write the file anew with `patchkit env`, with the same patchkit on every node",
        )


def _is_address(value: str) -> bool:
    try:
        # In its one spelling, as the two nodes compare it as text.
        return str(IPv4Address(value)) == value
    except ValueError:
        return False


def _is_known_version(value: str) -> bool:
    try:
        return bool(_VERSION.fullmatch(value)) and bool(release(value))
    except UsageError:
        return False


def _is_preset(value: str) -> bool:
    preset = find(value)
    return preset is not None and preset.id == value


def _match_form(form: re.Pattern[str]) -> Callable[[str], bool]:
    return lambda value: form.fullmatch(value) is not None


_WORDS = {
    **{name: CHOICES[name] for name in ("role", "topology", "twin", "executor")},
    **{name: CHOICES[name] for name in ("target", "quantization")},
    "format": tuple(Format),
}
_FORMS: Mapping[str, tuple[Callable[[str], bool], str]] = {
    **{name: (words.__contains__, ", ".join(words)) for name, words in _WORDS.items()},
    "vllm": (_is_known_version, "a version, such as 0.25.1"),
    "nccl": (_is_known_version, "a version, such as 2.30.7"),
    "nodes": (
        lambda value: bool(_NUMBER.fullmatch(value)) and int(value) <= nodes_max(),
        f"a number from 1 to {nodes_max()}",
    ),
    "head": (_is_address, "an IPv4 address"),
    "model": (_is_preset, "a model of `patchkit serve-args --list`"),
    "set": (_match_form(_NAMES), "names of variables"),
    "with": (_match_form(_IDS), "ids of rules"),
    "without": (_match_form(_IDS), "ids of rules"),
}
