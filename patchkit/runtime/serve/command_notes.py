"""Write the notes on a command: about the model, its size, and what its flags mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from patchkit.finding import SINGLE_REPORT
from patchkit.quoting import quoted
from patchkit.records import read_json
from patchkit.runtime.rules.presets import DRAFTING, Preset, find_recipe, load_presets
from patchkit.runtime.rules.releases import within
from patchkit.runtime.rules.rule import Values
from patchkit.runtime.rules.secret_texts import find_code_risk
from patchkit.runtime.serve.request import ServeRequest

_SEQUENCES = "--max-num-seqs"
_BATCHED_TOKENS = "--max-num-batched-tokens"
_BLOCK_DRAFTERS = ("dflash", "dspark")  # each sequence drafts a block of tokens at once


def flag_notes(values: Values) -> Iterator[str]:
    """Yield notes on flags that make vLLM run code, and on drafting."""
    for name in values:
        if risk := find_code_risk(name):
            yield f"{name}: {risk}"

    drafting = read_json(dict[str, Any], values.get(DRAFTING, "{}"))
    if drafting:
        by = f" with the checkpoint {drafting['model']}" if "model" in drafting else ""
        yield f"it drafts{by}: faster, for code above all; --without drafter leaves it out"
        yield from _drafting_limit_notes(drafting, values)


def _drafting_limit_notes(drafting: Mapping[str, Any], values: Values) -> Iterator[str]:
    """Yield a note if too few tokens are batched for all sequences to draft (config/vllm.py)."""
    depth = drafting.get("num_speculative_tokens")
    if drafting.get("method") not in _BLOCK_DRAFTERS or not isinstance(depth, int):
        return
    sequences = _read_limit(values, _SEQUENCES)
    tokens = _read_limit(values, _BATCHED_TOKENS)
    if 0 < tokens < depth * sequences:
        yield (
            f"{tokens // depth} of {sequences} sequences are computed at once: "
            f"each drafts {depth} tokens, and {_BATCHED_TOKENS} is {tokens}"
        )


def _read_limit(values: Values, flag: str) -> int:
    text = values.get(flag, "")
    return int(text) if text.isdigit() else 0


def model_notes(request: ServeRequest) -> Iterator[str]:
    """Yield notes on the memory and the model."""
    yield from _weight_notes(request)

    vllm = request.node.vllm
    nodes = request.node.nodes
    preset = request.node.preset
    if preset is None:
        recipe = find_recipe(request.model)
        oldest = recipe.min_vllm if recipe else ""
        if recipe and oldest[:1].isdigit() and not within(vllm, f">={oldest}"):
            yield f"upstream's recipe of {recipe.id} takes vLLM {oldest} or newer"
        return

    yield from _preset_notes(preset, vllm)
    if request.weights and request.memory.gib and nodes < preset.nodes:
        place = "one Spark" if nodes == 1 else f"{nodes} Sparks"
        yield f"it fits {place}, and is meant for {preset.nodes}"


def _weight_notes(request: ServeRequest) -> Iterator[str]:
    """Yield notes on the source of the weights' size, and on the memory they must fit into."""
    weights = request.weights
    if request.node.preset is None and request.folder_gib is None:
        more = "" if weights else ", and whether it fits was not checked"
        yield f"{request.model} has no preset: these flags fit any model{more}"
        if request.model.startswith(("/", ".")):
            yield f"{request.model} is no folder with weights on this machine"
    elif weights is None:
        yield "whether it fits was not checked: nobody names the size of its weights"

    if weights and weights.from_name:
        yield f"at least {weights.gib:.0f} GiB of weights, by {weights.source}"
    if weights and request.memory.note:
        yield request.memory.note


def _preset_notes(preset: Preset, vllm: str) -> Iterator[str]:
    """Yield notes on what a preset needs, and on how well it is known to work."""
    if preset.build:
        yield f"served with {preset.build}; no release is known to do"
    if preset.measured_with and not within(vllm, f">={preset.measured_with}"):
        yield f"measured with vLLM {preset.measured_with}; that {vllm} serves it is upstream's word"
    if preset.variables:
        pairs = [f"{name}={value}" for name, value in preset.variables.items()]
        options = [word for pair in pairs for word in ("--set", pair)]
        if preset in load_presets():
            options = ["--model", preset.id]
        command = quoted("patchkit", "env", *options)
        yield f"the environment must hold {' '.join(pairs)}: `{command}` writes it"
    if preset.needs_token:
        yield f"{preset.id} needs its licence accepted at Hugging Face, and HF_TOKEN"
    if preset.evidence == SINGLE_REPORT:
        yield f"the preset rests on one report ({preset.source})"
    if preset.note:
        yield preset.note
