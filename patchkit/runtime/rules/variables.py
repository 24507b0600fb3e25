"""Read which environment variables releases of vLLM and NCCL have, and those of other programs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from patchkit.frozen import frozen
from patchkit.records import RECIPES, read_toml
from patchkit.runtime.rules.releases import Lifetime, Table, read_table
from patchkit.runtime.rules.vllm_names import variable_readers

_HOME = RECIPES / "env"


@frozen
class OtherVariable:
    """A variable that neither vLLM nor NCCL defines.

    ``of`` is the project that reads it; ``versions`` is the range of that project's versions that
    do, "" for all.
    """

    of: str
    meaning: str
    versions: str = ""


def variable_table(reader: str) -> Table:
    """Return the variables of all known releases of ``vllm`` or ``nccl``."""
    older = [_HOME / "vllm_older.tsv"] if reader == "vllm" else []
    return read_table(*older, _HOME / f"{reader}_variables.tsv")


def vllm_variables(version: str, home: Path | None = None) -> Mapping[str, str]:
    """Return name → default in a release; for "", the names of all releases.

    With ``home``, return the names in the vLLM in that folder, each with the default "".
    """
    if home:
        return dict.fromkeys(variable_readers(home / "envs.py"), "")

    return variable_table("vllm").at(version)


@cache
def nccl_variables(version: str) -> Mapping[str, str]:
    """Return name → default in a release; for "", the names of all releases.

    A release later than the table counts as the newest one in it.
    """
    return variable_table("nccl").at(version)


@cache
def other_variables() -> Mapping[str, OtherVariable]:
    """Return the variables of Ray, torch, triton and other software that takes part in serving."""
    projects = read_toml(dict[str, dict[str, dict[str, str]]], _HOME / "variables.toml")
    return {
        name: OtherVariable(of=project, **row)
        for project, variables in projects.items()
        for name, row in variables.items()
    }


def lifetime(name: str) -> Lifetime | None:
    """Return the first and the last release, of vLLM or else NCCL, that have a variable.

    Return None for another variable.
    """
    of_vllm = variable_table("vllm").lifetime(name)
    return of_vllm or variable_table("nccl").lifetime(name)
