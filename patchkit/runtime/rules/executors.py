"""Choose what starts the ranks of a cluster in a release of vLLM; it may copy variables to them."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Annotated, Literal

from patchkit.errors import UsageError
from patchkit.runtime.rules.releases import check_range, within


@dataclass(frozen=True, slots=True, kw_only=True)
class Executor:
    """An executor in some releases of vLLM.

    ``switch`` is the rule that chooses it where it is not the default; ``copies`` what becomes of a
    worker's variables that begin with ``prefixes``: ``fills in`` keeps those that it has.
    """

    name: Literal["uni", "mp", "ray"]
    vllm: Annotated[str, check_range]
    copies: Literal["nothing", "overwrites", "fills in"]
    prefixes: tuple[str, ...]
    reason: str
    source: str
    switch: str = ""


def choose_executor(
    executors: Iterable[Executor],
    vllm: str,
    *,
    role: str,
    asked: str = "auto",
    wanted: AbstractSet[str] = frozenset(),
) -> Executor:
    """Return the executor that was asked for; ``auto`` is the first that the release has.

    Of several entries of one name the last that fits counts: what a switch among the ``wanted``
    rules chooses stands behind the default. Raises UsageError for one that the release lacks.
    """
    alone = role == "single"
    fits = [
        each
        for each in executors
        # uni serves a node alone; the others start ranks on several.
        if (each.name == "uni") is alone
        and within(vllm, each.vllm)
        and (not each.switch or each.switch in wanted)
    ]
    names = [each.name for each in fits]
    chosen = names[0] if alone or asked == "auto" else asked
    if chosen not in names:
        raise UsageError(
            f"vLLM {vllm} cannot use {chosen} on several nodes",
            hint=f"take --executor {names[0]}, or a later vLLM",
        )
    return [each for each in fits if each.name == chosen][-1]
