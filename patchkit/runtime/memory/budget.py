"""Read recipes/env/memory.toml: what memory holds beside weights, and what configs call it."""

from collections.abc import Mapping
from functools import cache
from typing import Annotated

from patchkit.frozen import Texts, Values, frozen
from patchkit.records import RECIPES, one_of, read_toml


@frozen
class SizeRules:
    """The memory of a Spark, and what is needed to estimate whether a model fits.

    ``share`` is the part of the memory that vLLM gets; of that, ``margin_gib`` are for activations
    and the least KV cache. ``bits`` maps a word of a model's name or quantization to the bits of a
    weight; without such a word, ``least_bits`` holds. ``cache_bytes`` maps a value of
    --kv-cache-dtype to the bytes of a cached number.
    """

    total_gib: float
    margin_gib: float
    share: float
    bits: Mapping[str, float]
    least_bits: float
    cache_bytes: Mapping[str, float]


@frozen
class Beside:
    """GiB that a rank and its node take beside weights and cache; the file says how it is known."""

    context_gib: float
    rounding_gib: float
    graph_gib: float
    graph_layer_gib: float
    network_gib: float
    network_layer_gib: float
    engine_gib: float
    server_gib: float
    ray_gib: float
    system_gib: float


@frozen
class PrefixRules:
    """How many states some releases of vLLM keep of a recurrent layer, for prefix caching or not.

    ``layers`` is a key of the table ``state`` that such layers have, ``flag`` is given, with or
    without its value. ``states`` is 0 for one a block; the tokens of a block are a multiple of
    ``block``, 0 for what the kernels take at once.
    """

    releases: str
    layers: str
    flag: str
    states: int
    block: int = 16


@frozen
class PaddedExperts:
    """Experts that the kernel of most devices rounds up to multiples of numbers.

    ``tensors`` is the pattern of their names, ``unless`` are devices whose kernel does not.
    """

    tensors: str
    hidden: int
    inner: int
    unless: Texts


@frozen
class MemoryBudget:
    """The contents of memory.toml; its head describes the tables."""

    size: SizeRules
    beside: Beside
    layers: Mapping[
        str, Annotated[str, one_of("all", "window", "state", "all state", "none")]
    ]
    intervals: Values
    prefix: tuple[PrefixRules, ...]
    padded: PaddedExperts
    pattern: Values
    state: Mapping[str, Texts]
    whole: Texts
    longer: Texts
    defaults: Mapping[str, Mapping[str, int | str]]


@cache
def load_budget() -> MemoryBudget:
    """Return the contents of memory.toml. Raises UsageError, with file and line, if malformed."""
    return read_toml(MemoryBudget, RECIPES / "env" / "memory.toml")
