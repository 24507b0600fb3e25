"""Read which environment variables a release of vLLM or NCCL has, and those of other programs."""

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
    """A variable of neither vLLM nor NCCL.

    ``of`` is the project that reads it, in ``versions``; empty means all.
    """

    of: str
    meaning: str
    versions: str = ""


def variable_table(reader: str) -> Table:
    """Return the variables of all known releases of ``vllm`` or ``nccl``."""
    older = [_HOME / "vllm_older.tsv"] if reader == "vllm" else []
    return read_table(*older, _HOME / f"{reader}_variables.tsv")


def vllm_variables(version: str, home: Path | None = None) -> Mapping[str, str]:
    """Return name → default in a release, or in any release for "".

    With ``home``, return the names in that vLLM, with "" as default.
    """
    if home:
        return dict.fromkeys(variable_readers(home / "envs.py"), "")

    return variable_table("vllm").at(version)


@cache
def nccl_variables(version: str) -> Mapping[str, str]:
    """Return name → default in a release; a later release counts as the newest known one."""
    return variable_table("nccl").at(version)


@cache
def other_variables() -> Mapping[str, OtherVariable]:
    """Return the variables of Ray, torch, triton, and whatever else takes part in serving."""
    projects = read_toml(dict[str, dict[str, dict[str, str]]], _HOME / "variables.toml")
    return {
        name: OtherVariable(of=project, **row)
        for project, variables in projects.items()
        for name, row in variables.items()
    }


def lifetime(name: str) -> Lifetime | None:
    """Return the releases, of vLLM or of NCCL, that have or had a variable."""
    of_vllm = variable_table("vllm").lifetime(name)
    return of_vllm or variable_table("nccl").lifetime(name)
