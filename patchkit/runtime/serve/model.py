"""Find what a model is (a preset's, a folder, another one, or a slip), and the memory it gets.

A Spark has one pool that CPU and GPU share, and NVML does not say how large it is; other GPUs have
memory of their own, and NVML says how much. A size that is not known is not checked, and a note
says so.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from patchkit.errors import UsageError
from patchkit.frozen import frozen
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

Environment = Mapping[str, str]
SPARK = "a Spark"  # the device whose memory counts where no other machine's is known
_UNCHECKED = "whether it fits was not checked:"


def choose_preset(
    model: str, named: str | None, environment: Environment
) -> Preset | None:
    """Return the preset called ``named``, or without a name that of the model; None for no preset.

    Raises UsageError for an unknown preset, or a model whose name is only similar to a preset's.
    """
    if named == "none":
        return None
    if named is not None:
        return named_preset(named)

    preset = find_preset(model)
    is_here = Path(model).is_dir() or os.access(
        download_folder(model, environment), os.R_OK
    )
    if preset or is_here or model.lower() in model_recipes():
        return preset

    similar = suggest_presets(model)
    if not similar:
        return None

    raise UsageError(
        f"no model is known as {model}",
        why="it is neither a preset nor here, and like the name of one",
        hint=f"did you mean {' or '.join(similar)}? If there is such a model, add --preset none",
    )


def download_folder(model: str, environment: Environment) -> Path:
    """Return the folder into which huggingface_hub downloads a model; it may not exist."""
    user_cache = f"{environment.get('HOME', '')}/.cache/huggingface"
    home = environment.get("HF_HOME") or user_cache
    cache = environment.get("HF_HUB_CACHE") or f"{home}/hub"

    return Path(cache, "models--" + model.replace("/", "--"))


def weights_gib(model: str, environment: Environment) -> float | None:
    """Return the GiB of a checkpoint in a folder, or of its largest download; None for none."""
    snapshots = download_folder(model, environment).glob("snapshots/*")
    largest = 0

    for folder in (Path(model), *snapshots):
        paths = folder.glob("*.safetensors")
        # Skip links to blobs that are not downloaded yet or not readable.
        files = [path for path in paths if os.access(path, os.R_OK)]
        largest = max(largest, sum(file.stat().st_size for file in files))

    return largest / BYTES_PER_GIB or None


@frozen
class MemoryPool:
    """The memory that a model must fit into; ``gib`` is None where it is unknown.

    ``shared`` says that CPU and GPU share it, else it is the GPU's alone; ``whose`` names the
    device. ``note`` is what a user should know of the check, "" for nothing.
    """

    gib: float | None
    shared: bool
    whose: str
    note: str = ""


def memory_pool(host: Host, node: Node) -> MemoryPool:
    """Return the memory of this host, or the assumed memory of the device of ``node.target``."""
    target = targets().get(host.target)
    is_unified = target is not None and target.unified

    if node.target == DEFAULT_TARGET and not host.gpus:
        return _assumed_pool(node.target, "no GPU is found here")
    if node.target != host.target:
        return _assumed_pool(node.target, f"for {node.target}, which this host is not")
    if is_unified and host.memory is None:
        return _assumed_pool(node.target, "/proc/meminfo cannot be read")
    if is_unified and host.memory:
        gib = host.memory.total / KIB_PER_GIB
        return MemoryPool(gib=gib, shared=True, whose="this host")

    gpu = host.gpus[0]
    if gpu.memory is None:
        note = f"{_UNCHECKED} nvidia-smi does not say how much memory {gpu.name} has"
        return MemoryPool(gib=None, shared=False, whose=gpu.name, note=note)

    gib = gpu.memory / MIB_PER_GIB
    note = (
        f"sized for {gpu.name}, with {gib:.1f} GiB of its own: vLLM's share of it, "
        "since that of presets and rules is for memory which CPU and GPU share"
    )
    return MemoryPool(gib=gib, shared=False, whose=gpu.name, note=note)


def _assumed_pool(device: str, reason: str) -> MemoryPool:
    """Return a Spark's memory for a Spark, unknown memory for another device."""
    if device != DEFAULT_TARGET:
        note = f"{_UNCHECKED} {reason}, and {device}'s memory is not known here"
        return MemoryPool(gib=None, shared=True, whose=device, note=note)

    gib = load_flag_rules().memory.total_gib
    note = f"{reason}: sized for a Spark, with {gib} GiB that CPU and GPU share"
    return MemoryPool(gib=gib, shared=True, whose=SPARK, note=note)
