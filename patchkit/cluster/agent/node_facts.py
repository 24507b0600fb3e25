"""Look at a node, from the node: what a plan for a cluster needs to know of it, and its disks."""

from __future__ import annotations

import os
import pwd
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from patchkit.cluster.agent.installation import leads_to
from patchkit.cluster.agent.node_files import config_folder, read_placed
from patchkit.cluster.agent.unit_state import run_for_user
from patchkit.cluster.models.check import quick_check
from patchkit.finding import Level
from patchkit.process import attempt
from patchkit.runtime.host.host import Host
from patchkit.runtime.host.machine_root import LIVE
from patchkit.runtime.host.probe import probe
from patchkit.runtime.host.software import find_ptxas

_UNLIMITED = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOnNode:
    """The weights of a model's folder in bytes, 0 for none, and what is wrong with it first."""

    weights: int
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What a node says of itself.

    ``memlock`` is the limit of its user manager in bytes, None for none; ``files`` what an earlier
    `up` left there, by name; ``ptxas`` that of CUDA 13, "" for none; ``models`` what the folders
    that were asked for hold; ``venv`` is the environment's path, "" without one, and
    ``installation`` its name if `install` made it.
    """

    host: Host
    user: str
    home: str
    python: str
    venv: str
    linger: bool
    memlock: int | None
    systemd: int
    persistent_journal: bool
    installation: str = ""
    ptxas: str = ""
    has: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    models: dict[str, ModelOnNode] = field(default_factory=dict)


def look_at_node(name: str, venv: str, models: Sequence[str] = ()) -> dict[str, Any]:
    """Return the facts of this node as JSON takes them; raises what ``probe`` raises."""
    return asdict(facts_here(name, venv, models))


def facts_here(name: str, venv: str, models: Sequence[str] = ()) -> NodeFacts:
    """Return the facts of this node; raises what ``probe`` raises."""
    home = Path.home()
    place = Path(venv).expanduser()
    python = place / "bin" / "python"
    there = os.access(python, os.X_OK)
    user = pwd.getpwuid(os.getuid()).pw_name
    version = attempt("systemctl", "--version").output.split()
    asked = ("--property=DefaultLimitMEMLOCK", "--value")
    limit = run_for_user("systemctl", "show", *asked).output.strip()
    memlock = int(limit) if limit.isdigit() else _UNLIMITED
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/bin:/bin"
    return NodeFacts(
        host=probe(LIVE, python=str(python) if there else None, environment=os.environ),
        user=user,
        home=str(home),
        python=".".join(map(str, sys.version_info[:3])),
        venv=str(place) if there else "",
        installation=leads_to(place),
        linger=Path("/var/lib/systemd/linger", user).exists(),
        memlock=None if memlock >= _UNLIMITED else memlock,
        systemd=int(version[1]) if len(version) > 1 and version[1].isdigit() else 0,
        persistent_journal=Path("/var/log/journal").is_dir(),
        ptxas=find_ptxas(LIVE, os.environ),
        has=tuple(name for name in ("rsync", "ssh", "systemctl") if shutil.which(name, path=path)),
        files=read_placed(config_folder(name)),
        models={each: model_on_node(each) for each in models},
    )


def model_on_node(folder: str) -> ModelOnNode:
    """Return what the quick check says of a model: no hashes."""
    place = Path(folder).expanduser()
    if not place.is_dir():
        return ModelOnNode(weights=0, problem="no such folder")
    errors = [each for each in quick_check(place).findings if each.level is Level.ERROR]
    files = [each for each in place.glob("*.safetensors") if each.is_file()]
    return ModelOnNode(
        weights=sum(each.stat().st_size for each in files),
        problem=f"{errors[0].where} {errors[0].what}" if errors else "",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRoom:
    """A disk by a folder on it: bytes that a user may write, of all; files that may be made.

    ``files`` is None where the file system has no such limit.
    """

    folder: str
    free: int
    total: int
    files: int | None


def disk_rooms(folders: Sequence[str]) -> Iterator[DiskRoom]:
    """Yield the disks of these folders, each once; of one that is not there that of its parent."""
    seen = set()
    for each in folders:
        place = Path(each).expanduser()
        nearest = next(folder for folder in (place, *place.parents) if folder.exists())
        device = nearest.stat().st_dev
        if device not in seen:
            seen.add(device)
            found = os.statvfs(nearest)
            yield DiskRoom(
                folder=str(nearest),
                free=found.f_bavail * found.f_frsize,
                total=found.f_blocks * found.f_frsize,
                files=found.f_favail if found.f_files else None,
            )
