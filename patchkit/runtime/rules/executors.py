"""Which executor starts the ranks of a cluster, in a release of vLLM."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from patchkit.errors import UsageError
from patchkit.runtime.rules.releases import within
from patchkit.runtime.rules.variable_rules import Executor, VariableRules


def choose_executor(
    rules: VariableRules,
    vllm: str,
    *,
    role: str,
    asked: str = "auto",
    wanted: AbstractSet[str] = frozenset(),
) -> Executor:
    """The executor that was asked for; ``auto`` is the first that the release has.

    Of several entries of one name the last that fits counts: what a switch among the ``wanted``
    rules chooses stands behind the default. Raises UsageError for one that the release lacks.
    """
    alone = role == "single"
    fits = [
        each
        for each in rules.executors
        if (each.name == "uni") is alone
        and within(vllm, each.vllm)
        and (not each.switch or each.switch in wanted)
    ]
    names = list(dict.fromkeys(each.name for each in fits))
    chosen = names[0] if alone or asked == "auto" else asked
    if chosen not in names:
        raise UsageError(
            f"vLLM {vllm} cannot use {chosen} on several nodes",
            hint=f"take --executor {names[0]}, or a later vLLM",
        )
    return [each for each in fits if each.name == chosen][-1]
