"""Return the environment variables of a release, and the right name for a misspelt one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import translate
from functools import cache
from pathlib import Path

from patchkit.paths import RECIPES
from patchkit.records import read_toml
from patchkit.runtime.rules.lifetimes import Lifetime, Table, read_table
from patchkit.runtime.rules.releases import release
from patchkit.runtime.rules.vllm_names import read_names
from patchkit.runtime.rules.vllm_values import Takes, read_values

_HOME = RECIPES / "env"
# How alike two names have to be, from 0 to 1, for one to be a misspelling of the other.
_ALIKE = 0.7
_LONGEST = 100  # characters; no name is half as long, and difflib takes quadratic time


@dataclass(frozen=True, slots=True, kw_only=True)
class _Meaning:
    meaning: str
    versions: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherVariable(_Meaning):
    """A variable of neither vLLM nor NCCL; ``versions`` of ``of`` read it; empty means all."""

    name: str
    of: str


def vllm_variables(version: str, home: Path | None = None) -> Mapping[str, str]:
    """Return name → default of a release, ``""`` for any; of an installed one, if given its folder.

    Raises UsageError for what is no version; SourceError if ``home`` holds no vLLM.
    """
    return read_names(home / "envs.py") if home else _vllm_table().at(version)


def is_known_vllm(version: str) -> bool:
    """Return whether a release of vLLM is among those whose names are known, or between two."""
    return _vllm_table().oldest <= release(version) <= release(_vllm_table().newest)


def vllm_values(version: str, home: Path | None = None) -> Mapping[str, Takes]:
    """Return name → the values that a release takes; of an installed one, if given its folder.

    Names that take anything are left out, and of releases before the oldest supported one nothing
    is known. ``""`` is any release: what one of them takes. Raises as ``vllm_variables``.
    """
    if home:
        return read_values(home)
    if not version:
        return _by_any_release()
    known = _values_table().at(version) if release(version) >= _values_table().oldest else {}
    return {name: Takes.parse(text) for name, text in known.items()}


@cache
def _by_any_release() -> Mapping[str, Takes]:
    found: dict[str, Takes] = {}
    for row, _first, _last in _values_table().rows:
        takes = Takes.parse(row.default)
        found[row.name] = found[row.name] | takes if row.name in found else takes
    return found


def values_by_release(name: str) -> list[tuple[str, str, Takes]]:
    """Return first and last release, and what a variable takes in these; the oldest first."""
    rows = (row for row, _, _ in _values_table().rows if row.name == name)
    return [(row.first, row.last, Takes.parse(row.default)) for row in rows]


@cache
def nccl_variables(version: str) -> Mapping[str, str]:
    """Return name → default of a release (``2.29.7+cuda13.0``), ``""`` for any. Raises UsageError.

    Of a release after ``newest_nccl()`` it lists what that one has.
    """
    return _nccl_table().at(version)


def newest_vllm() -> str:
    """Return the newest release of vLLM whose variables are known."""
    return _vllm_table().newest


def newest_nccl() -> str:
    """Return the last release whose names are known."""
    return _nccl_table().newest


@cache
def other_variables() -> Mapping[str, OtherVariable]:
    """Return the variables of Ray, torch, triton, and whatever else takes part in serving."""
    projects = read_toml(dict[str, dict[str, _Meaning]], _HOME / "variables.toml")
    return {
        name: OtherVariable(name=name, of=project, meaning=each.meaning, versions=each.versions)
        for project, variables in projects.items()
        for name, each in variables.items()
    }


def lifetime(name: str) -> Lifetime | None:
    """Return the releases, of vLLM or of NCCL, that have or had a variable."""
    return _vllm_table().lifetime(name) or _nccl_table().lifetime(name)


def is_current(known: Lifetime) -> bool:
    """Return whether the newest release that is known still has a name."""
    table = _vllm_table() if _vllm_table().lifetime(known.name) else _nccl_table()
    return known.last == table.newest


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the name that was meant, ``""`` if none is like it.

    Only what follows the prefix counts: all names of NCCL are alike in their first five letters.
    """
    if len(name) > _LONGEST:
        return ""
    upper = name.upper()
    prefix = upper.partition("_")[0] + "_"
    whole = {each.upper(): each for each in names}
    tails = {
        key.removeprefix(prefix): each for key, each in whole.items() if key.startswith(prefix)
    }
    wanted, among = (upper.removeprefix(prefix), tails) if tails else (upper, whole)
    from difflib import get_close_matches  # seldom needed, and slow to load

    found = get_close_matches(wanted, among, n=1, cutoff=_ALIKE)
    return among[found[0]] if found else ""


def _vllm_table() -> Table:
    return read_table(_HOME / "vllm_older.tsv", _HOME / "vllm_variables.tsv")


def _values_table() -> Table:
    return read_table(_HOME / "vllm_values.tsv")


def _nccl_table() -> Table:
    return read_table(_HOME / "nccl_variables.tsv")


@dataclass(frozen=True, slots=True, kw_only=True)
class NameOwner:
    """Who sets or reads some names, by patterns in which ``*`` is any text."""

    names: tuple[str, ...]
    of: str
    source: str


@cache
def _owner_patterns() -> tuple[tuple[re.Pattern[str], str], ...]:
    owners = read_toml(dict[str, tuple[NameOwner, ...]], _HOME / "owners.toml")["owner"]
    return tuple((re.compile("|".join(map(translate, each.names))), each.of) for each in owners)


def name_owner(name: str) -> str:
    """Return who else reads or sets a name; empty if that is not known."""
    return next((of for pattern, of in _owner_patterns() if pattern.match(name)), "")
