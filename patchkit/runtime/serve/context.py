"""Say that the KV cache of one whole context does not fit beside the weights.

vLLM says so at the start, after minutes of loading. What is reckoned is the least that attention
keeps of a token: nothing is said of a model whose config describes another cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from patchkit.runtime.rules.flags import load_flag_rules
from patchkit.runtime.serve.request import Fit, ServeRequest
from patchkit.units import BYTES_PER_GIB

LENGTH = "--max-model-len"
CACHE_TYPE = "--kv-cache-dtype"
_FULL = "full_attention"

# What configs say of layers whose cache is compressed, shared or of a fixed size.
_OTHER_CACHE = ("compress", "index_", "hybrid", "num_kv_shared")
_RECURRENT = ("mamba", "ssm_", "linear_")


def context_notes(
    request: ServeRequest, flags: Mapping[str, str], fit: Fit | None
) -> Iterator[str]:
    """Yield that the cache of one context takes more than the weights leave on each node."""
    if fit is None or request.checkpoint is None:
        return

    config = request.checkpoint.config
    tokens = _read_length(config, flags)
    token_bytes = _token_bytes(config, flags)
    if not (tokens and token_bytes):
        return

    needed = tokens * token_bytes / BYTES_PER_GIB
    if needed <= fit.left_gib:
        return
    most = int(fit.left_gib * BYTES_PER_GIB / token_bytes)
    yield (
        f"{tokens} tokens of context do not fit: their cache takes {needed:.1f} GiB per node, and "
        f"the weights leave {fit.left_gib:.1f}; vLLM will stop at its start: add {LENGTH} {most}, "
        "or less"
    )


def _read_length(config: Mapping[str, Any], flags: Mapping[str, str]) -> int:
    """Return the longest context that is asked for, 0 where nobody says."""
    asked = flags.get(LENGTH, "")
    if asked.isdigit():
        return int(asked)
    longest = config.get("max_position_embeddings")
    return longest if not asked and isinstance(longest, int) else 0


def _token_bytes(config: Mapping[str, Any], flags: Mapping[str, str]) -> float:
    """Return the bytes that one token takes in the cache of a node, 0 where that is not known."""
    value_bytes = load_flag_rules().memory.cache_bytes.get(flags.get(CACHE_TYPE, "auto"), 0)
    tensor_parts = int(flags.get("--tensor-parallel-size", "1"))
    layer_parts = int(flags.get("--pipeline-parallel-size", "1"))
    values = _layer_values(config, tensor_parts)
    return value_bytes * values * _full_layers(config) / layer_parts


def _full_layers(config: Mapping[str, Any]) -> int:
    """Return the number of layers that keep all tokens, 0 where the config does not tell."""
    layers = config.get("num_hidden_layers")
    kinds = config.get("layer_types")
    if any(name.startswith(_OTHER_CACHE) for name in config):
        return 0
    if isinstance(kinds, list):
        return kinds.count(_FULL)

    is_windowed = config.get("sliding_window") and config.get("use_sliding_window", True)
    is_mixed = any(name.startswith(_RECURRENT) for name in config)
    return layers if isinstance(layers, int) and not (is_windowed or is_mixed) else 0


def _layer_values(config: Mapping[str, Any], parts: int) -> float:
    """Return the values that a layer keeps of a token on one node, 0 where that is not known."""
    rank = config.get("kv_lora_rank")
    if isinstance(rank, int):
        # Multi-head latent attention: each node has the whole of it.
        return rank + int(config.get("qk_rope_head_dim") or 0)

    queries = config.get("num_attention_heads")
    heads = config.get("num_key_value_heads", queries)
    size = config.get("head_dim")
    if size is None and isinstance(queries, int) and queries:
        size = int(config.get("hidden_size") or 0) // queries
    if not (isinstance(heads, int) and isinstance(size, int)):
        return 0
    return 2 * size * max(heads / parts, 1)
