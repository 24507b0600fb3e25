"""Say which installation a node uses, and change that with a link. Runs on the node."""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from patchkit.cluster.agent.venv_install import read_whole
from patchkit.cluster.agent.wheel_store import WheelLock, find_lacking, share_folder
from patchkit.durable.atomic import sync
from patchkit.durable.failure import translated
from patchkit.durable.lock import locked
from patchkit.errors import HostError, UsageError
from patchkit.process import attempt
from patchkit.records import record


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallState:
    """What a node has, and has yet to do.

    ``python`` runs the release that the lock is for, "" if none does, ``release`` is python3's own;
    ``installed`` says that the installation is there, ``current`` is the one that the link leads
    to, "" for none. ``foreign`` is what is there that patchkit did not make. ``free`` are bytes of
    the disk.
    """

    cpu: str
    release: str
    python: str
    has_venv: bool
    has_rsync: bool
    store: str
    installed: bool
    current: str
    foreign: str
    lacking: tuple[str, ...]
    free: int


def look_at_installation(venv: str, lock: Any) -> dict[str, Any]:
    """Return what this node has of an installation; changes nothing."""
    house, store = record(WheelLock, lock), share_folder("wheelhouse")
    release = ".".join(map(str, sys.version_info[:2]))
    python: str | None = sys.executable
    if house.python != release:
        python = shutil.which(f"python{house.python}")
        # A shim may be there without what it stands for.
        if python and attempt(python, "-Ic", "").trouble:
            python = None
    installed = read_whole(share_folder("venvs") / house.id) is not None
    link = Path(venv).expanduser()
    nearest = next(folder for folder in (store, *store.parents) if folder.exists())
    state = InstallState(
        cpu=platform.machine(),
        release=release,
        python=python or "",
        has_venv=bool(python and not attempt(python, "-Ic", "import ensurepip, venv").trouble),
        has_rsync=shutil.which("rsync") is not None,
        store=str(store),
        installed=installed,
        current=leads_to(link),
        foreign=_describe_foreign(link),
        lacking=() if installed else find_lacking(house.wheels),
        free=shutil.disk_usage(nearest).free,
    )
    return asdict(state)


def switch_link(venv: str, name: str) -> str:
    """Let the link lead to an installation, in one step; return the name of the one before.

    Raises HostError for an installation that is not whole, UsageError for a link that is not ours.
    """
    folder, link = share_folder("venvs"), Path(venv).expanduser()
    if os.sep in name or read_whole(folder / name) is None:
        raise HostError(
            f"{folder / name}: is not a whole installation", hint="patchkit cluster install"
        )
    if foreign := _describe_foreign(link):
        raise UsageError(
            foreign, hint='name another path in cluster.toml: venv = "~/patchkit-venv"'
        )
    before = leads_to(link)
    if before != name:
        with translated(at=link):
            link.parent.mkdir(parents=True, exist_ok=True)
            with locked(folder, patience=10):
                fresh = link.with_name(f".{link.name}.{secrets.token_hex(8)}.part")
                fresh.symlink_to(folder / name)
                fresh.replace(link)
                sync(link.parent)
    return before


def leads_to(link: Path) -> str:
    """Return the name of the installation that a link leads to; "" for no link of ours."""
    if not link.is_symlink():
        return ""
    target = link.parent / link.readlink()
    return target.name if target.parent == share_folder("venvs") else ""


def _describe_foreign(link: Path) -> str:
    if not os.path.lexists(link) or leads_to(link):
        return ""
    kind = "a link to elsewhere" if link.is_symlink() else "not a link"
    return f"{link}: is {kind}: patchkit did not make it, and does not replace it"
