"""Start and stop this node's units, and wait until what they held is free again."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from typing import Any

from patchkit.cluster.agent import unit_state
from patchkit.cluster.agent.node_files import put_files
from patchkit.cluster.agent.unit_state import run_for_user

_PATIENCE = 200.0  # seconds for systemd to stop a unit, which kills what does not end
_LONG = 3600.0  # seconds of a sleep that nothing but a signal ends
_HOLD = "patchkit-{}-hold.service"  # the unit that lives as long as who holds the group
_SETTLES = 10.0  # seconds for the driver to give memory back after the last process


def place_files(name: str, files: dict[str, str]) -> list[str]:
    """Write a cluster's files and let systemd read them. Raises as ``put_files``, and HostError."""
    changed = put_files(name, files)
    run_for_user("systemctl", "daemon-reload", check=True)
    return changed


def begin_group(name: str, lasting: bool) -> str:
    """Start a group's head, on the head; does not wait for it.

    A ``lasting`` one is enabled for the next boot. Returns the time there, for its journal. Raises
    HostError.
    """
    now, unit = f"@{time.time():.6f}", f"patchkit-{name}.service"
    run_for_user("systemctl", "stop", _HOLD.format(name))
    # What failed before does not count towards the limit of a start that a person asks for.
    run_for_user("systemctl", "reset-failed", unit)
    run_for_user("systemctl", "enable" if lasting else "disable", "--quiet", unit, check=True)
    run_for_user("systemctl", "restart", "--no-block", unit, check=True)
    return now


def hold_group(name: str) -> Iterator[bool]:
    """Yield once, then stay; let systemd stop the group when this process ends, however it does.

    On the head. Raises HostError.
    """
    ask, unit = f"ExecStopPost=-{shutil.which('systemctl')} --user", f"patchkit-{name}.service"
    how = (
        *(f"--unit={_HOLD.format(name)}", "--collect", "--quiet"),
        *(f"--property={ask} {verb} {unit}" for verb in ("stop", "reset-failed")),
        f"--property=TimeoutStopSec={_PATIENCE:.0f}",
    )
    lives = ("tail", f"--pid={os.getpid()}", "--follow", os.devnull)
    run_for_user("systemd-run", *how, *lives, check=True)
    yield True
    while True:
        time.sleep(_LONG)


def end_group(name: str, units: list[str], disable: bool) -> dict[str, Any]:
    """Stop a node's units, wait until the group has no process and its memory is back: there."""
    state = unit_state.read_node_state(name, units)
    running = [unit["unit"] for unit in state["units"] if unit["active"] != "inactive"]
    if disable:
        run_for_user("systemctl", "disable", "--quiet", units[0])
    run_for_user("systemctl", "stop", _HOLD.format(name), timeout=_PATIENCE)
    done = run_for_user("systemctl", "stop", *(running or units[:1]), timeout=_PATIENCE)
    # A unit that was never there is stopped.
    if done.trouble and "not loaded" not in done.errors:
        raise done.error(hint="systemctl --user status")
    run_for_user("systemctl", "reset-failed", *units)
    deadline, last = time.monotonic() + _SETTLES, -1
    while True:
        state = unit_state.read_node_state(name, units)
        free = (state["memory"] or {}).get("available", 0)
        if time.monotonic() > deadline or (not state["processes"] and free <= last >= 0):
            return state
        last = free
        time.sleep(0.5)
