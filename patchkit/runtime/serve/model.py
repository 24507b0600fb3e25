"""Find what a model is (a preset's, a folder, another one, or a slip), and the memory it gets.

A Spark has one pool that CPU and GPU share, and NVML does not say how large it is; other GPUs have
memory of their own, which it does say. What is not known is not checked, and said.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from patchkit.errors import UsageError
from patchkit.runtime.host.host import Host
from patchkit.runtime.node.decision import Node
from patchkit.runtime.rules.flags import load_flag_rules
from patchkit.runtime.rules.presets import (
    Preset,
    find_preset,
    model_recipes,
    named_preset,
    suggest_presets,
)
from patchkit.target import DEFAULT_TARGET, targets
from patchkit.units import BYTES_PER_GIB, KIB_PER_GIB, MIB_PER_GIB

SPARK = "a Spark"  # whose memory is meant where no other machine's is known


def preset_of(
    model: str, named: str | None, environment: Mapping[str, str]
) -> Preset | None:
    """Return the preset of that name, or the model's; None for none. Raises UsageError."""
    if named is not None:
        return None if named == "none" else named_preset(named)
    preset = find_preset(model)
    there = Path(model).is_dir() or model.lower() in model_recipes()
    if preset or there or os.access(download(model, environment), os.R_OK):
        return preset
    if meant := suggest_presets(model):
        raise UsageError(
            f"no model is known as {model}",
            why="it is neither a preset nor here, and like the name of one",
            hint=f"did you mean {' or '.join(meant)}? If there is such a model, add --preset none",
        )
    return preset


def download(model: str, environment: Mapping[str, str]) -> Path:
    """Return the folder into which huggingface_hub downloads a model, there or not."""
    home = (
        environment.get("HF_HOME")
        or f"{environment.get('HOME', '')}/.cache/huggingface"
    )
    cache = environment.get("HF_HUB_CACHE") or f"{home}/hub"
    return Path(cache, "models--" + model.replace("/", "--"))


def weights_gib(model: str, environment: Mapping[str, str]) -> float | None:
    """Return the GiB of a checkpoint in a folder, or of its largest download; None for none."""
    sizes = [0]
    for folder in (Path(model), *download(model, environment).glob("snapshots/*")):
        if os.access(folder, os.R_OK | os.X_OK):
            # Links of a snapshot to blobs that are not there yet, or are somebody else's.
            files = (
                file
                for file in folder.glob("*.safetensors")
                if os.access(file, os.R_OK)
            )
            sizes.append(sum(file.stat().st_size for file in files))
    return max(sizes) / BYTES_PER_GIB or None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPool:
    """``gib`` is None where it is unknown; ``shared`` by CPU and GPU, else the GPU's own.

    ``whose`` names the device. ``note`` is what a user should know of the check, "" for nothing.
    """

    gib: float | None
    shared: bool
    whose: str
    note: str = ""


def memory_pool(host: Host, node: Node) -> MemoryPool:
    """Return the memory of this host's GPU, or of the device that the command line is for."""
    here, device, why = host.target, node.target, ""
    budget = load_flag_rules().memory
    unified = here in targets() and targets()[here].unified
    unknown = "whether it fits was not checked:"
    if device == DEFAULT_TARGET and not host.gpus:
        why = "no GPU is found here"
    elif device != here:
        why = f"for {device}, which this host is not"
    elif unified and host.memory is None:
        why = "/proc/meminfo cannot be read"
    if why and device == DEFAULT_TARGET:
        note = f"{why}: sized for a Spark, with {budget.total_gib} GiB that CPU and GPU share"
        return MemoryPool(gib=budget.total_gib, shared=True, whose=SPARK, note=note)
    if why:
        note = f"{unknown} {why}, and {device}'s memory is not known here"
        return MemoryPool(gib=None, shared=True, whose=device, note=note)
    if unified and host.memory:
        return MemoryPool(
            gib=host.memory.total / KIB_PER_GIB, shared=True, whose="this host"
        )
    gpu = host.gpus[0]
    if gpu.memory is None:
        note = f"{unknown} nvidia-smi does not say how much memory {gpu.name} has"
        return MemoryPool(gib=None, shared=False, whose=gpu.name, note=note)
    own = gpu.memory / MIB_PER_GIB
    note = (
        f"sized for {gpu.name}, with {own:.1f} GiB of its own: vLLM's share of it, "
        "since that of presets and rules is for memory which CPU and GPU share"
    )
    return MemoryPool(gib=own, shared=False, whose=gpu.name, note=note)
