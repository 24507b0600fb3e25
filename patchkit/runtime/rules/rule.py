"""Read the rules about variables, and select those that apply and that the user wants.

The head of recipes/env/rules.toml describes its fields.

Every entry has a condition and a source. A rule makes a setting while its condition is met. It is
on by default, or only if ``--with`` turns it on; ``--without`` turns it off. A condition is
``fact = value``, ``fact = [values]`` or, for versions and numbers, ``fact = range``.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import field, replace
from functools import cache
from typing import Annotated, ClassVar, Literal, TypeVar

from patchkit.digests import digest
from patchkit.errors import UsageError
from patchkit.finding import SINGLE_REPORT, Confidence, Established
from patchkit.frozen import Fields, Texts, Values, frozen
from patchkit.records import RECIPES, matching, read_toml
from patchkit.runtime.rules.releases import check_range, within
from patchkit.runtime.rules.spelling import nearest_hint
from patchkit.target import targets

_FACTS = RECIPES / "env" / "facts.toml"
CHOICES = read_toml(dict[str, Texts], _FACTS, key="choices")
CHOICES["target"] = (*targets(), "other")
_RANGES = read_toml(Texts, _FACTS, key="ranges")
_UNTOLD = "untold"  # a value in conditions: it is met if the fact is unknown

Names = Texts
"""Names of flags, variables, releases or kernels."""
Condition = Mapping[str, str | Names]
Situation = Values
Routes = Mapping[str, Names]
"""Kind of layers (the beginning of a description) → kernels they use: NAME, or NAME RANGE."""
VariableName = Annotated[str, matching("[A-Z][A-Za-z0-9_]*", "the name of a variable")]
FlagName = Annotated[
    str, matching(r"--[a-z0-9-]+(\.\w+)?", "a flag, written as --a-flag")
]


def is_met(when: Condition, situation: Situation) -> bool:
    """Return whether a situation meets a condition: all of its facts have to fit.

    An unknown fact fits only the value ``untold``.
    """
    for fact, values in when.items():
        value = situation.get(fact, "")
        if fact not in _RANGES:
            is_met_here = (value or _UNTOLD) in _alternatives(values)
        else:
            is_met_here = bool(value) and within(value, str(values))
        if not is_met_here:
            return False

    return True


def _alternatives(values: str | Names) -> Names:
    return (values,) if isinstance(values, str) else values


def check_condition(when: Condition) -> None:
    """Raise ValueError for an unknown fact or value, UsageError for a malformed range."""
    for fact, values in when.items():
        if fact in _RANGES and isinstance(values, str):
            check_range(values)
            continue

        known_values = {*CHOICES.get(fact, ()), _UNTOLD}
        for value in _alternatives(values):
            if fact not in CHOICES or value not in known_values:
                raise ValueError(f"{fact} = {value!r} means nothing")


def describe_condition(when: Condition) -> str:
    """Return a condition in one line: ``topology roce or ring, nccl >=2.30.7``."""
    parts = []
    for fact, values in when.items():
        words = " or ".join(_alternatives(values)).replace(_UNTOLD, "unknown")
        parts.append(f"{fact} {words}")

    return ", ".join(parts)


@frozen
class Grounded:
    """A statement that holds in the situations of ``when``, with its source.

    ``by_release`` maps a range of vLLM releases to another text for them. ``text_field`` is the
    name of the field that the text replaces.
    """

    text_field: ClassVar[str] = "reason"

    id: str
    when: Annotated[Condition, check_condition] = field(default_factory=dict)
    source: str
    evidence: Established
    confidence: Confidence
    by_release: Mapping[Annotated[str, check_range], str] = field(default_factory=dict)


@frozen
class Rule(Grounded):
    """A setting to make while ``when`` holds, and why.

    An ``optional`` rule is only on if the user turns it on by ``--with``.
    """

    reason: str
    routes: Routes = field(default_factory=dict)
    optional: bool = False
    guides: str = ""

    @property
    def default(self) -> bool:
        """Return whether the rule is on by default. One that rests on a single report is not."""
        return not self.optional and self.evidence != SINGLE_REPORT


@frozen
class Discouraged(Grounded):
    """A setting to leave out while ``when`` holds, and why.

    ``values`` is a regular expression of the values that it is about, "" for all values.
    """

    reason: str
    routes: Routes = field(default_factory=dict)
    values: str = ""
    guides: str = ""

    def matches(self, value: str) -> bool:
        return re.fullmatch(self.values or ".*", value) is not None


@frozen
class Advice(Grounded):
    """A problem to report while ``when`` holds, which no rule solves by a variable or a flag."""

    text_field: ClassVar[str] = "says"

    says: str
    instead: str


G = TypeVar("G", bound=Grounded)
R = TypeVar("R", bound=Rule)


def describe_routes(routes: Routes) -> str:
    """Return routes in one line: ``NVFP4 MoE: Marlin; FP8 linear per block: CUTLASS``."""
    parts = [f"{layers}: {', '.join(kernels)}" for layers, kernels in routes.items()]
    return "; ".join(parts)


def select_entries(entries: Iterable[G], situation: Situation) -> tuple[G, ...]:
    """Return the entries whose condition is met, with their texts for the situation's vLLM."""
    vllm = situation.get("vllm", "")

    return tuple(
        adapt_to_release(entry, vllm)
        for entry in entries
        if is_met(entry.when, situation)
    )


def adapt_to_release(entry: G, vllm: str) -> G:
    """Return an entry with its text for a release of vLLM, unchanged if the release is ""."""
    for bounds, text in entry.by_release.items():
        if vllm and within(vllm, bounds):
            changed: Fields = {entry.text_field: text}
            return replace(entry, **changed)

    return entry


@frozen
class RuleChoice:
    """The rules that a user turns on (``--with``) and off (``--without``), by id."""

    wanted: frozenset[str] = frozenset()
    unwanted: frozenset[str] = frozenset()

    def check(self, rules: Iterable[Rule], hint: str) -> None:
        """Raise UsageError for an id that no rule has.

        ``hint`` tells how to list the rules; it is used if no rule has a similar id.
        """
        ids = {rule.id for rule in rules}
        unknown = sorted((self.wanted | self.unwanted) - ids)
        if unknown:
            name = unknown[0]
            raise UsageError(
                f"no rule is called {name!r}", hint=nearest_hint(name, ids, hint)
            )

    def divide(self, rules: Sequence[R]) -> tuple[tuple[R, ...], tuple[R, ...]]:
        """Return two groups of rules: those that are on, and those that are off."""
        defaults = {rule.id for rule in rules if rule.default}
        active_ids = (defaults | self.wanted) - self.unwanted
        active = tuple(rule for rule in rules if rule.id in active_ids)
        return active, tuple(rule for rule in rules if rule.id not in active_ids)


BY_DEFAULT = RuleChoice()


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
