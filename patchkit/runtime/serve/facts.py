"""Fill in what flags take from the node and the checkpoint; a rule without its fact is none."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from patchkit.runtime.rules.flags import FlagRule
from patchkit.runtime.rules.presets import DRAFTING, find_recipe
from patchkit.runtime.serve.dense import dense_layers
from patchkit.runtime.serve.request import ServeRequest

_FACT = re.compile(r"\{(\w+)\}")
_RECURRENT = (
    "mamba",
    "ssm_",
    "linear_",
)  # flags, and what configs say, of Mamba and GDN layers


def fill_rules(rules: Iterable[FlagRule], request: ServeRequest) -> Iterator[FlagRule]:
    """Yield the rules with ``{facts}`` in value and reason filled in, less those without one."""
    # What is known of the node, and what a checkpoint or the preset allows, else "".
    node, checkpoint, preset = request.node, request.checkpoint, request.node.preset
    (drafter, by_itself), choice = drafter_of(request), request.choice
    facts = dict.fromkeys(("dense", "reads", "less", "draft_head", "match_unit"), "")
    facts |= {"nodes": str(node.nodes), "rank": str(request.number), "head": node.head}
    facts |= {"host": request.host, "port": str(request.port)}
    facts["master_port"] = str(request.master_port)
    facts |= {"stacks": request.stacks, "drafter": drafter}
    # Stacks are there before the server is killed; without an end vLLM's own default.
    facts["hung"] = str(request.frozen // 2 or 300)
    facts["watched"] = "/metrics" if request.frozen else ""
    flags = preset.flags if preset else ()
    names = {
        name.lstrip("-")
        for name in (*flags, *(checkpoint.config if checkpoint else ()))
    }
    if any(name.startswith(_RECURRENT) for name in names):
        facts["match_unit"] = "16"  # what attention's blocks are multiples of
    drafting = json.loads(drafter or "{}")
    drafts = "drafter" in choice.wanted or (
        by_itself and "drafter" not in choice.unwanted
    )
    # With a second checkpoint the drafter may have a head of its own.
    shares = drafts and drafting.get("method") == "mtp" and "model" not in drafting
    if checkpoint and checkpoint.has_plain_head and shares:
        facts["draft_head"] = "fp8"
    if checkpoint and (dense := dense_layers(checkpoint, node.nodes)):
        reads = (checkpoint.reads, checkpoint.reads - dense.saved)
        facts["dense"] = dense.setting
        facts["reads"], facts["less"] = (f"{each / 1e9:.3g}" for each in reads)
    for rule in rules:
        if all(facts[name] for name in _FACT.findall(rule.value + rule.reason)):
            value, reason = (
                _FACT.sub(lambda fact: facts[fact[1]], text)
                for text in (rule.value, rule.reason)
            )
            optional = rule.optional or (rule.flag == DRAFTING and not by_itself)
            yield replace(rule, value=value, reason=reason, optional=optional)


def drafter_of(request: ServeRequest) -> tuple[str, bool]:
    """Return what drafts, "" for nothing, and whether it does so unless a user is without it."""
    preset, recipe = request.node.preset, find_recipe(request.model)
    asked = (preset and preset.flags.get(DRAFTING)) or ""
    known = preset.drafter if preset else recipe.drafter if recipe else ""
    return str(asked) or known, bool(asked)
