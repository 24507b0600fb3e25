"""Weigh a model by its files, its preset, upstream's recipe, or as a last resort its name."""

from __future__ import annotations

import re

from patchkit.frozen import frozen
from patchkit.runtime.rules.flags import load_flag_rules
from patchkit.runtime.rules.presets import Preset, find_recipe
from patchkit.units import BYTES_PER_GIB

_BITS_PER_BYTE = 8
_UNITS = {"b": 10**9, "t": 10**12}

# 122B of Qwen3.5-122B-A10B; not A10B, which a token reads, nor 8x7B, whose experts share layers.
_PARAMETERS = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)([bt])(?![a-z0-9])")
_BITS = re.compile(r"(\d+(?:\.\d+)?)(?:bit|bpw)")
_WORDS = re.compile(r"[a-z0-9]+")


@frozen
class Weights:
    """The size of a model's weights; ``source`` says who names it.

    ``is_least`` says that they may be larger, ``from_name`` that the name alone tells.
    """

    gib: float
    source: str
    is_least: bool = False
    from_name: bool = False


def find_weights(
    model: str, preset: Preset | None, folder_gib: float | None, quantization: str = ""
) -> Weights | None:
    """Return the size of the weights from the best source, None if no source has it."""
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
    """Return the least size that the parameters and bits in a model's name can mean."""
    name = model.rstrip("/").rpartition("/")[2].lower()
    sizes = [float(number) * _UNITS[unit] for number, unit in _PARAMETERS.findall(name)]
    if not sizes:
        return None

    # A name may say as well how many tokens it was trained on, or of which model it was distilled.
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
