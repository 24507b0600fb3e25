"""Read what is known of the devices and their network (recipes/env), and find what a host is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from patchkit.runtime.host.host import Host
from patchkit.runtime.rules.releases import read_env_data
from patchkit.target import targets

_SPARK = ("GB10", "DGX_Spark")  # in the product's name, NVIDIA's or another maker's
_CORES = "Cortex-X925"  # of GB10's CPU
_RENAMED = {"10.1": "11.0"}  # Thor's capability, as CUDA 12.9 had it


def network_facts() -> Mapping[str, Mapping[str, Any]]:
    """Return network.toml: tables ``plan``, ``link`` and ``owners``."""
    return read_env_data("network")


def one_half_fills(speed: int | None) -> bool:
    """Return whether one half of a cage carries all of a link; ``speed`` in Mbit/s, or unknown."""
    return speed is not None and speed <= read_env_data("hardware")["connectx"]["half_gbits"] * 1000


def target_of(host: Host) -> str:
    """Return the target by the GPU's capability; ``other`` for an unknown one, or none."""
    if not host.gpus:
        return "other"
    known = {"{}.{}".format(*target.capability): target.name for target in targets().values()}
    capability = host.gpus[0].capability
    return known.get(_RENAMED.get(capability, capability), "other")


def is_spark(host: Host) -> bool:
    """Return whether the firmware or the CPU names a GB10, whatever is found of its GPU."""
    system = host.system
    return _CORES in system.cpu or any(name in system.product for name in _SPARK)
