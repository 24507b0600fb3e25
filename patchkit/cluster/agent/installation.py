"""Install wheels on a node: what is there, a new environment whole or not at all, and its link."""

from __future__ import annotations

import csv
import json
import os
import platform
import secrets
import shutil
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from patchkit.cluster.agent.node_files import run_for_user, unit_folder
from patchkit.cluster.ssh.rsync import Copying, copy_files, require_rsync
from patchkit.digests import digest, sha256_of
from patchkit.durable.atomic import replacing, sync
from patchkit.durable.lock import locked
from patchkit.durable.staging import is_full
from patchkit.errors import (
    HashMismatchError,
    HostError,
    PatchkitError,
    StorageError,
    UsageError,
    translated,
)
from patchkit.follow import Follow
from patchkit.process import attempt
from patchkit.quoting import quoted
from patchkit.reading import read_text
from patchkit.records import RecordError, Sha256, matching, read_json, record
from patchkit.runtime.host.gpu import read_gpus
from patchkit.runtime.host.host import Gpu
from patchkit.runtime.host.machine_root import LIVE, Reader
from patchkit.runtime.python.distributions import distributions, header
from patchkit.runtime.python.libnccl import loaded

MARKER = "patchkit-installed.json"
"""In an environment that is whole: what was found in it."""

_FILE = r"[A-Za-z0-9][\w.+!-]*\.whl"
_LIST = "requirements.txt"
_ERROR = "ERROR: "  # before what pip says last
_AGAIN = "patchkit cluster install"
# What a lock names, with no index and no settings.
_PIP = (
    *("-I", "-m", "pip", "--isolated", "install"),
    *("--disable-pip-version-check", "--no-cache-dir", "--no-input"),
    *("--no-index", "--require-hashes", "--no-deps"),
)
_PATIENCE = 20.0  # seconds for the pip of a launcher that was killed
_LARGEST = 32 << 20  # bytes of a RECORD


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWheel:
    """A wheel as a wheelhouse lists it; ``unpacked`` is the size of its members in bytes."""

    name: Annotated[str, matching(_FILE, "the name of a wheel")]
    sha256: Sha256
    size: int
    unpacked: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelLock:
    """Hold what nodes install: the text of requirements.txt, the wheels, and for which Python.

    ``cpu`` is the one that all wheels are for, "" for any; ``target`` the device that they were
    patched or built for, "" for several; with ``native`` they hold no code for others.
    """

    requirements: str
    cpu: str
    python: Annotated[str, matching(r"3\.\d+", "a release of Python")]
    wheels: tuple[NodeWheel, ...]
    target: str = ""
    native: bool = False

    @property
    def id(self) -> str:
        """Return the name of the installation: the same one for the same bytes and Python."""
        rows = sorted(f"{wheel.name} {wheel.sha256}" for wheel in self.wheels)
        return digest("\n".join([self.requirements, *rows, self.python]))[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallState:
    """What a node has: the wheels that it lacks, where its link leads, "" for nowhere, its GPU."""

    store: str
    installed: bool
    current: str
    lacking: tuple[str, ...]
    gpu: Gpu | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledVenv:
    """A whole environment: its projects' versions, and the libnccl that torch loads.

    ``record`` is a digest over all RECORDs, without what depends on the folder: scripts.
    """

    name: str
    folder: str
    python: str
    versions: Mapping[str, str]
    record: str
    nccl: str = ""
    nccl_version: str = ""
    nccl_sha256: str = ""
    warnings: tuple[str, ...] = ()


def share_folder(name: str) -> Path:
    """Return a folder of what patchkit keeps for this user: ``wheelhouse`` or ``venvs``."""
    return Path.home() / ".local" / "share" / "patchkit" / name


def look_at_installation(venv: str, lock: Any) -> InstallState:
    """Return what this node has of an installation; raises what stands in its way."""
    house, store = record(WheelLock, lock), share_folder("wheelhouse")
    current = leads_to(Path(venv).expanduser(), check=True)
    installed = _read_whole(share_folder("venvs") / house.id) is not None
    lacking: list[str] = []
    if not installed:
        _find_python(house)
        for (
            wheel
        ) in house.wheels:  # those that are not here, or whose bytes are others: a part
            path = store / wheel.name
            there = (
                path.is_file()
                and not path.is_symlink()
                and path.stat().st_size == wheel.size
            )
            if not there or sha256_of(path) != wheel.sha256:
                lacking.append(wheel.name)
        if lacking:
            require_rsync()
    return InstallState(
        store=str(store),
        installed=installed,
        current=current,
        lacking=tuple(lacking),
        gpu=next(iter(read_gpus(Reader(LIVE, None))), None),
    )


def _find_python(house: WheelLock) -> str:
    """Return the Python that an environment is made with. Raises HostError if there is none."""
    if house.cpu not in ("", platform.machine()):
        raise HostError(
            f"is a machine of {platform.machine()}; the wheels are for {house.cpu}"
        )
    release = ".".join(map(str, sys.version_info[:2]))
    python = sys.executable if house.python == release else f"python{house.python}"
    # A shim may be there without what it stands for.
    if attempt(python, "-Ic", "").trouble:
        raise HostError(
            f"has Python {release}, and the wheels are for {house.python}",
            hint=quoted("patchkit", "wheelhouse", "fill", "--python-version", release),
        )
    if attempt(python, "-Ic", "import ensurepip, venv").trouble:
        hint = quoted("sudo", "apt", "install", f"python{house.python}-venv")
        raise HostError("Python here cannot make environments", hint=hint)
    return python


def send_wheels(
    folder: str, names: Sequence[str], ssh: Sequence[str], destination: str, target: str
) -> Copying:
    """Copy files of a folder, as ``copy_files`` does."""
    sources = [Path(folder).expanduser() / name for name in names]
    # What is sent has other bytes there than here, whatever size and time say: a part of it.
    options = ("-tp", "--ignore-times", "--mkpath")
    total = sum(source.stat().st_size for source in sources)
    return (yield from copy_files(options, sources, total, ssh, destination, target))


def install_wheels(lock: Any) -> Generator[tuple[int, int], None, InstalledVenv]:
    """Make the environment of a lock beside others, or find it; yield the progress in bytes."""
    house, folder = record(WheelLock, lock), share_folder("venvs")
    place, size = folder / house.id, sum(wheel.unpacked for wheel in house.wheels)
    with translated(at=folder):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, _PATIENCE):
        if found := _read_whole(place):
            return found
        _require_unused(place)
        try:
            shutil.rmtree(place, ignore_errors=True)
            made = attempt(_find_python(house), "-I", "-m", "venv", place, timeout=None)
            if made.trouble:
                raise made.error(hint=_AGAIN)
            (place / _LIST).write_text(house.requirements, encoding="utf-8")
            words = (
                *_PIP,
                "--find-links",
                share_folder("wheelhouse"),
                "-r",
                place / _LIST,
            )
            begun, count = 0, len(house.wheels) + 1
            environment = {**os.environ, "LC_ALL": "C.UTF-8"}
            with Follow(place / "bin" / "python", *words, env=environment) as pip:
                for line in pip:
                    begun += line.startswith("Processing ")
                    yield size * min(begun, count - 1) // count, size
            if pip.done.trouble:
                lines = [
                    line
                    for line in pip.done.output.split("\n")
                    if line.startswith(_ERROR)
                ]
                what = "pip: " + (lines[0] if lines else pip.done.trouble).removeprefix(
                    _ERROR
                )
                wrong = "THESE PACKAGES DO NOT MATCH THE HASHES" in pip.done.output
                raise (HashMismatchError if wrong else HostError)(
                    what, hint="patchkit verify"
                )
            os.sync()
            found = _describe_venv(place, [wheel.name for wheel in house.wheels])
            with translated(at=place), replacing(place / MARKER) as file:
                file.write(json.dumps(asdict(found), indent=1).encode())
        except (OSError, PatchkitError) as error:
            if not is_full(folder):
                raise
            shutil.rmtree(place, ignore_errors=True)
            raise StorageError(
                f"{folder}: the disk is full; the environment takes {size / 1e6:,.0f} MB",
                why=str(getattr(error, "what", error)),
                hint="make room there, then run the same command again",
            ) from None
    return found


def _require_unused(place: Path) -> None:
    """Raise HostError for an environment that is to be made anew while a unit serves from it."""
    files = unit_folder().glob("patchkit-*.service") if place.exists() else ()
    users = [
        file.name
        for file in files
        if f"{place}/bin/" in read_text(file, limit=_LARGEST, follow=False)
    ]
    active = (
        run_for_user("systemctl", "is-active", *users).output.split() if users else []
    )
    if "active" in active or "activating" in active:
        raise HostError(
            f"{place}: another pip changed it, and {users[0]} runs from it",
            why="it is made anew, and what runs would lose its files",
            hint="patchkit down",
        )


def _describe_venv(place: Path, wheels: Iterable[str]) -> InstalledVenv:
    """Return what is in an environment. Raises HostError for a wheel that is not."""
    (site,) = place.glob("lib/python3.*/site-packages")
    homes = distributions([str(site)])
    projects = {name.partition("-")[0].lower().replace(".", "_") for name in wheels}
    if absent := sorted(projects - {*homes}):
        raise HostError(f"{place}: {absent[0]} is not installed", hint=_AGAIN)
    fields: dict[str, Any] = {}
    if "torch" in homes:
        answer = loaded(str(place / "bin" / "python"), os.environ)
        fields["warnings"] = answer.warnings
        for copy in answer.copies:
            if copy.path == answer.torch.path:
                fields["nccl"] = copy.path.removeprefix(f"{place}/")
                fields |= {"nccl_version": copy.version, "nccl_sha256": copy.sha256}
    return InstalledVenv(
        name=place.name,
        folder=str(place),
        python=site.parent.name.removeprefix("python"),
        versions={name: header(homes[name][0], "Version") for name in sorted(projects)},
        record=_digest_records(site, projects),
        **fields,
    )


def _read_whole(place: Path) -> InstalledVenv | None:
    """Return what is in an environment that was made whole; None if another pip changed it."""
    try:
        found = read_json(
            InstalledVenv, read_text(place / MARKER, limit=_LARGEST, follow=False)
        )
        (site,) = place.glob("lib/python3.*/site-packages")
    except (OSError, ValueError, RecordError, PatchkitError):
        return None
    same = (
        found.name == place.name
        and _digest_records(site, found.versions) == found.record
    )
    return found if same else None


def _digest_records(site: Path, projects: Iterable[str]) -> str:
    homes = distributions([str(site)])
    rows = (
        f"{name} {digest_record(homes[name][0])}" for name in projects if name in homes
    )
    return digest("\n".join(sorted(rows)))


def digest_record(home: Path) -> str:
    """Return a digest over a RECORD, "" if there is none.

    Scripts depend on the folder, and the notes in .dist-info on where a wheel came from.
    """
    try:
        rows = list(csv.reader(read_text(home / "RECORD", limit=_LARGEST).splitlines()))
    except (PatchkitError, csv.Error):
        return ""
    own = ("../", f"{home.name}/")
    hashed = [
        row for row in rows if len(row) > 1 and row[1] and not row[0].startswith(own)
    ]
    kept = sorted(",".join(row[:2]) for row in hashed)
    return digest("\n".join(kept)) if kept else ""


def switch_link(venv: str, name: str) -> None:
    """Let the link lead to an installation, in one step.

    Raises HostError for an installation that is not whole, UsageError for a link that is not ours.
    """
    folder, link = share_folder("venvs"), Path(venv).expanduser()
    if os.sep in name or _read_whole(folder / name) is None:
        raise HostError(f"{folder / name}: is not a whole installation", hint=_AGAIN)
    if leads_to(link, check=True) != name:
        with translated(at=link):
            link.parent.mkdir(parents=True, exist_ok=True)
            with locked(folder, patience=10):
                fresh = link.with_name(f".{link.name}.{secrets.token_hex(8)}.part")
                fresh.symlink_to(folder / name)
                fresh.replace(link)
                sync(link.parent)


def environment_of(link: Path) -> Path:
    """Return the environment that a link leads to; the path itself if it is no link of ours."""
    name = leads_to(link)
    return share_folder("venvs") / name if name else link


def describe_successor(link: str, served: str) -> str:
    """Return which installation a link leads to now, if a unit serves another one; else ""."""
    current = leads_to(Path(link))
    place = Path(served)
    if not current or current == place.name:
        return ""
    installed = _describe_release(share_folder("venvs") / current)
    return f"{installed} is installed, and {_describe_release(place)} serves until the next `up`"


def _describe_release(place: Path) -> str:
    """Return the release of vLLM in an environment that `install` made, and its name."""
    found = _read_whole(place)
    release = found.versions.get("vllm", "") if found else ""
    return f"vLLM {release} ({place.name})" if release else place.name


def leads_to(link: Path, *, check: bool = False) -> str:
    """Return the name of the installation that a link leads to; "" for no link of ours.

    With ``check`` raises UsageError for what is there and is none.
    """
    target = link.parent / link.readlink() if link.is_symlink() else link
    if target != link and target.parent == share_folder("venvs"):
        return target.name
    if check and os.path.lexists(link):
        raise UsageError(
            f"{link}: patchkit did not make it, and does not replace it",
            hint='name another path in cluster.toml: venv = "~/patchkit-venv"',
        )
    return ""
