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
from patchkit.runtime.net.plan import facts as network
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
    """Return what is wrong with each fact that is wrong, in words: name → ``it takes …``."""
    found = {}
    for name, value in facts.items():
        known = _KNOWN.get(name)
        if known is None:
            found[name] = "is no fact that this patchkit knows"
        elif not known[0](value):
            found[name] = f"takes {known[1]()}"
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


def _is_nodes(value: str) -> bool:
    return bool(_NUMBER.fullmatch(value)) and int(value) <= nodes_max()


def _is_address(value: str) -> bool:
    try:
        return str(IPv4Address(value)) == value
    except ValueError:
        return False


def _is_version(value: str) -> bool:
    try:
        return bool(_VERSION.fullmatch(value)) and bool(release(value))
    except UsageError:
        return False


def _is_preset(value: str) -> bool:
    preset = find(value)
    return preset is not None and preset.id == value


_Known = tuple[Callable[[str], bool], Callable[[], str]]


def _word(*words: str) -> _Known:
    return (lambda value: value in words), (lambda: ", ".join(words))


def _form(is_right: Callable[[str], bool], says: str) -> _Known:
    return is_right, (lambda: says)


_KNOWN: Mapping[str, _Known] = {
    "role": _word(*CHOICES["role"]),
    "topology": _word(*CHOICES["topology"]),
    "executor": _word(*CHOICES["executor"]),
    "target": _word(*CHOICES["target"]),
    "quantization": _word(*CHOICES["quantization"]),
    "format": _word(*Format),
    "vllm": _form(_is_version, "a version, such as 0.25.1"),
    "nccl": _form(_is_version, "a version, such as 2.30.7"),
    "head": _form(_is_address, "an IPv4 address"),
    "model": _form(_is_preset, "a model of `patchkit serve-args --list`"),
    "set": _form(lambda value: bool(_NAMES.fullmatch(value)), "names of variables"),
    "with": _form(lambda value: bool(_IDS.fullmatch(value)), "ids of rules"),
    "without": _form(lambda value: bool(_IDS.fullmatch(value)), "ids of rules"),
    "nodes": (_is_nodes, lambda: f"a number from 1 to {nodes_max()}"),
}
