"""Plan what each node's memory will hold when it serves a model, in GiB, before it starts.

vLLM takes its part of the memory only after minutes of loading. If it takes too much on a machine
whose CPU and GPU share their memory, the whole machine stops. The plan is made of what checkpoint,
config and flags say. Without them it holds what is known: the size of the weights, and a margin.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from patchkit.frozen import Values, frozen, positional
from patchkit.runtime.memory.budget import load_budget
from patchkit.runtime.memory.cache import CacheShape, cache_shape, count_drafted
from patchkit.runtime.memory.checkpoint import (
    EXPERTS_PER_TOKEN,
    Checkpoint,
    Config,
    read_count,
)
from patchkit.runtime.memory.pool import MemoryPool
from patchkit.runtime.memory.weights import (
    LAYER_PARTS,
    TENSOR_PARTS,
    Weights,
    division_of,
    embedding_bytes,
    rank_bytes,
)
from patchkit.runtime.rules.presets import DRAFTING
from patchkit.units import BYTES_PER_GIB, BYTES_PER_MIB, MIB_PER_GIB

SHARE = "--gpu-memory-utilization"
LENGTH = "--max-model-len"
SEQUENCES = "--max-num-seqs"
BATCH = "--max-num-batched-tokens"
CACHE_BYTES = "--kv-cache-memory-bytes"
LOADER = "--load-format"

_TENSOR_PARTS = (1, 2, 4, 8)  # numbers that divide the heads of most models
_DEFAULT_BATCH = (
    2048  # vLLM's own where NVML does not tell the memory, and from 0.33 on a GB10
)
_DEFAULT_SEQUENCES = 256
_LEAST_CONTEXT = (
    8192  # tokens of a request that a model is worth starting for: a choice
)
_CONTEXTS = 16  # parts of the longest context
_WHOLE_FILES = ("fastsafetensors", "instanttensor")  # loaders that hold a whole file
_OF_THE_MODEL = ("processes", "kept free")  # what a start adds to a running system
_LENGTH_DIGITS = 15  # digits of a number of tokens; no model has that many tokens
_PLAIN_BYTES = 2
# Bytes per row of logits and entry of the vocabulary.
_SAMPLER_BYTES = 20  # logits, sorted, indices, sums
_PENALTY_BYTES = 4  # counts of tokens, which vLLM keeps
_MOST_GRAPHS = 51  # of up to 512 rows
_DENSE_ROWS = (
    32  # up to so many each number gets a graph, where short answers are to be fast
)
_MLA_WORKSPACE = 65536  # tokens for which MLA unpacks keys and values at once


@positional
class MemoryRow:
    """A part of a node's memory; ``source`` says, in words, how its size is known."""

    name: str
    gib: float
    source: str


@frozen
class MemoryRequest:
    """What is to be served, and in which memory. ``flags`` are those of the command.

    ``nodes`` are those that share the model. ``drafter_gib`` is the size of a second checkpoint.
    ``ray`` says that Ray starts the ranks. ``vllm`` is the release.
    """

    pool: MemoryPool
    weights: Weights
    checkpoint: Checkpoint | None
    drafter_gib: float
    flags: Values
    nodes: int
    ray: bool
    vllm: str

    def on(self, nodes: int) -> MemoryRequest:
        """Return the same request for another number of nodes."""
        has_pipeline = division_of(self.flags).layer > 1 or nodes not in _TENSOR_PARTS
        divided = LAYER_PARTS if has_pipeline else TENSOR_PARTS
        division = {TENSOR_PARTS: "1", LAYER_PARTS: "1", divided: str(nodes)}
        return replace(self, nodes=nodes, flags={**self.flags, **division})


@frozen
class MemoryPlan:
    """What the memory of one node will hold.

    ``rows`` are vLLM's on the GPU without the cache, ``outside`` are the others' and what is kept
    free. ``cache`` is what requests keep, None if it is unknown; ``context`` are the tokens of the
    longest request, 0 if unknown. ``loading_gib`` are held beside the weights until all are loaded.
    ``given_gib`` is the size of the cache that the user asks for, 0 for all that is left.
    ``sized_gib`` is the size that the command names, 0 for none.
    """

    pool: MemoryPool
    total_gib: float
    share: float
    rows: tuple[MemoryRow, ...]
    outside: tuple[MemoryRow, ...]
    cache: CacheShape | None
    context: int
    sequences: int
    loading_gib: float = 0.0
    given_gib: float = 0.0
    sized_gib: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Return whether the plan has all parts, and no margin in their place."""
        return self.cache is not None

    @property
    def rows_gib(self) -> float:
        """Return what vLLM takes on the GPU without the cache."""
        return sum(row.gib for row in self.rows)

    @property
    def room_gib(self) -> float:
        """Return what vLLM can take on the GPU: its share, or all that the others leave.

        The share does not count where the command names the size of the cache.
        """
        rest = self.total_gib - sum(row.gib for row in self.outside)
        return rest if self.sized_gib else min(self.share_gib, rest)

    @property
    def cache_gib(self) -> float:
        """Return what is left for the cache; it is negative if the rows alone do not fit."""
        left = self.room_gib - self.rows_gib
        return min(left, self.sized_gib or left)

    @property
    def needed_gib(self) -> float:
        """Return what must be free before the start: all rows, and a cache for one request."""
        return self._start_gib + self.request_gib(min(self.context, _LEAST_CONTEXT))

    @property
    def held_gib(self) -> float:
        """Return what the rank will hold, without the cache where that is unknown."""
        return self._start_gib + self.cache_gib * self.is_whole

    @property
    def taken_gib(self) -> float:
        """Return what must be free before a start with the planned cache; see ``held_gib``.

        vLLM does not start unless its whole share is free, whatever the size of the cache.
        """
        return max(self.held_gib, self.share_gib)

    @property
    def share_gib(self) -> float:
        """Return the share of the memory that is vLLM's."""
        return self.total_gib * self.share

    @property
    def _start_gib(self) -> float:
        """Return what a start adds to a running system, without the cache."""
        return self.rows_gib + sum(
            row.gib for row in self.outside if row.name in _OF_THE_MODEL
        )

    def share_within(self, free_gib: float) -> float:
        """Return the largest share, in hundredths, that takes no more than is free."""
        processes = self._start_gib - self.rows_gib
        return math.floor((free_gib - processes) / self.total_gib * 100) / 100

    @property
    def longest_context(self) -> int:
        """Return the tokens of the longest request that fits, up to the model's own limit."""
        if self.cache is None:
            return 0
        return self.cache.longest_context(self.cache_gib * BYTES_PER_GIB, self.context)

    def list_contexts(self) -> list[tuple[float, str]]:
        """Return the bytes of the longest context and of shorter ones, with the flag for each.

        The shortest is worth a start. If none is known: no bytes, no flag.
        """
        longest = self.longest_context
        if not longest:
            return [(0.0, "")]

        least = min(longest, _LEAST_CONTEXT)
        lengths = [longest * part // _CONTEXTS for part in range(_CONTEXTS, 0, -1)]
        return [
            (self.request_gib(length) * BYTES_PER_GIB, f" {LENGTH} {length}")
            for length in lengths
            if length >= least
        ]

    def request_gib(self, tokens: int) -> float:
        """Return what the cache of one request with so many tokens takes, 0 if unknown."""
        return self.cache.request_bytes(tokens) / BYTES_PER_GIB if self.cache else 0.0

    def fitting_sequences(self, tokens: int) -> int:
        """Return how many requests with so many tokens fit at once, 0 if unknown."""
        if not self.cache or not tokens:
            return 0
        return int(max(self.cache_gib, 0.0) / self.request_gib(tokens))

    @property
    def fits(self) -> bool:
        """Return whether weights and all else fit, with room for a request of some length."""
        if self.cache_gib < self.sized_gib:
            return False

        # Without a config nobody knows how long a request may be.
        is_context_known = bool(self.cache and self.context)
        return self.longest_context > 0 or not is_context_known


def plan_memory(request: MemoryRequest) -> MemoryPlan | None:
    """Return the plan for one node, None if the size of its memory is unknown.

    Where CPU and GPU share the memory, the command names the size of the cache.
    """
    if request.pool.gib is None:
        return None

    plan = _plan_flags(request, request.pool.gib)
    if plan.given_gib or not plan.cache or not plan.pool.shared:
        return plan

    left = plan.cache_gib
    layers = plan.cache.group_width()
    # The rest of MLA's block is smaller than what the cache keeps for a layer.
    for gib in (left, left * layers / (layers + 1)):
        size = int(gib * MIB_PER_GIB) * BYTES_PER_MIB
        flags = {**request.flags, CACHE_BYTES: str(size)}
        plan = _plan_flags(replace(request, flags=flags), request.pool.gib)
        if plan.cache_gib >= plan.sized_gib:
            break
    return replace(plan, given_gib=0.0)


def _plan_flags(request: MemoryRequest, total_gib: float) -> MemoryPlan:
    """Return the plan for the flags as they are."""
    checkpoint = request.checkpoint and _with_defaults(request.checkpoint)
    batch = _read_number(request.flags, BATCH, _DEFAULT_BATCH)
    shape = None
    if checkpoint:
        shape = cache_shape(checkpoint.config, request.flags, batch, request.vllm)
    rows = _known_rows(request)
    outside: tuple[MemoryRow, ...] = ()
    if checkpoint and shape:
        rows = tuple(_rank_rows(request, checkpoint, shape))
        outside = tuple(_outside_rows(request))

    most = read_count(checkpoint.config, "max_position_embeddings") if checkpoint else 0
    given_gib = _read_number(request.flags, CACHE_BYTES, 0) / BYTES_PER_GIB
    return MemoryPlan(
        pool=request.pool,
        total_gib=total_gib,
        share=float(request.flags.get(SHARE, load_budget().size.share)),
        rows=rows,
        outside=outside,
        cache=shape,
        context=_read_number(request.flags, LENGTH, most),
        sequences=_read_number(request.flags, SEQUENCES, _DEFAULT_SEQUENCES),
        loading_gib=_loading_bytes(request) / BYTES_PER_GIB,
        given_gib=given_gib,
        sized_gib=given_gib,
    )


def _with_defaults(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with what configs of its kind of model leave out."""
    defaults = load_budget().defaults.get(str(checkpoint.config.get("model_type")), {})
    return replace(checkpoint, config={**defaults, **checkpoint.config})


def _loading_bytes(request: MemoryRequest) -> int:
    """Return what is held beside the weights while they are loaded: with some loaders, a file.

    Other loaders map files: what they read is page cache, which counts as free.
    """
    if request.checkpoint and request.flags.get(LOADER) in _WHOLE_FILES:
        return request.checkpoint.largest_file
    return 0


def _read_number(flags: Values, name: str, default: int) -> int:
    """Return the value of a flag, ``default`` if it is missing, or 0 if it is no number."""
    text = flags.get(name, "")
    if not text:
        return default
    return int(text) if text.isdecimal() and len(text) <= _LENGTH_DIGITS else 0


def _known_rows(request: MemoryRequest) -> tuple[MemoryRow, ...]:
    """Return the weights, and a margin for all that is unknown without a config."""
    drafter = request.drafter_gib if DRAFTING in request.flags else 0.0
    weights = (request.weights.gib + drafter) / request.nodes
    margin = load_budget().size.margin_gib

    return (
        MemoryRow("weights", weights, request.weights.source),
        MemoryRow("margin", margin, "activations and the least KV cache"),
    )


def _rank_rows(
    request: MemoryRequest, checkpoint: Checkpoint, shape: CacheShape
) -> Iterator[MemoryRow]:
    """Yield what a rank takes on the GPU beside the cache."""
    flags = request.flags
    beside = load_budget().beside
    division = division_of(flags)

    size = rank_bytes(checkpoint, division, flags, request.pool.target) / BYTES_PER_GIB
    yield MemoryRow("weights", size, "its tensors")
    if request.drafter_gib and DRAFTING in flags:
        part = request.drafter_gib / division.tensor
        yield MemoryRow("drafter", part, "its files")

    size = _activation_bytes(checkpoint, division.tensor, flags, shape) / BYTES_PER_GIB
    yield MemoryRow("activations", size, f"{shape.batch} tokens at once")
    sizes = _count_graphs(checkpoint.config, flags)
    layers = sizes * read_count(checkpoint.config, "num_hidden_layers") / division.layer
    graphs = sizes * beside.graph_gib + layers * beside.graph_layer_gib
    yield MemoryRow("CUDA", beside.context_gib + graphs, "measured on an H200")
    if request.nodes > 1:
        # Only parts of a layer exchange their sums inside the graphs.
        sums = layers * beside.network_layer_gib if division.tensor > 1 else 0
        yield MemoryRow("NCCL", beside.network_gib + sums, "measured by sockets")


def _count_graphs(config: Config, flags: Values) -> int:
    """Return for how many numbers of rows vLLM makes CUDA graphs.

    They are 1, 2, 4 and each multiple of 8, up to twice the rows of a step. Where a model's class
    sets them, memory.toml has their number among its defaults.
    """
    if "--enforce-eager" in flags:
        return 0

    sizes = min(3 + _logit_rows(flags) // 4, _MOST_GRAPHS)
    sizes = read_count(config, "graphs") or sizes
    if flags.get("--performance-mode") == "interactivity":
        rows = min(2 * _logit_rows(flags), _DENSE_ROWS)
        sizes += rows - 3 - rows // 8
    return sizes


def _activation_bytes(
    checkpoint: Checkpoint, tensor_parts: int, flags: Values, shape: CacheShape
) -> float:
    """Return the most that a rank takes beside weights and cache while it computes.

    Its peak is one of three: a step with the largest batch; sampling for all sequences; or the
    first compilation, in which torch tries kernels on a copy of the table of embeddings. Counts
    of tokens and the workspace of experts stay beside the peak.
    """
    config = checkpoint.config
    hidden = read_count(config, "hidden_size")
    inner = read_count(config, "intermediate_size") / tensor_parts
    step = 4 * hidden + 3 * inner

    # vLLM keeps two workspaces, for what goes into the chosen experts and for what comes out.
    expert_inner = read_count(config, "moe_intermediate_size") / tensor_parts
    experts = max(read_count(config, key) for key in EXPERTS_PER_TOKEN)
    workspaces = experts * (hidden + max(hidden, 2 * expert_inner))

    compiling = 0.0
    if "--enforce-eager" not in flags:
        compiling = embedding_bytes(checkpoint, tensor_parts)
    unpacked = _unpacked_bytes(config, tensor_parts)
    rest = 0.0
    if cache := _read_number(flags, CACHE_BYTES, 0):
        # vLLM measures nothing then, and tensors of the cache get the memory of these blocks. MLA
        # takes a new block later: the rest of its first one is lost.
        layer_cache = cache / shape.group_width()
        compiling %= layer_cache
        rest = unpacked % layer_cache if unpacked > layer_cache else 0.0

    logits = _logit_rows(flags) * read_count(config, "vocab_size")
    latent = read_count(config, "kv_lora_rank") + read_count(config, "qk_rope_head_dim")
    numbers = shape.batch * step + latent * _MLA_WORKSPACE
    step_bytes = numbers * _PLAIN_BYTES + unpacked
    peak = max(step_bytes, logits * _SAMPLER_BYTES, compiling)
    beside_peak = logits * _PENALTY_BYTES + shape.batch * workspaces * _PLAIN_BYTES
    return peak + rest + beside_peak


def _logit_rows(flags: Values) -> int:
    """Return how many tokens are sampled at once: drafted ones are checked with the others."""
    sequences = _read_number(flags, SEQUENCES, _DEFAULT_SEQUENCES)
    return sequences * (1 + count_drafted(flags))


def _unpacked_bytes(config: Config, tensor_parts: int) -> float:
    """Return the bytes of keys and values that MLA unpacks at once, 0 for other attention."""
    if not read_count(config, "kv_lora_rank"):
        return 0
    head = read_count(config, "qk_nope_head_dim") + read_count(config, "v_head_dim")
    width = read_count(config, "num_attention_heads") * head / tensor_parts
    return width * _MLA_WORKSPACE * _PLAIN_BYTES


def _outside_rows(request: MemoryRequest) -> Iterator[MemoryRow]:
    """Yield what others take of a memory that CPU and GPU share, and what is kept free."""
    if not request.pool.shared:
        return

    beside = load_budget().beside
    # All ranks need equal flags, so each counts the API server, which only the head has.
    processes = beside.engine_gib + beside.server_gib
    if request.ray:
        processes += beside.ray_gib
    yield MemoryRow("processes", processes, "partly measured on an H200")
    yield MemoryRow("system", beside.system_gib, "assumed")
    yield MemoryRow("kept free", request.pool.floor_gib, "memory_floor")
