"""Find the preset, the folder and the memory of a model.

A Spark has one memory that CPU and GPU share, and NVML does not tell its size. Other GPUs have
their own memory, and NVML tells its size. If a size is unknown, it is not checked, and a note says
so.
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
SPARK = "a Spark"  # the device whose memory is assumed if that of the host is not known
_UNCHECKED = "whether it fits was not checked:"


def choose_preset(
    model: str, named: str | None, environment: Environment
) -> Preset | None:
    """Return the preset for a model, None if it has none.

    ``named`` is the preset that the user names: ``none`` means no preset, None means the model's.
    Raises UsageError for an unknown preset, or if the model is unknown and its name is similar to
    that of a preset.
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
    """Return the folder into which huggingface_hub downloads a model. It need not exist."""
    user_cache = f"{environment.get('HOME', '')}/.cache/huggingface"
    home = environment.get("HF_HOME") or user_cache
    cache = environment.get("HF_HUB_CACHE") or f"{home}/hub"

    return Path(cache, "models--" + model.replace("/", "--"))


def weights_gib(model: str, environment: Environment) -> float | None:
    """Return the GiB of weights in a model's folder or largest snapshot, None if there are none.

    Only files named ``*.safetensors`` count.
    """
    snapshots = download_folder(model, environment).glob("snapshots/*")
    largest = 0

    for folder in (Path(model), *snapshots):
        paths = folder.glob("*.safetensors")
        # Skip links to blobs that are not downloaded yet or cannot be read.
        files = [path for path in paths if os.access(path, os.R_OK)]
        largest = max(largest, sum(file.stat().st_size for file in files))

    return largest / BYTES_PER_GIB or None


@frozen
class MemoryPool:
    """The memory that a model must fit into; ``gib`` is None if its size is unknown.

    ``shared`` says that CPU and GPU share it; otherwise it is the GPU's alone. ``whose`` names the
    device. ``note`` tells a user which size was used and why, "" for the host's own size.
    """

    gib: float | None
    shared: bool
    whose: str
    note: str = ""


def memory_pool(host: Host, node: Node) -> MemoryPool:
    """Return the memory of the host, or an assumed one if the node is for another device.

    It is also assumed if the host does not tell the size of its memory or has no GPU.
    """
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
    """Return the known size for a Spark, and an unknown size for another device."""
    if device != DEFAULT_TARGET:
        note = f"{_UNCHECKED} {reason}, and {device}'s memory is not known here"
        return MemoryPool(gib=None, shared=True, whose=device, note=note)

    gib = load_flag_rules().memory.total_gib
    note = f"{reason}: sized for a Spark, with {gib} GiB that CPU and GPU share"
    return MemoryPool(gib=gib, shared=True, whose=SPARK, note=note)
