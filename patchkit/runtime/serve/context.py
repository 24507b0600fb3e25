"""Warn if the KV cache of one whole context does not fit beside the weights.

vLLM itself only fails after minutes of loading. The estimate is a lower bound: what full attention
keeps for each token. There is no warning for a model whose config describes another kind of cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from patchkit.foreign import whole_number
from patchkit.runtime.rules.presets import load_flag_rules
from patchkit.runtime.serve.request import Fit, ServeRequest
from patchkit.units import BYTES_PER_GIB

LENGTH = "--max-model-len"
CACHE_TYPE = "--kv-cache-dtype"
_FULL = "full_attention"
_LENGTH_DIGITS = 15  # digits of a number of tokens; no model has that many tokens

# Beginnings of keys in configs of models whose cache is compressed, shared, or of a fixed size.
_OTHER_CACHE = ("compress", "index_", "hybrid", "num_kv_shared")
RECURRENT = ("mamba", "ssm_", "linear_")


def context_notes(
    request: ServeRequest, flags: Mapping[str, str], fit: Fit | None
) -> Iterator[str]:
    """Yield a warning if the cache of one context does not fit beside the weights on a node."""
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
