"""Find the size of a model's weights: by files, preset, upstream's recipe, or else by its name."""

from __future__ import annotations

import re

from patchkit.frozen import frozen
from patchkit.runtime.rules.flags import load_flag_rules
from patchkit.runtime.rules.presets import Preset, find_recipe
from patchkit.units import BYTES_PER_GIB

_BITS_PER_BYTE = 8
_UNITS = {"b": 10**9, "t": 10**12}

# 122B in Qwen3.5-122B-A10B. It does not match A10B (the parameters read for a token), nor 8x7B
# (whose experts share layers, so that the product would be too large).
_PARAMETERS = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)([bt])(?![a-z0-9])")
_BITS = re.compile(r"(\d+(?:\.\d+)?)(?:bit|bpw)")
_WORDS = re.compile(r"[a-z0-9]+")


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
    sizes = [float(number) * _UNITS[unit] for number, unit in _PARAMETERS.findall(name)]
    if not sizes:
        return None

    # Other numbers in a name may be the tokens of its training, or the size of a model that it was
    # distilled from. The smallest number is safe for a lower bound.
    parameters = min(sizes)
    memory = load_flag_rules().memory
    words = [*_WORDS.findall(name), quantization]
    known_bits = [memory.bits[word] for word in words if word in memory.bits]
    known_bits += map(float, _BITS.findall(name))
    bits = min(known_bits, default=memory.least_bits)

    return Weights(
        gib=parameters * bits / _BITS_PER_BYTE / BYTES_PER_GIB,
        source=f"its name: {parameters / 10**9:g} * 10^9 parameters in {bits:g} bits or more",
        is_least=True,
        from_name=True,
    )
