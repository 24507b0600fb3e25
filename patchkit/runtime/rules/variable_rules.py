"""Read rules about variables: ``recipes/env/rules.toml``, whose head describes the fields."""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import field
from functools import cache
from typing import Annotated, Literal

from patchkit.digests import digest
from patchkit.errors import UsageError
from patchkit.frozen import frozen
from patchkit.records import RECIPES, read_toml
from patchkit.runtime.rules.releases import check_range, within
from patchkit.runtime.rules.rule import (
    Advice,
    Discouraged,
    Names,
    Rule,
    Values,
    VariableName,
)

CACHES = ".local/state/patchkit"
"""The folder of all caches below a user's home, where systemd 254 has a StateDirectory=."""

STACKS = f"{CACHES}/stacks"
"""The folder of what hanging processes write, there."""

# As the Hub has them; -- stands for the slash in a folder's name, as in the Hub's own cache.
_REPO = re.compile(
    r"(?!.*--)[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII
)


@frozen
class VariableRule(Rule):
    """Variables, whose values may hold ``{facts}``; while it is on, ``replaces`` is off."""

    set: Mapping[VariableName, str]
    scope: Literal["shared", "host"]
    replaces: str = ""

    @property
    def variables(self) -> Names:
        return tuple(self.set)


@frozen
class Avoid(Discouraged):
    """Variables that should not be set; ``instead`` is what to do."""

    variables: tuple[VariableName, ...]
    severity: Literal["error", "warning", "note"]
    instead: str


@frozen
class VariableAdvice(Advice):
    """Advice on a problem that is solved where ``unless`` is set; as a note it refuses no file."""

    severity: Literal["warning", "note"] = "warning"
    unless: Mapping[VariableName, str] = field(default_factory=dict)

    def solved(self, values: Values) -> bool:
        return bool(self.unless) and self.unless.items() <= values.items()


@frozen
class Executor:
    """An executor in some releases of vLLM.

    ``switch`` is the rule that chooses it where it is not the default. ``copies`` says what the
    head does to a worker's variables that begin with ``prefixes``: ``fills in`` keeps those that
    the worker has.
    """

    name: Literal["uni", "mp", "ray"]
    vllm: Annotated[str, check_range]
    copies: Literal["nothing", "overwrites", "fills in"]
    prefixes: Names
    reason: str
    source: str
    switch: str = ""


@frozen
class VariableRules:
    rules: tuple[VariableRule, ...] = field(metadata={"key": "rule"})
    avoids: tuple[Avoid, ...] = field(metadata={"key": "avoid"})
    advice: tuple[VariableAdvice, ...]
    executors: tuple[Executor, ...] = field(metadata={"key": "executor"})

    @property
    def entries(self) -> tuple[VariableRule | Avoid, ...]:
        """Return the rules and the advice against variables."""
        return (*self.rules, *self.avoids)

    @property
    def of_host(self) -> frozenset[str]:
        """Return the variables that some rule sets for each node by itself."""
        return frozenset(
            name for rule in self.rules if rule.scope == "host" for name in rule.set
        )


@cache
def load_variable_rules() -> VariableRules:
    """Return the rules. Raises UsageError, with file and line, for a wrong entry."""
    return read_toml(VariableRules, RECIPES / "env" / "rules.toml")


def cache_folders(caches: str, vllm: str, model: str = "") -> dict[str, str]:
    """Return the folders for what a release compiles, below ``caches``.

    ``cache`` is for machine code, which models share; ``graphs`` for what is compiled of ``model``,
    a repository or a path, "" for a model that is not known.
    """
    folder = f"{caches}/vllm-{vllm}"
    graphs = folder
    if _REPO.fullmatch(model):
        # As the Hub's folders have a repository.
        graphs += f"/models/{model.replace('/', '--')}"
    elif model:
        end = model.rstrip("/").rpartition("/")[2]
        plain_end = re.sub(r"[^A-Za-z0-9_.-]+", "_", end).lstrip(".-")
        # Two paths may have the same end.
        graphs += f"/models/{plain_end[:60]}--{digest(model)[:12]}"

    return {"cache": folder, "graphs": graphs}


def cache_variables(caches: str, vllm: str, model: str = "") -> dict[str, str]:
    """Return the variables that keep what a release compiles in ``cache_folders``."""
    (rule,) = (rule for rule in load_variable_rules().rules if rule.id == "caches")

    folders = cache_folders(caches, vllm, model)
    return {name: value.format(**folders) for name, value in rule.set.items()}


def choose_executor(
    vllm: str, role: str, requested: str, wanted: AbstractSet[str]
) -> Executor:
    """Return the requested executor, or for ``auto`` the first of the release.

    Raises UsageError if the release cannot use the requested executor.

    ``wanted`` are the ids of rules that the user turns on.
    """
    is_alone = role == "single"
    fitting: dict[str, Executor] = {}

    for executor in load_variable_rules().executors:
        # uni serves a node alone; the others start ranks on several.
        serves_role = (executor.name == "uni") is is_alone

        is_switched_on = not executor.switch or executor.switch in wanted
        if serves_role and is_switched_on and within(vllm, executor.vllm):
            # The executor of a switch stands behind the default of the same name, and counts.
            fitting[executor.name] = executor

    first = next(iter(fitting))
    chosen = first if is_alone or requested == "auto" else requested
    if chosen not in fitting:
        raise UsageError(
            f"vLLM {vllm} cannot use {chosen} on several nodes",
            hint=f"take --executor {first}, or a later vLLM",
        )
    return fitting[chosen]
