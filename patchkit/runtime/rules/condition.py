"""Decide when a rule holds: conditions on the facts of a node, its software, what it serves.

A condition is ``fact = value``, ``fact = [values]`` or, for versions and numbers, ``fact = range``.
"""

from __future__ import annotations

from collections.abc import Mapping

from patchkit.runtime.rules.releases import check_range, within
from patchkit.target import targets

CHOICES: Mapping[str, tuple[str, ...]] = {
    "role": ("single", "head", "worker"),
    "topology": ("single", "roce", "socket", "ring", "hetero"),
    "twin": ("none", "down", "bare", "bare-first", "random", "link-local", "both"),
    "executor": ("uni", "mp", "ray"),
    "copies": ("nothing", "overwrites", "fills in"),
    "target": (*targets(), "other"),
    "quantization": ("fp8", "nvfp4", "mxfp4", "gptq", "awq", "bf16"),
    "moe": ("yes", "no", "unknown"),
    # What a cause of a symptom may depend on: facts of the machine that wrote a log.
    "kernel_reserve": ("yes", "no"),
    "memlock": ("limited", "unlimited"),
    "container": ("yes", "no"),
    "linger": ("yes", "no"),
    "page_cache": ("large", "small"),
    "memory": ("short", "enough"),
}
_UNTOLD = "untold"  # what a condition says of a fact that is not known
_RANGES = (
    *("vllm", "torch", "triton", "nccl", "nodes"),
    *("ray", "flashinfer", "transformers", "driver", "kernel", "cuda"),
)

Condition = Mapping[str, str | tuple[str, ...]]
Situation = Mapping[str, str]


def holds(when: Condition, situation: Situation) -> bool:
    """Return whether all conditions are met; one about a fact that is not known is not.

    But ``topology = "untold"`` is met by nothing else.
    """
    for key, values in when.items():
        known = situation.get(key, "")
        if key in _RANGES:
            is_met = bool(known) and within(known, str(values))
        else:
            is_met = (known or _UNTOLD) in ((values,) if isinstance(values, str) else values)
        if not is_met:
            return False
    return True


def decided(when: Condition, situation: Situation) -> bool | None:
    """Return whether all conditions are met, None if that hangs on a fact that is not known.

    One that is not met decides, whatever is not known.
    """
    known = {key: values for key, values in when.items() if situation.get(key)}
    if not holds(known, situation):
        return False
    return True if len(known) == len(when) else None


def is_fact(name: str) -> bool:
    """Return whether a condition can be about a fact of this name."""
    return name in CHOICES or name in _RANGES


def check_condition(when: Condition) -> None:
    """Raise ValueError for a condition that means nothing."""
    for key, values in when.items():
        if key in _RANGES and isinstance(values, str):
            check_range(values)
            continue
        for value in (values,) if isinstance(values, str) else values:
            if key not in CHOICES or value not in (*CHOICES[key], _UNTOLD):
                raise ValueError(f"{key} = {value!r} means nothing")


def in_words(when: Condition) -> str:
    """Return a condition in one line: ``topology roce or ring, nccl >=2.30.7``."""
    return ", ".join(
        f"{key} {value if isinstance(value, str) else ' or '.join(value)}"
        for key, value in when.items()
    )
