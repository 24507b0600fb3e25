"""Fill facts of the node and the checkpoint into rules about flags."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from patchkit.runtime.rules.flags import FlagRule
from patchkit.runtime.rules.presets import DRAFTING, find_recipe
from patchkit.runtime.serve.context import RECURRENT
from patchkit.runtime.serve.dense_layers import find_dense_layers
from patchkit.runtime.serve.request import ServeRequest

_FACT = re.compile(r"\{(\w+)\}")


def fill_rules(rules: Iterable[FlagRule], request: ServeRequest) -> Iterator[FlagRule]:
    """Yield the rules with their ``{facts}`` filled in; skip a rule with an unknown fact."""
    drafter = find_drafter(request)
    facts = {
        "nodes": str(request.node.nodes),
        "rank": str(request.number),
        "head": request.node.head,
        "host": request.host,
        "port": str(request.port),
        "master_port": str(request.master_port),
        "stacks": request.stacks,
        # Half of the time, so that the stacks are written before the server is killed. If it is
        # never killed, vLLM's own default of 300 s.
        "hung": str(request.frozen // 2 or 300),
        "watched": "/metrics" if request.frozen else "",
        "drafter": drafter.setting,
        # The blocks of the attention cache are multiples of 16 tokens.
        "match_unit": "16" if _is_recurrent(request) else "",
        "draft_head": "fp8" if _shares_plain_head(request, drafter) else "",
        **_dense_facts(request),
    }

    for rule in rules:
        names = _FACT.findall(rule.value + rule.reason)
        if all(map(facts.get, names)):
            is_other_drafter = rule.flag == DRAFTING and not drafter.is_default
            yield replace(
                rule,
                value=_FACT.sub(lambda fact: facts[fact[1]], rule.value),
                reason=_FACT.sub(lambda fact: facts[fact[1]], rule.reason),
                optional=rule.optional or is_other_drafter,
            )


def _is_recurrent(request: ServeRequest) -> bool:
    """Return whether flags of the preset or keys of the config are about Mamba or GDN layers."""
    preset = request.node.preset
    names = [flag.lstrip("-") for flag in (preset.flags if preset else ())]

    if request.checkpoint:
        names += request.checkpoint.config
    return any(name.startswith(RECURRENT) for name in names)


def _dense_facts(request: ServeRequest) -> dict[str, str]:
    """Return the facts about dense layers in 16 bits, each "" if there are none.

    ``dense`` is the flag's value to convert them; ``reads`` and ``less`` are the GB that are read
    for a token without and with the conversion.
    """
    checkpoint = request.checkpoint
    dense = checkpoint and find_dense_layers(checkpoint, request.node.nodes)
    if not checkpoint or not dense:
        return {"dense": "", "reads": "", "less": ""}

    return {
        "dense": dense.setting,
        "reads": f"{checkpoint.reads / 1e9:.3g}",
        "less": f"{(checkpoint.reads - dense.saved) / 1e9:.3g}",
    }


@dataclass(frozen=True, slots=True)
class Drafter:
    """A way of drafting: ``setting`` is the JSON for ``--speculative-config``, "" for none.

    ``is_default`` says that it is on unless the user turns it off.
    """

    setting: str
    is_default: bool


def find_drafter(request: ServeRequest) -> Drafter:
    """Return the drafter of the preset or, without a preset, of upstream's recipe."""
    preset = request.node.preset
    if preset:
        setting = str(preset.flags.get(DRAFTING) or "")
        return Drafter(setting or preset.drafter, is_default=bool(setting))

    recipe = find_recipe(request.model)
    return Drafter(recipe.drafter if recipe else "", is_default=False)


def _shares_plain_head(request: ServeRequest, drafter: Drafter) -> bool:
    """Return whether the drafter is on and shares the model's head, and the head is in 16 bits."""
    checkpoint = request.checkpoint
    if checkpoint is None or not checkpoint.has_plain_head:
        return False

    choice = request.choice
    is_on_by_default = drafter.is_default and "drafter" not in choice.unwanted
    if not is_on_by_default and "drafter" not in choice.wanted:
        return False

    # A drafter from a second checkpoint may have its own head.
    config: dict[str, object] = json.loads(drafter.setting or "{}")
    return config.get("method") == "mtp" and "model" not in config
