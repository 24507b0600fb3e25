"""Find dense layers of a quantised checkpoint that are in 16 bits, and that vLLM can convert to 8.

Layers have the names that they have in vLLM after fusing, since vLLM matches patterns with the
fused layer, not with its parts (``find_matching_patterns``).
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from patchkit.frozen import Texts, frozen
from patchkit.runtime.memory.checkpoint import PLAIN, Checkpoint, Tensor
from patchkit.runtime.rules.presets import load_flag_rules

_BLOCK = 32  # weights for which MXFP8 has one scale of one byte
_LEAST_SIDE = 128  # rows and columns that FlashInfer's kernel needs at least
_PLAIN_BYTES = 2
_MXFP8_BYTES = 1 + 1 / _BLOCK

PartsByLayer = Mapping[int, Sequence[Tensor]]
"""Number of a layer → the tensors that vLLM fuses into one of its dense layers."""


@frozen
class DenseLayers:
    """The value of ``--quantization-config``, and the bytes per token that it saves."""

    setting: str
    saved: float


def find_dense_layers(checkpoint: Checkpoint, nodes: int) -> DenseLayers | None:
    """Return the 16-bit dense layers to convert; None if there are none or no expert is quantised.

    ``nodes`` is the number of nodes over which each layer is divided.
    """
    experts = [tensor for tensor in checkpoint.tensors if ".experts." in tensor.name]
    if all(tensor.dtype in (*PLAIN, "F32") for tensor in experts):
        return None

    targets: list[str] = []
    saved = 0.0
    for layer in _dense_layer_names(checkpoint):
        parts_by_layer = _find_layer_parts(layer, checkpoint.tensors)
        convertible = {
            number: parts
            for number, parts in parts_by_layer.items()
            if _can_convert(parts, nodes)
        }

        # One pattern is enough if the dense layer can be converted in all numbered layers.
        is_everywhere = len(convertible) == len(parts_by_layer)
        places = ["*"] if convertible and is_everywhere else list(convertible)
        targets += [f"*model.layers.{place}.{layer}" for place in places]
        size = sum(part.size for parts in convertible.values() for part in parts)
        saved += size * (1 - _MXFP8_BYTES / _PLAIN_BYTES)

    if not targets:
        return None

    config = {"targets": dict.fromkeys(targets, "mxfp8")}
    return DenseLayers(setting=json.dumps(config, separators=(",", ":")), saved=saved)


def _dense_layer_names(checkpoint: Checkpoint) -> Texts:
    """Return vLLM's names of the dense layers in the checkpoint's architecture."""
    for row in load_flag_rules().dense:
        if not set(row.architectures).isdisjoint(checkpoint.architectures):
            return row.layers

    return ()


def _find_layer_parts(layer: str, tensors: Iterable[Tensor]) -> PartsByLayer:
    """Return the tensors of a dense layer; ``layer`` is its name in vLLM: ``attn.qkv_proj``."""
    parent, _dot, name = layer.rpartition(".")

    # In checkpoints of gpt-oss, vLLM's attn is called self_attn. GPTQ calls weights qweight.
    parts = "|".join(load_flag_rules().dense_parts.get(name, (name,)))
    tensor_name = re.compile(
        rf"\.(?:self_)?{re.escape(parent)}\.(?:{parts})\.q?weight\w*$"
    )

    parts_by_layer: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.layer is not None and tensor_name.search(tensor.name):
            parts_by_layer.setdefault(tensor.layer, []).append(tensor)

    return parts_by_layer


def _can_convert(parts: Sequence[Tensor], nodes: int) -> bool:
    """Return whether all parts are 16-bit matrices whose share per node suits the kernel."""
    for part in parts:
        is_matrix = part.name.endswith(".weight") and len(part.shape) == 2
        if not is_matrix or part.dtype not in PLAIN:
            return False

    rows = sum(part.shape[0] for part in parts)
    columns = parts[0].shape[1]
    has_blocks = rows % (_BLOCK * nodes) == columns % (_BLOCK * nodes) == 0
    return has_blocks and min(rows, columns) // nodes >= _LEAST_SIDE
