"""Read the rules about variables from ``recipes/env/rules.toml``; its head describes the fields."""

import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import field
from functools import cache
from typing import Annotated, Literal

from patchkit.digests import digest
from patchkit.errors import UsageError
from patchkit.frozen import Values, frozen
from patchkit.records import RECIPES, read_toml
from patchkit.runtime.rules.releases import check_range, within
from patchkit.runtime.rules.rule import Advice, Discouraged, Names, Rule, VariableName

CACHES = ".local/state/patchkit"
"""The folder of all caches, below a user's home."""

STACKS = f"{CACHES}/stacks"
"""The folder, below a user's home, for the stacks that hanging processes write."""

# Names of repositories at Hugging Face. They have no --, which is the slash in names of folders.
_REPO = re.compile(
    r"(?!.*--)[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII
)


@frozen
class VariableRule(Rule):
    """A rule that sets variables; their values may hold ``{facts}`` to fill in.

    While the rule is on, the rule with the id ``replaces`` is off.
    """

    set: Mapping[VariableName, str]
    scope: Literal["shared", "host"]
    replaces: str = ""

    @property
    def variables(self) -> Names:
        return tuple(self.set)


@frozen
class Avoid(Discouraged):
    """Variables that should not be set, and what to do ``instead``."""

    variables: tuple[VariableName, ...]
    severity: Literal["error", "warning", "note"]
    instead: str


@frozen
class VariableAdvice(Advice):
    """Advice on a problem that is solved if the variables of ``unless`` have these values.

    With severity ``note``, the finding does not make `check` fail.
    """

    severity: Literal["warning", "note"] = "warning"
    unless: Mapping[VariableName, str] = field(default_factory=dict)

    def solved(self, values: Values) -> bool:
        return bool(self.unless) and self.unless.items() <= values.items()


@frozen
class Executor:
    """An executor of vLLM, in the releases ``vllm``.

    ``switch`` is the id of the rule that turns it on, "" if it needs none. ``copies`` says what the
    head does to a worker's variables that begin with ``prefixes``: ``fills in`` sets only those
    that the worker does not have.
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
        """Return the variables that a rule sets for each node separately."""
        return frozenset(
            name for rule in self.rules if rule.scope == "host" for name in rule.set
        )


@cache
def load_variable_rules() -> VariableRules:
    """Return the contents of rules.toml. Raises UsageError, with file and line, if malformed."""
    return read_toml(VariableRules, RECIPES / "env" / "rules.toml")


def cache_folders(caches: str, vllm: str, model: str = "") -> Values:
    """Return the folders, below ``caches``, for what a release of vLLM compiles.

    The folder ``cache`` is for machine code that all models share, the folder ``graphs`` for what
    is compiled for ``model``: a repository, a path, or "" for a model that is not known.
    """
    folder = f"{caches}/vllm-{vllm}"
    graphs = folder
    if _REPO.fullmatch(model):
        # Named as huggingface_hub names the folder of a repository.
        graphs += f"/models/{model.replace('/', '--')}"
    elif model:
        end = model.rstrip("/").rpartition("/")[2]
        plain_end = re.sub(r"[^A-Za-z0-9_.-]+", "_", end).lstrip(".-")
        # The digest of the path tells two paths with the same end apart.
        graphs += f"/models/{plain_end[:60]}--{digest(model)[:12]}"

    return {"cache": folder, "graphs": graphs}


def cache_variables(caches: str, vllm: str, model: str = "") -> dict[str, str]:
    """Return the variables that make a release of vLLM use the folders of ``cache_folders``."""
    (rule,) = (rule for rule in load_variable_rules().rules if rule.id == "caches")

    folders = cache_folders(caches, vllm, model)
    return {name: value.format(**folders) for name, value in rule.set.items()}


def choose_executor(
    vllm: str, role: str, requested: str, wanted: AbstractSet[str]
) -> Executor:
    """Return the requested executor, or for ``auto`` the first one that the release can use.

    A node alone (``role`` is ``single``) always gets the executor for one node. ``wanted`` are the
    ids of rules that the user turns on. Raises UsageError if the release cannot use the requested
    executor.
    """
    is_alone = role == "single"
    fitting: dict[str, Executor] = {}

    for executor in load_variable_rules().executors:
        # uni is for a node alone; the other executors start ranks on several nodes.
        serves_role = (executor.name == "uni") is is_alone

        is_switched_on = not executor.switch or executor.switch in wanted
        if serves_role and is_switched_on and within(vllm, executor.vllm):
            # In the file, an executor with a switch follows the one without a switch and of the
            # same name, so it replaces that one here.
            fitting[executor.name] = executor

    first = next(iter(fitting))
    chosen = first if is_alone or requested == "auto" else requested
    if chosen not in fitting:
        raise UsageError(
            f"vLLM {vllm} cannot use {chosen} on several nodes",
            hint=f"take --executor {first}, or a later vLLM",
        )
    return fitting[chosen]
