"""Return the environment variables of a release, and whose they are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import translate
from functools import cache
from pathlib import Path
from typing import Any

from patchkit.paths import RECIPES
from patchkit.records import read_toml
from patchkit.runtime.rules.releases import Lifetime, Table, read_table, release
from patchkit.runtime.rules.vllm_names import read_names

_HOME = RECIPES / "env"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Meaning:
    meaning: str
    versions: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherVariable(_Meaning):
    """A variable of neither vLLM nor NCCL; ``versions`` of ``of`` read it; empty means all."""

    of: str


def _vllm_table() -> Table:
    return read_table(_HOME / "vllm_older.tsv", _HOME / "vllm_variables.tsv")


def _nccl_table() -> Table:
    return read_table(_HOME / "nccl_variables.tsv")


def vllm_variables(version: str, home: Path | None = None) -> Mapping[str, str]:
    """Return name → default of a release, ``""`` for any; of an installed one, if given its folder.

    Raises UsageError for what is no version; SourceError if ``home`` holds no vLLM.
    """
    return read_names(home / "envs.py") if home else _vllm_table().at(version)


@cache
def nccl_variables(version: str) -> Mapping[str, str]:
    """Return name → default of a release (``2.29.7+cuda13.0``), ``""`` for any. Raises UsageError.

    Of a release after ``newest_nccl()`` it lists what that one has.
    """
    return _nccl_table().at(version)


def is_known_vllm(version: str) -> bool:
    """Return whether a release of vLLM is among those whose names are known, or between two."""
    return _vllm_table().oldest <= release(version) <= release(newest_vllm())


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
        name: OtherVariable(of=project, meaning=row.meaning, versions=row.versions)
        for project, variables in projects.items()
        for name, row in variables.items()
    }


def lifetime(name: str) -> Lifetime | None:
    """Return the releases, of vLLM or of NCCL, that have or had a variable."""
    return _vllm_table().lifetime(name) or _nccl_table().lifetime(name)


def is_current(known: Lifetime) -> bool:
    """Return whether the newest release that is known still has a name."""
    table = _vllm_table() if _vllm_table().lifetime(known.name) else _nccl_table()
    return known.last == table.newest


@cache
def _owned_names() -> re.Pattern[str]:
    owners = read_toml(dict[str, tuple[dict[str, Any], ...]], _HOME / "owners.toml")["owner"]
    return re.compile("|".join(translate(name) for row in owners for name in row["names"]))


def has_other_owner(name: str) -> bool:
    """Return whether it is known who else reads or sets a name, by patterns with ``*``."""
    return _owned_names().match(name) is not None
