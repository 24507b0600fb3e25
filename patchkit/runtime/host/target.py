"""Find which target a host is."""

from __future__ import annotations

from patchkit.runtime.host.host import Host
from patchkit.target import targets

_RENAMED = {"10.1": "11.0"}  # Thor's capability, as CUDA 12.9 had it


def target_of(host: Host) -> str:
    """Return the target by the GPU's capability; ``other`` for an unknown one, or none."""
    known = {"{}.{}".format(*each.capability): each.name for each in targets().values()}
    found = [known.get(_RENAMED.get(gpu.capability, gpu.capability), "other") for gpu in host.gpus]
    return found[0] if found else "other"
