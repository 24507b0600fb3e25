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

from patchkit.cluster.agent.installed import MARKER, read_whole
from patchkit.cluster.agent.wheel_store import WheelLock, find_lacking, share_folder, wheel_folder
from patchkit.durable.atomic import sync
from patchkit.durable.failure import translated
from patchkit.durable.lock import locked
from patchkit.errors import HostError, UsageError
from patchkit.process import attempt
from patchkit.records import record

_FORMER = ".former"  # of a link's name: what it led to before


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallState:
    """What a node has, and has yet to do.

    ``python`` runs the release that the lock is for, "" if none does, ``release`` is python3's own;
    ``name`` is the installation that is asked for, ``current`` the one that the link leads to,
    ``former`` the one before; "" for none. ``foreign`` is what is there that patchkit did not make.
    ``free`` are bytes of the disk, those of a half-made environment included.
    """

    cpu: str
    release: str
    python: str
    has_venv: bool
    has_rsync: bool
    store: str
    name: str
    installed: bool
    current: str
    former: str
    foreign: str
    lacking: tuple[str, ...]
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VenvLinks:
    """The current and the former installation, "" for none, and those that are whole."""

    current: str
    former: str
    whole: tuple[str, ...]


def venv_folder() -> Path:
    """Return the folder of the installations."""
    return share_folder() / "venvs"


def look_at_installation(venv: str, lock: Any) -> dict[str, Any]:
    """Return what this node has of an installation; changes nothing."""
    wanted = record(WheelLock, lock)
    cpu = platform.machine()
    place = venv_folder() / wanted.name_on(cpu)
    python, there = _find_python(wanted.python), read_whole(place) is not None
    link = Path(venv).expanduser()
    nearest = next(each for each in (wheel_folder(), *wheel_folder().parents) if each.exists())
    state = InstallState(
        cpu=cpu,
        release=".".join(map(str, sys.version_info[:2])),
        python=python,
        has_venv=bool(python) and not attempt(python, "-Ic", "import ensurepip, venv").trouble,
        has_rsync=shutil.which("rsync") is not None,
        store=str(wheel_folder()),
        name=place.name,
        installed=there,
        current=leads_to(link),
        former=leads_to(_former_link(link)),
        foreign=_describe_foreign(link) or _describe_foreign(_former_link(link)),
        lacking=() if there else tuple(each.name for each in find_lacking(wanted.on(cpu))),
        free=shutil.disk_usage(nearest).free
        + (0 if (place / MARKER).exists() else _folder_size(place)),
    )
    return asdict(state)


def read_links(venv: str) -> dict[str, Any]:
    """Return where a node's links lead."""
    link = Path(venv).expanduser()
    found = VenvLinks(
        current=leads_to(link),
        former=leads_to(_former_link(link)),
        whole=tuple(sorted(each.parent.name for each in venv_folder().glob(f"*/{MARKER}"))),
    )
    return asdict(found)


def switch_link(venv: str, name: str, back: bool = False) -> str:
    """Let the link lead to an installation, and remember the one before; return that.

    Cut short anywhere, it can be done again: forwards the former is written first, backwards last.
    Raises HostError for an installation that is not whole, UsageError for a link that is not ours.
    """
    place, link = venv_folder() / name, Path(venv).expanduser()
    if os.sep in name or read_whole(place) is None:
        raise HostError(f"{place}: is not a whole installation", hint="patchkit cluster install")
    if foreign := _describe_foreign(link) or _describe_foreign(_former_link(link)):
        raise UsageError(
            foreign, hint='name another path in cluster.toml: venv = "~/patchkit-venv"'
        )
    before = leads_to(link)
    if before == name:
        return leads_to(_former_link(link))
    with translated(at=link):
        link.parent.mkdir(parents=True, exist_ok=True)
        with locked(venv_folder(), patience=10):
            changes = [(link, place)]
            if before:
                changes.insert(1 if back else 0, (_former_link(link), venv_folder() / before))
            for path, target in changes:
                _point_link(path, target)
    return before


def _find_python(release: str) -> str:
    if release == ".".join(map(str, sys.version_info[:2])):
        return sys.executable
    found = shutil.which(f"python{release}")
    # A shim may be there without what it stands for.
    return found if found and not attempt(found, "-Ic", "").trouble else ""


def _former_link(link: Path) -> Path:
    return link.with_name(link.name + _FORMER)


def leads_to(link: Path) -> str:
    """Return the name of the installation that a link leads to; "" for no link of ours."""
    if not link.is_symlink():
        return ""
    target = link.parent / link.readlink()
    return target.name if target.parent == venv_folder() else ""


def _describe_foreign(link: Path) -> str:
    if not os.path.lexists(link) or leads_to(link):
        return ""
    kind = "a link to elsewhere" if link.is_symlink() else "not a link"
    return f"{link}: is {kind}: patchkit did not make it, and does not replace it"


def _point_link(link: Path, target: Path) -> None:
    """Make a link, or let the one that is there lead elsewhere, in one step."""
    fresh = link.with_name(f".{link.name}.{secrets.token_hex(8)}.part")
    fresh.symlink_to(target)
    fresh.replace(link)
    sync(link.parent)


def _folder_size(place: Path) -> int:
    if not place.is_dir():
        return 0
    return sum(each.lstat().st_size for each in place.rglob("*") if not each.is_dir())
