"""Write the notes on a command: model, size, context, flags, and what its first start compiles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from patchkit.finding import SINGLE_REPORT
from patchkit.foreign import whole_number
from patchkit.frozen import Values
from patchkit.quoting import quoted
from patchkit.records import read_json
from patchkit.runtime.host.host import FlashInfer
from patchkit.runtime.node.decision import Node
from patchkit.runtime.rules.presets import (
    DRAFTING,
    Preset,
    find_recipe,
    load_flag_rules,
)
from patchkit.runtime.rules.releases import within
from patchkit.runtime.rules.rule import Advice, select_entries
from patchkit.runtime.rules.secret_texts import find_code_risk
from patchkit.runtime.serve.compiled_modules import MODULES, Call, Module
from patchkit.runtime.serve.dense_layers import find_dense_layers
from patchkit.runtime.serve.request import Fit, ServeRequest
from patchkit.target import targets
from patchkit.units import BYTES_PER_GIB

LENGTH = "--max-model-len"
CACHE_TYPE = "--kv-cache-dtype"
_FULL = "full_attention"
_LENGTH_DIGITS = 15  # digits of a number of tokens; no model has that many tokens

# Beginnings of keys in configs of models whose cache is compressed, shared, or of a fixed size.
_OTHER_CACHE = ("compress", "index_", "hybrid", "num_kv_shared")
RECURRENT = ("mamba", "ssm_", "linear_")


def flag_notes(values: Values) -> Iterator[str]:
    """Yield notes on flags that make vLLM run code, and on drafting."""
    for name in values:
        if risk := find_code_risk(name):
            yield f"{name}: {risk}"

    drafting = read_json(dict[str, Any], values.get(DRAFTING, "{}"))
    if drafting:
        by = f" with the checkpoint {drafting['model']}" if "model" in drafting else ""
        yield f"it drafts{by}: faster, for code above all; --without drafter leaves it out"


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

    yield from _preset_notes(preset)
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


def _preset_notes(preset: Preset) -> Iterator[str]:
    """Yield notes on what a preset needs, and on how well it is known to work."""
    if preset.build:
        yield f"served with {preset.build}; no release is known to do"
    if preset.variables:
        pairs = [f"{name}={value}" for name, value in preset.variables.items()]
        command = quoted("patchkit", "env", "--model", preset.id)
        yield f"the environment must hold {' '.join(pairs)}: `{command}` writes it"
    if preset.needs_token:
        yield f"{preset.id} needs its licence accepted at Hugging Face, and HF_TOKEN"
    if preset.evidence == SINGLE_REPORT:
        yield f"the preset rests on one report ({preset.source})"
    if preset.note:
        yield preset.note


def speed_notes(request: ServeRequest, flags: Values) -> Iterator[str]:
    """Yield a note with the most tokens per second for one stream, if the figures are known."""
    preset = request.node.preset
    checkpoint = request.checkpoint
    prefix = ""
    read_gb = 0.0
    if checkpoint and checkpoint.reads:
        read_bytes = checkpoint.reads
        dense = find_dense_layers(checkpoint, request.node.nodes)
        if dense and flags.get("--quantization-config") == dense.setting:
            read_bytes -= dense.saved
        read_gb = read_bytes / 1e9
    elif preset and preset.reads_gb:
        prefix = "at least "
        read_gb = preset.reads_gb

    device = targets().get(request.node.target)
    if not (read_gb and device and device.bandwidth):
        return

    # Only tensor parallelism adds bandwidth: the nodes of a pipeline read one after the other.
    nodes = int(flags.get("--tensor-parallel-size", 1))
    speed = device.bandwidth * nodes
    place = f"{nodes} nodes" if nodes > 1 else "one node"
    alone = " without drafting" if "--speculative-config" in flags else ""
    yield (
        f"at most {speed / read_gb:.3g} tok/s for one stream{alone} on {place}: {prefix}"
        f"{read_gb:.3g} GB of weights are read for each token, at {speed} GB/s; its context's "
        "cache adds to that"
    )


def asked_modules(node: Node, flags: Values) -> tuple[Module, ...]:
    """Return the modules that vLLM asks for; none for a build that is no release."""
    if node.preset and node.preset.build:
        return ()
    return select_entries(MODULES.module, {**node.situation, **flags})


def _missing_modules(node: Node, modules: Iterable[Module]) -> list[Module]:
    """Return the modules that are not compiled, as far as the node's FlashInfer is known."""
    kernels = node.kernels
    return [row for row in modules if not (kernels and kernels.has(row.name))]


def missing_calls(node: Node, modules: Iterable[Module]) -> list[Call]:
    """Return calls of FlashInfer's generators for what is not compiled, as far as that is known.

    Modules that depend on the sizes of attention heads are left to the start.
    """
    if node.kernels is None:
        return []

    missing = _missing_modules(node, modules)
    names = {name for row in missing for name in row.generators}
    major = targets()[node.target].capability[0]
    calls = MODULES.calls(node.kernels.version, major, names)
    return [call for call in calls if "head_dim" not in str(call.arguments)]


def kernel_advice(kernels: FlashInfer, vllm: str) -> tuple[Advice, ...]:
    """Return what keeps vLLM from FlashInfer's kernels, and FlashInfer from compiled ones."""
    return select_entries(MODULES.advice, {"vllm": vllm, **kernels.facts})


def first_start_notes(node: Node, modules: Iterable[Module]) -> Iterator[str]:
    """Yield what compiles before the first answer, and what keeps compiled modules from use."""
    modules = _missing_modules(node, modules)
    if node.kernels:
        for advice in kernel_advice(node.kernels, node.vllm):
            yield f"{advice.says}; instead: {advice.instead}"
    if not modules:
        return

    unless = "" if node.kernels else ", if an earlier one did not"
    names = ", ".join(row.id for row in modules)
    units = sum(row.units for row in modules)
    minutes = sum(row.seconds for row in modules) / MODULES.jobs / 60
    gib = max(row.gib for row in modules)
    more = "".join(row.says for row in select_entries(MODULES.more, node.situation))
    yield (
        f"FlashInfer compiles at the first start{unless}: {names}; {units} units, up to {gib} GiB "
        f"for a compiler, about {minutes:.0f} min with {MODULES.jobs} at once{more}"
    )


def context_notes(
    request: ServeRequest, flags: Mapping[str, str], fit: Fit | None
) -> Iterator[str]:
    """Yield a warning if the KV cache of one context does not fit beside the weights on a node.

    vLLM itself only fails after minutes of loading. The estimate is a lower bound: what full
    attention keeps for each token. There is no warning for a config with another kind of cache.
    """
    if fit is None or request.checkpoint is None:
        return

    config = request.checkpoint.config
    given = flags.get(LENGTH, "")
    tokens = 0 if given else _read_count(config, "max_position_embeddings")
    if given.isdecimal() and len(given) <= _LENGTH_DIGITS:
        tokens = int(given)

    token_bytes = _token_bytes(config, flags)
    if not (tokens and token_bytes):
        return

    needed = tokens * token_bytes / BYTES_PER_GIB
    longest = int(fit.left_gib * BYTES_PER_GIB / token_bytes)
    if needed > fit.left_gib and longest > 0:
        yield (
            f"a context of {tokens} tokens does not fit: its KV cache takes {needed:.1f} GiB per "
            f"node, {fit.left_gib:.1f} are free beside the weights, and vLLM would not start. "
            f"Add {LENGTH} {longest} or less."
        )


def _read_count(config: Mapping[str, Any], key: str) -> int:
    """Return a whole number from a config, 0 if the key is missing or has another value."""
    try:
        return whole_number(config.get(key))
    except ValueError:
        return 0


def _token_bytes(config: Mapping[str, Any], flags: Mapping[str, str]) -> float:
    """Return the bytes that a token takes in the cache of one node, 0 if unknown."""
    cache_bytes = load_flag_rules().memory.cache_bytes
    value_bytes = cache_bytes.get(flags.get(CACHE_TYPE, "auto"), 0)
    tensor_parts = int(flags.get("--tensor-parallel-size", 1))
    layer_parts = int(flags.get("--pipeline-parallel-size", 1))

    values = _layer_values(config, tensor_parts)
    return value_bytes * values * _full_layers(config) / layer_parts


def _full_layers(config: Mapping[str, Any]) -> int:
    """Return the number of layers whose cache keeps all tokens, 0 if unknown."""
    if any(name.startswith(_OTHER_CACHE) for name in config):
        return 0

    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return kinds.count(_FULL)

    slides = config.get("sliding_window") and config.get("use_sliding_window", True)
    if slides or any(name.startswith(RECURRENT) for name in config):
        return 0
    return _read_count(config, "num_hidden_layers")


def _layer_values(config: Mapping[str, Any], parts: int) -> float:
    """Return the number of values that a layer caches per token on one node, 0 if unknown."""
    if rank := _read_count(config, "kv_lora_rank"):
        # With multi-head latent attention, every node keeps the whole cache.
        return rank + _read_count(config, "qk_rope_head_dim")

    queries = _read_count(config, "num_attention_heads")
    heads = _read_count(config, "num_key_value_heads") or queries
    size = _read_count(config, "head_dim")
    if not size and queries:
        size = _read_count(config, "hidden_size") // queries

    return 2 * size * max(heads / parts, 1) if heads else 0
