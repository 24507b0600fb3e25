"""Cut builds off from the network: what they need was fetched before, and locked."""

from __future__ import annotations

import os
import shutil
from functools import cache

from patchkit.process import attempt


def cut_off(command: list[str]) -> list[str]:
    """Return the command in an empty network namespace, or as it is if none can be made."""
    return [*_prefix(), *command]


def can_cut_off() -> bool:
    """Check whether this machine lets us make network namespaces."""
    return bool(_prefix())


def network() -> str:
    """Say in a sentence whether a build here is cut off.

    It is not part of a wheel: what is compiled is the same either way, since every source and tool
    was fetched before and is known by its digest.
    """
    if can_cut_off():
        return "cut off from the network, in a namespace of its own"
    return (
        "not cut off from the network: this machine lets nobody make network namespaces (Ubuntu: "
        "kernel.apparmor_restrict_unprivileged_userns)"
    )


@cache
def _prefix() -> tuple[str, ...]:
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()
    # unshare(1): who is not root makes a network namespace within a user namespace alone.
    rights = () if os.geteuid() == 0 else ("--map-current-user",)
    prefix = (unshare, "--net", *rights, "--")
    # Tried, since AppArmor, sysctls and containers can each forbid it.
    return () if attempt(*prefix, "true").trouble else prefix
