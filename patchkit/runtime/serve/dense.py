"""Find the dense layers that a quantised checkpoint has in 16 bits, and that vLLM can read in 8.

Layers are named as vLLM names them, fused as it fuses them: a pattern that matches a fused layer is
asked about none of its parts (``find_matching_patterns``).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from patchkit.runtime.rules.flags import load_flag_rules
from patchkit.runtime.serve.checkpoint import PLAIN, Checkpoint, Tensor

_BLOCK = 32  # MXFP8 has a scale of one byte for as many weights
_LEAST = 128  # of each side, in FlashInfer's kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLayers:
    """What ``--quantization-config`` gets, and the bytes per token that it saves."""

    setting: str
    saved: float


def dense_layers(checkpoint: Checkpoint, nodes: int) -> DenseLayers | None:
    """Return the layers in 16 bits of a checkpoint that has others quantised; None for none."""
    names = checkpoint.config["architectures"]
    rules = load_flag_rules()
    row = next(
        (it for it in rules.dense if not {*names}.isdisjoint(it.architectures)), None
    )
    experts = {it.dtype for it in checkpoint.tensors if ".experts." in it.name}
    if row is None or not experts - {*PLAIN, "F32"}:
        return None
    targets, saved = [], 0.0
    for layer in row.layers:
        parent, _, name = layer.rpartition(".")
        # gpt-oss has as self_attn what is attn in vLLM; GPTQ calls weights qweight.
        kinds = "|".join(rules.dense_parts.get(name, (name,)))
        ends = re.compile(
            rf"\.(?:self_)?{re.escape(parent)}\.(?:{kinds})\.q?weight\w*$"
        )
        found: dict[int, list[Tensor]] = {}
        for tensor in checkpoint.tensors:
            if tensor.layer is not None and ends.search(tensor.name):
                found.setdefault(tensor.layer, []).append(tensor)
        plain = []
        for number, parts in found.items():
            if all(
                it.dtype in PLAIN and it.name.endswith(".weight") and len(it.shape) == 2
                for it in parts
            ):
                sides = (sum(part.shape[0] for part in parts), parts[0].shape[1])
                if all(
                    it % (_BLOCK * nodes) == 0 and it // nodes >= _LEAST for it in sides
                ):
                    plain.append(number)
        # A pattern for all, or a name for each where others have it quantised already.
        places = "*" if len(plain) == len(found) else plain
        targets += [
            f"*model.layers.{place}.{layer}" for place in (places if plain else ())
        ]
        elements = sum(part.size / 2 for number in plain for part in found[number])
        saved += elements * (2 - 1 - 1 / _BLOCK)
    setting = json.dumps(
        {"targets": dict.fromkeys(targets, "mxfp8")}, separators=(",", ":")
    )
    return DenseLayers(setting=setting, saved=saved) if targets else None
