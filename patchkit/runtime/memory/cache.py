"""Tell from a model's config what its KV cache and its recurrent states take on one rank.

vLLM puts layers that keep the same into groups of equal size, and gives each request blocks of
every group: all tokens for full attention, the last ones for a sliding window, one state for a
recurrent layer. A state takes one block, so blocks are at least as large as a state.
"""

import math
from bisect import bisect_right
from collections import Counter

from patchkit.frozen import Values, frozen
from patchkit.runtime.memory.budget import PrefixRules, load_budget
from patchkit.runtime.memory.checkpoint import Config, head_size, read_count
from patchkit.runtime.memory.weights import division_of, drafting_settings
from patchkit.runtime.rules.presets import DRAFTING
from patchkit.runtime.rules.releases import within

CACHE_TYPE = "--kv-cache-dtype"
_BLOCK = 16  # tokens: vLLM's least block
_PLAIN_BYTES = 2
_FLOAT_BYTES = 4
_MOST_LAYERS = 10_000  # a larger number is no model's
_SIMILAR = 1.5  # groups whose sizes differ by less are filled up to the larger size

# Bytes per token and layer of caches of their own form, by vLLM's MLA kernels for sparse attention.
_SPARSE_BYTES = 656
_SCALE_BYTES = 4  # of the indexer, for its 128 values of one byte

DRAFTING_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")

# Beginnings of keys in configs of models whose cache is compressed, or of another form.
_OTHER_CACHE = ("compress", "hybrid_layer", "linear_attn_config")


@frozen
class CacheGroup:
    """Layers that keep the same for a request, on one rank.

    ``token_bytes`` are for a token and layer; ``window`` is the number of tokens that are kept, 0
    for all. ``state_bytes`` are for a request and layer, 0 for attention.
    """

    layers: int
    token_bytes: float = 0
    window: int = 0
    state_bytes: float = 0


@frozen
class CacheShape:
    """All that a request keeps on one rank; ``batch`` are the tokens that one step computes.

    ``states`` is the number of states that a request keeps for each recurrent layer, 0 for one for
    each block. The tokens of a block are a multiple of ``block``.
    """

    groups: tuple[CacheGroup, ...]
    batch: int
    states: int
    block: int

    def request_bytes(self, tokens: int) -> float:
        """Return the bytes that one request with so many tokens takes."""
        width = self.group_width()
        block = self._block_tokens()

        size = 0.0
        for group in self.groups:
            layers = math.ceil(group.layers / width) * width
            if group.state_bytes:
                states = self.states or math.ceil(tokens / block)
                state = max(group.state_bytes, block * self._attention_bytes())
                size += layers * states * state
                continue

            kept = tokens
            if group.window:
                # While a step computes, its tokens are kept beside the window.
                kept = min(tokens, group.window - 1 + self.batch)
            blocks = math.ceil(kept / block) + bool(group.window and kept < tokens)
            size += layers * blocks * block * group.token_bytes
        return size

    def longest_context(self, free_bytes: float, most: int) -> int:
        """Return the most tokens, up to ``most``, of a request that fits, 0 if none does."""
        return bisect_right(range(1, most + 1), free_bytes, key=self.request_bytes)

    def group_width(self) -> int:
        """Return how many layers of a kind vLLM puts into one group."""
        counts = [group.layers for group in self.groups]
        most = max(counts)
        return most if most < min(counts) * _SIMILAR else min(counts)

    def _attention_bytes(self) -> float:
        return max(group.token_bytes for group in self.groups)

    def _block_tokens(self) -> int:
        """Return the tokens of a block: as many as make it as large as a state."""
        state = max(group.state_bytes for group in self.groups)
        least = self.block * self._attention_bytes()
        # Without attention, a state is a block of its own.
        return self.block * max(math.ceil(state / (least or state)), 1)


def cache_shape(
    config: Config, flags: Values, batch: int, vllm: str
) -> CacheShape | None:
    """Return what a request keeps, None if the config or the type of the cache is of another kind.

    ``batch`` are the tokens that one step computes, ``vllm`` is the release.
    """
    value_bytes = load_budget().size.cache_bytes.get(flags.get(CACHE_TYPE, "auto"), 0)
    kinds = layer_kinds(config)
    if not (value_bytes and kinds):
        return None
    if DRAFTING in flags:
        # A drafter attends to all tokens, too, mostly with one layer.
        drafting_layers = [read_count(config, key) for key in DRAFTING_LAYERS]
        kinds += ["all"] * min(max(*drafting_layers, 1), _MOST_LAYERS)
    if "--disable-hybrid-kv-cache-manager" in flags:
        kinds = ["all" if kind == "window" else kind for kind in kinds]

    groups = [
        _cache_group(config, flags, value_bytes, kind, count)
        for kind, count in Counter(kinds).items()
    ]
    if not all(group.token_bytes or group.state_bytes for group in groups):
        return None

    rules = _prefix_rules(config, flags, vllm)
    return CacheShape(
        groups=tuple(groups),
        batch=batch,
        states=rules.states and rules.states + count_drafted(flags),
        block=rules.block or _first_count(config, "chunk") or _BLOCK,
    )


def _cache_group(
    config: Config,
    flags: Values,
    value_bytes: float,
    kind: str,
    count: int,
) -> CacheGroup:
    """Return what ``count`` layers of a kind keep on one rank."""
    division = division_of(flags)
    layers = math.ceil(count / division.layer)
    if kind == "state":
        state = _state_bytes(config, flags) / division.tensor
        return CacheGroup(layers=layers, state_bytes=state)

    token = _token_bytes(config, value_bytes, division.tensor)
    window = _window(config) if kind == "window" else 0
    return CacheGroup(layers=layers, token_bytes=token, window=window)


def layer_kinds(config: Config) -> list[str]:
    """Return the kind of each layer that keeps something, [] if it is not known for all."""
    if any(name.startswith(_OTHER_CACHE) for name in config):
        return []

    budget = load_budget()
    names = _layer_names(config)
    kinds = [budget.layers.get(name, "") for name in names]
    if not all(kinds):
        return []

    # The last layers of some models use the cache of earlier ones.
    shared = read_count(config, "num_kv_shared_layers")
    own_kinds = " ".join(kinds[: len(kinds) - shared]).split()
    return [kind for kind in own_kinds if kind != "none"]


def _layer_names(config: Config) -> list[str]:
    """Return the name of each layer's kind, as configs write it in ``layer_types``."""
    layers = read_count(config, "num_hidden_layers")
    if layers > _MOST_LAYERS:
        return []

    types = config.get("layer_types")
    if isinstance(types, list):
        return [str(name) for name in types]

    letters = config.get("hybrid_override_pattern")
    if isinstance(letters, str):
        names = load_budget().pattern
        return [names.get(letter, letter) for letter in letters]

    for key, name in load_budget().intervals.items():
        if interval := read_count(config, key):
            return [
                name if number % interval else "full_attention"
                for number in range(1, layers + 1)
            ]
    if _window(config) and config.get("use_sliding_window", True):
        return ["sliding_attention"] * layers
    if _first_count(config, "kernel"):
        return [str(config.get("every_layer"))] * layers
    return ["full_attention"] * layers


def _window(config: Config) -> int:
    return read_count(config, "sliding_window") or read_count(
        config, "attention_chunk_size"
    )


def _token_bytes(config: Config, value_bytes: float, tensor_parts: int) -> float:
    """Return the bytes that an attention layer keeps for a token on one rank, 0 if unknown."""
    if rank := read_count(config, "kv_lora_rank"):
        # With multi-head latent attention, every rank keeps the whole cache.
        size = (rank + read_count(config, "qk_rope_head_dim")) * value_bytes
        indexer = read_count(config, "index_head_dim")
        if indexer and value_bytes == 1:
            size = _SPARSE_BYTES
        return size + (indexer + _SCALE_BYTES if indexer else 0)

    queries = read_count(config, "num_attention_heads")
    heads = read_count(config, "num_key_value_heads") or queries
    return (
        2 * head_size(config) * max(heads / tensor_parts, 1) * value_bytes
        if heads
        else 0
    )


def _state_bytes(config: Config, flags: Values) -> float:
    """Return the bytes of a recurrent layer's state for one request, 0 if unknown."""
    kernel = _first_count(config, "kernel") - 1 + count_drafted(flags)
    if value_heads := _first_count(config, "value_heads"):
        key_size = _first_count(config, "key_size")
        value_size = _first_count(config, "value_size")
        channels = 2 * _first_count(config, "key_heads") * key_size
        channels += value_heads * value_size
        values = value_heads * key_size * value_size
    else:
        inner = _first_count(config, "heads") * _first_count(config, "head_size")
        # A Mamba-1 layer has no heads.
        inner = inner or _first_count(config, "wider") * read_count(
            config, "hidden_size"
        )
        states = _first_count(config, "states")
        channels = inner + 2 * _first_count(config, "groups") * states
        values = inner * states

    kept_type = flags.get("--mamba-ssm-cache-dtype", "auto")
    if kept_type == "auto":
        names = ("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
        kept_type = next((config[name] for name in names if name in config), "")
    size = _FLOAT_BYTES if kept_type == "float32" else _PLAIN_BYTES
    return kernel * channels * _PLAIN_BYTES + values * size


def count_drafted(flags: Values) -> int:
    """Return the tokens that are drafted at once; each takes a state and a step of the kernel."""
    return read_count(drafting_settings(flags), "num_speculative_tokens")


def _prefix_rules(config: Config, flags: Values, vllm: str) -> PrefixRules:
    """Return the first prefix-caching rules that fit release, flags and layers, else the last."""
    given = {"", *flags, *map("=".join, flags.items())}
    for rules in load_budget().prefix:
        has_layers = _first_count(config, rules.layers)
        if has_layers and rules.flag in given and within(vllm, rules.releases):
            break
    return rules


def _first_count(config: Config, name: str) -> int:
    """Return the number for which configs have several keys, 0 if there is none."""
    return max(read_count(config, key) for key in load_budget().state[name])
