"""Find which target a host is."""

from __future__ import annotations

from patchkit.runtime.host.host import Host
from patchkit.target import targets

_SPARK = ("GB10", "DGX_Spark")  # in the product's name, NVIDIA's or another maker's
_CORES = "Cortex-X925"  # of GB10's CPU
_RENAMED = {"10.1": "11.0"}  # Thor's capability, as CUDA 12.9 had it


def target_of(host: Host) -> str:
    """Return the target by the GPU's capability; ``other`` for an unknown one, or none."""
    known = {"{}.{}".format(*each.capability): each.name for each in targets().values()}
    found = [known.get(_RENAMED.get(gpu.capability, gpu.capability), "other") for gpu in host.gpus]
    return found[0] if found else "other"


def is_spark(host: Host) -> bool:
    """Return whether the firmware or the CPU names a GB10, whatever is found of its GPU."""
    system = host.system
    return _CORES in system.cpu or any(each in system.product for each in _SPARK)
