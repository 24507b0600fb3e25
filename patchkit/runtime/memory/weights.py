"""Tell the size of a model's weights, and the part of them that one rank holds."""

import math
import re
from collections import Counter
from collections.abc import Iterator

from patchkit.foreign import positive_number
from patchkit.frozen import Fields, Values, frozen
from patchkit.records import read_json
from patchkit.runtime.memory.budget import load_budget
from patchkit.runtime.memory.checkpoint import (
    EMBEDDINGS,
    Checkpoint,
    Config,
    Tensor,
    head_size,
    read_count,
)
from patchkit.runtime.rules.presets import DRAFTING, Preset, find_recipe
from patchkit.units import BYTES_PER_GIB

TENSOR_PARTS = "--tensor-parallel-size"
LAYER_PARTS = "--pipeline-parallel-size"
_WHOLE_EXPERTS = "--enable-expert-parallel"

_BITS_PER_BYTE = 8
_UNITS = {"b": 10**9, "t": 10**12}

# 122B in Qwen3.5-122B-A10B. It does not match A10B (the parameters read for a token), nor 8x7B
# (whose experts share layers, so that the product would be too large).
_PARAMETERS = r"(?<![a-z0-9.])(\d+(?:\.\d+)?)([bt])(?![a-z0-9])"
_BITS = r"(\d+(?:\.\d+)?)(?:bit|bpw)"
_WORDS = r"[a-z0-9]+"

_HEAD = re.compile(r"(?:^|\.)(?:lm_head|output|head)\.")
_DRAFTING_PART = r"(?:^|\.)mtp\w*\."
_KEYS_AND_VALUES = r"\.[kv]_proj\."
_NEVER_LOADED = r"rotary_emb\.|inv_freq"
_PLAIN_BYTES = 2


@frozen
class Weights:
    """The size of a model's weights; ``source`` says, in words, where it is from.

    ``is_least`` says that the size is a lower bound, ``from_name`` that only the name tells it.
    """

    gib: float
    source: str
    is_least: bool = False
    from_name: bool = False


def find_weights(
    model: str, preset: Preset | None, folder_gib: float | None, quantization: str = ""
) -> Weights | None:
    """Return the size of the weights from the best source, None if no source tells it.

    ``folder_gib`` is the size of local files. ``quantization`` is that of the model, "" if unknown.
    """
    if folder_gib:
        return Weights(gib=folder_gib, source="its files")
    if preset and preset.weights_gib:
        return Weights(gib=preset.weights_gib, source="its preset")

    names = [model, preset.id] if preset else [model]
    for name in names:
        recipe = find_recipe(name)
        if recipe and recipe.weights_gib:
            return Weights(
                gib=recipe.weights_gib, source="upstream's recipe", is_least=True
            )

    return _weigh_name(model, quantization)


def _weigh_name(model: str, quantization: str) -> Weights | None:
    """Return the least size that a model with this name can have, None if the name tells none."""
    name = model.rstrip("/").rpartition("/")[2].lower()
    sizes = [
        float(number) * _UNITS[unit] for number, unit in re.findall(_PARAMETERS, name)
    ]
    if not sizes:
        return None

    # Other numbers in a name may be the tokens of its training, or the size of a model that it was
    # distilled from. The smallest number is safe for a lower bound.
    parameters = min(sizes)
    size_rules = load_budget().size
    words = [*re.findall(_WORDS, name), quantization]
    known_bits = [size_rules.bits[word] for word in words if word in size_rules.bits]
    known_bits += map(float, re.findall(_BITS, name))
    bits = min(known_bits, default=size_rules.least_bits)

    return Weights(
        gib=parameters * bits / _BITS_PER_BYTE / BYTES_PER_GIB,
        source=f"its name: {parameters / 10**9:g} * 10^9 parameters in {bits:g} bits or more",
        is_least=True,
        from_name=True,
    )


@frozen
class Division:
    """How ranks divide a model: each layer in ``tensor`` parts, the layers in ``layer`` parts."""

    tensor: int = 1
    layer: int = 1


def division_of(flags: Values) -> Division:
    """Return the division that the flags of a command ask for."""
    return Division(
        tensor=int(flags.get(TENSOR_PARTS, 1)),
        layer=int(flags.get(LAYER_PARTS, 1)),
    )


def drafting_settings(flags: Values) -> Fields:
    """Return how the flags of a command let vLLM draft, {} if they do not."""
    return read_json(Fields, flags.get(DRAFTING, "{}"))


def rank_bytes(
    checkpoint: Checkpoint, division: Division, flags: Values, target: str
) -> float:
    """Return the bytes of weights of the fullest rank; ``target`` is the profile of its device."""
    heads = read_count(checkpoint.config, "num_key_value_heads") or division.tensor
    bytes_by_layer: Counter[int] = Counter()
    aside = 0.0
    outside = []
    padded = load_budget().padded
    expert_parts = 1 if _WHOLE_EXPERTS in flags else division.tensor
    growth = _padded_growth(checkpoint.config, expert_parts)

    for tensor in _loaded_tensors(checkpoint, flags):
        size = _loaded_size(tensor) / _count_parts(tensor, division.tensor, heads)
        if target not in padded.unless and re.search(padded.tensors, tensor.name):
            size *= growth
        if tensor.aside:
            aside += size
        elif tensor.layer is None:
            outside.append(size)
        else:
            bytes_by_layer[tensor.layer] += math.ceil(size)

    layers = math.ceil(len(bytes_by_layer) / division.layer)
    largest = sum(sorted(bytes_by_layer.values())[-layers:])
    # The first stage of a pipeline has the embeddings, the last one the head.
    tables = sum(outside) if division.layer == 1 else max(outside, default=0)
    return largest + aside + tables + _rope_bytes(checkpoint)


def _padded_growth(config: Config, expert_parts: int) -> float:
    """Return by what factor the bytes of MXFP4 experts grow, since Marlin rounds up their sizes.

    ``expert_parts`` are the ranks that divide each expert; each gets its part padded.
    """
    padded = load_budget().padded
    multiples = {
        "hidden_size": padded.hidden,
        "intermediate_size": padded.inner * expert_parts,
    }
    growth = 1.0
    for key, multiple in multiples.items():
        size = read_count(config, key) or multiple
        growth *= math.ceil(size / multiple) * multiple / size
    return growth


def embedding_bytes(checkpoint: Checkpoint, tensor_parts: int) -> float:
    """Return the bytes of a rank's part of the table of embeddings, 0 if there is none."""
    sizes = [row.size for row in checkpoint.tensors if EMBEDDINGS.search(row.name)]
    return max(sizes, default=0) / tensor_parts


def _loaded_tensors(checkpoint: Checkpoint, flags: Values) -> Iterator[Tensor]:
    """Yield the tensors that vLLM loads: drafting parts only if it drafts with them."""
    drafting = drafting_settings(flags)
    drafts_itself = bool(drafting) and "model" not in drafting
    is_tied = checkpoint.config.get("tie_word_embeddings") is True

    for tensor in checkpoint.tensors:
        is_second_table = is_tied and _HEAD.search(tensor.name)
        if not is_second_table and not re.search(_NEVER_LOADED, tensor.name):
            yield tensor

    takes_images = "--language-model-only" not in flags
    for tensor in checkpoint.aside:
        is_drafting = tensor.layer is not None or re.search(_DRAFTING_PART, tensor.name)
        # A drafting part takes over the embeddings and the head of the model.
        is_shared = EMBEDDINGS.search(tensor.name) or _HEAD.search(tensor.name)
        is_used_draft = is_drafting and drafts_itself and not is_shared
        if is_used_draft or (takes_images and not is_drafting):
            yield tensor


def _loaded_size(tensor: Tensor) -> float:
    """Return the bytes that a tensor takes once it is loaded: vLLM computes in 16 bits."""
    is_matrix = len(tensor.shape) > 1 and tensor.name.endswith(".weight")
    if is_matrix and tensor.dtype == "F32":
        return tensor.size / 2
    return tensor.size


def _count_parts(tensor: Tensor, tensor_parts: int, heads: int) -> int:
    """Return into how many parts the ranks divide a tensor; ``heads`` are those of keys."""
    if any(re.search(pattern, tensor.name) for pattern in load_budget().whole):
        return 1
    if re.search(_KEYS_AND_VALUES, tensor.name):
        return min(tensor_parts, heads)
    return tensor_parts


def _rope_bytes(checkpoint: Checkpoint) -> float:
    """Return the bytes of the tables of rotations, which each rank holds whole.

    Layers with a sliding window may have a table of their own. Some models rotate nothing. While
    the tables are made, torch takes more; weights get these blocks, and do not fill them.
    """
    config = checkpoint.config
    size = read_count(config, "qk_rope_head_dim") or head_size(config)
    rotated_part = min(positive_number(config.get("partial_rotary_factor")) or 1, 1)
    positions = read_count(config, "max_position_embeddings")
    tables = 1 + ("rope_local_base_freq" in config)
    rounding = load_budget().beside.rounding_gib * BYTES_PER_GIB

    kinds = (config.get("rotation"), config.get("position_embedding_type"))
    if "none" in kinds or "nope" in kinds:
        return 0.0
    return tables * positions * size * rotated_part * _PLAIN_BYTES + rounding
