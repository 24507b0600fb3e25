"""Read the flags that a user adds to `vllm serve`, as far as the memory depends on them."""

import json
import re
from collections.abc import Sequence

from patchkit.frozen import Values
from patchkit.runtime.memory.plan import BATCH, CACHE_BYTES, LENGTH, SEQUENCES, SHARE
from patchkit.runtime.memory.weights import LAYER_PARTS, TENSOR_PARTS, drafting_settings
from patchkit.runtime.rules.presets import DRAFTING

_NUMBERS = (LENGTH, SEQUENCES, BATCH, CACHE_BYTES, TENSOR_PARTS, LAYER_PARTS)
_SHORT = {"-tp": TENSOR_PARTS, "-pp": LAYER_PARTS}
_NUMBER = re.compile(r"([0-9]{1,15})(\.[0-9]{1,15})?([kmgt]?)", re.IGNORECASE)
_SHARE = r"0?\.[0-9]{1,15}|1(\.0*)?"
_UNITS = " kmgt"


def given_flags(words: Sequence[str]) -> Values:
    """Return flag → value of the flags among words, "" for a flag without a value.

    As for vLLM, - and _ are the same in names, a number may end in k (1000) or K (1024) and so on,
    and the last flag counts. Numbers are returned in digits. A number that vLLM would refuse or
    choose itself (a length of -1 or auto) is left out.
    """
    flags: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], "-"], strict=False):
        written, equals, value = word.partition("=")
        name = _SHORT.get(written, written.replace("_", "-"))
        if not equals and not following.startswith("-"):
            value = following

        flags.pop(name, None)
        if name.startswith("--") and (plain := _plain_value(name, value)) is not None:
            flags[name] = plain
    return flags


def given_drafter(words: Sequence[str]) -> str:
    """Return the model that the flags among words let draft, "" for none."""
    model = drafting_settings(given_flags(words)).get("model")
    return model if isinstance(model, str) else ""


def _plain_value(name: str, value: str) -> str | None:
    """Return the value of a flag in its plain form, None if vLLM does not take it."""
    if name in _NUMBERS:
        return _plain_number(value)
    if name == SHARE and not re.fullmatch(_SHARE, value):
        return None
    if name == DRAFTING and not _is_table(value):
        return None
    return value


def _plain_number(text: str) -> str | None:
    """Return a number as digits, None if it is none, or 0."""
    match = _NUMBER.fullmatch(text)
    if not match:
        return None

    whole, fraction, unit = match.groups()
    if fraction and not unit.islower():
        return None
    base = 1000 if unit.islower() else 1024
    number = int(
        float(whole + (fraction or "")) * base ** _UNITS.find(unit.lower() or " ")
    )
    return str(number) if number else None


def _is_table(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
