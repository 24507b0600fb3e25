"""Ask a node for all that can be compared with others, in one call; runs there.

What cannot be had is an error of that part alone: a node whose systemd is silent still has a
network. ``examine`` asks about the node, ``meet`` about the others as they are seen from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from patchkit.cluster.agent import links, model_print, unit_state
from patchkit.cluster.agent.node_facts import disk_rooms, facts_here
from patchkit.cluster.agent.python_contents import python_contents
from patchkit.cluster.agent.unit_state import group_processes, listeners
from patchkit.cluster.health.node_health import collect_health
from patchkit.cluster.ssh.failure import error_fields
from patchkit.errors import HostError, PatchkitError

_ABOUT_FILE = ("DropInPaths", "NeedDaemonReload")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFile:
    """What systemd has read of a unit: drop-ins of others, and whether its file changed since."""

    drop_ins: tuple[str, ...] = ()
    changed: bool = False


def examine(
    name: str, venv: str, units: Sequence[str], ports: Sequence[int], folders: Sequence[str] = ()
) -> dict[str, Any]:
    """Return this node's facts, state, processes, listeners, disks, Python and time.

    ``errors`` has the fields of an error for each part that is missing. ``began`` and ``ended`` are
    this node's clock.
    """
    began = time.time()

    def whole() -> dict[str, Any]:
        facts = facts_here(name, venv)
        contents = python_contents(facts.venv, facts.host.software)
        return {"facts": asdict(facts), "contents": asdict(contents)}

    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "facts": whole,
        "state": lambda: {"state": unit_state.read_node_state(name, units)},
        "unit_file": lambda: {"unit_file": asdict(_unit_file(units[0]))},
        "processes": lambda: {"processes": [asdict(each) for each in group_processes(name)]},
        "disks": lambda: {"disks": [asdict(each) for each in disk_rooms(folders)]},
        "listeners": lambda: {"listeners": [asdict(each) for each in listeners(ports)]},
        "health": lambda: {"health": _look_at_health(venv, units[0])},
    }
    return {**_ask_together(parts), "began": began, "ended": time.time()}


def meet(
    addresses: Sequence[str], peers: Sequence[tuple[str, str]], models: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the ways to other nodes, for a head its links by ssh, and what models' folders hold.

    ``peers`` are as for ``links``.
    """
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "ways": lambda: {"ways": links.try_ways(addresses)},
        "links": lambda: {"links": links.try_links(peers)},
        "models": lambda: {"models": list(map(model_print.model_print, models))},
    }
    return _ask_together(parts)


def _ask_together(parts: dict[str, Callable[[], dict[str, Any]]]) -> dict[str, Any]:
    """Return what the parts say, asked side by side, and the errors of those that say nothing."""
    found: dict[str, Any] = {}
    errors: dict[str, dict[str, str]] = {}
    with ThreadPoolExecutor(max_workers=len(parts)) as pool:
        started = {name: pool.submit(work) for name, work in parts.items()}
        for name, each in started.items():
            try:
                found |= each.result()
            except PatchkitError as error:
                errors[name] = error_fields(error)
            except (OSError, ValueError) as error:
                errors[name] = error_fields(HostError(f"{name}: {error}"))
    return {**found, "errors": errors}


def _look_at_health(venv: str, unit: str) -> dict[str, Any]:
    """Return what tells of the node's health, with the limits of the unit's process if it runs."""
    place = Path(venv).expanduser()
    there = str(place) if (place / "bin" / "python").exists() else ""
    done = unit_state.run_for_user("systemctl", "show", "--property=MainPID", "--value", "--", unit)
    main = int(done.output) if done.output.strip().isdigit() else 0
    health = collect_health(there, main, done.trouble or f"{unit} does not run")
    return {**health, "manager": not done.trouble}


def _unit_file(unit: str) -> UnitFile:
    shown_keys = ",".join(_ABOUT_FILE)
    words = ("systemctl", "show", f"--property={shown_keys}", "--", unit)
    done = unit_state.run_for_user(*words, check=True)
    shown = dict(line.partition("=")[::2] for line in done.output.splitlines())
    return UnitFile(
        drop_ins=tuple(shown.get("DropInPaths", "").split()),
        changed=shown.get("NeedDaemonReload") == "yes",
    )
