"""Install wheels on a node: make an environment, whole or not at all, and let a link lead to it."""

from __future__ import annotations

import csv
import json
import os
import platform
import secrets
import shutil
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
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
from patchkit.frozen import frozen
from patchkit.process import attempt
from patchkit.quoting import quoted
from patchkit.reading import read_text
from patchkit.records import RecordError, Sha256, matching, read_json, record
from patchkit.runtime.host.gpu import read_gpus
from patchkit.runtime.host.host import Gpu
from patchkit.runtime.host.machine_root import LIVE, Reader
from patchkit.runtime.python.distributions import (
    find_distributions,
    read_header,
)
from patchkit.runtime.python.libnccl import find_loaded_nccl

MARKER = "patchkit-installed.json"
"""The file in a whole environment that describes it: an ``InstalledVenv``."""

_FILE = r"[A-Za-z0-9][\w.+!-]*\.whl"
_LIST = "requirements.txt"
_ERROR = "ERROR: "  # begins the last line of pip
_AGAIN = "patchkit cluster install"
# Installs what a lock names, with no index and no settings.
_PIP = (
    "-I",
    "-m",
    "pip",
    "--isolated",
    "install",
    "--disable-pip-version-check",
    "--no-cache-dir",
    "--no-input",
    "--no-index",
    "--require-hashes",
    "--no-deps",
)
_PATIENCE = 20.0  # seconds for the pip of a launcher that was killed
_LARGEST = 32 << 20  # bytes of a RECORD


@frozen
class NodeWheel:
    """A wheel as a wheelhouse lists it; ``unpacked`` is the size of its members in bytes."""

    name: Annotated[str, matching(_FILE, "the name of a wheel")]
    sha256: Sha256
    size: int
    unpacked: int


@frozen
class WheelLock:
    """The input of an installation: the text of requirements.txt, the wheels, and their Python.

    ``cpu`` is the one that all wheels are for, "" for any; ``target`` the device that they were
    patched or built for, "" for several; with ``native`` they hold no code for other devices.
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
        content = "\n".join([self.requirements, *rows, self.python])
        return digest(content)[:12]


@frozen
class InstallState:
    """A node before an installation: ``current`` is the one that its link leads to, "" for none.

    ``store`` is the folder of its wheels, ``lacking`` are the wheels that it has not yet.
    """

    store: str
    installed: bool
    current: str
    lacking: tuple[str, ...]
    gpu: Gpu | None = None


@frozen
class InstalledVenv:
    """A whole environment: its projects' versions, and the libnccl that torch loads.

    ``record`` is a digest over all RECORDs, without scripts, which depend on the folder.
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
    """Return a folder that patchkit keeps for this user: ``wheelhouse``, ``venvs``, ``images``."""
    return Path.home() / ".local" / "share" / "patchkit" / name


def look_at_installation(venv: str, lock: Any) -> InstallState:
    """Return the state of this node before an installation; raise what stands in its way."""
    house = record(WheelLock, lock)
    store = share_folder("wheelhouse")
    current = leads_to(Path(venv).expanduser(), check=True)
    installed = _read_whole(share_folder("venvs") / house.id) is not None

    lacking: list[str] = []
    if not installed:
        _find_python(house)
        wheels = (wheel for wheel in house.wheels if not _is_stored(wheel, store))
        lacking = [wheel.name for wheel in wheels]
    if lacking:
        require_rsync()

    gpus = read_gpus(Reader(LIVE, None))
    return InstallState(
        store=str(store),
        installed=installed,
        current=current,
        lacking=tuple(lacking),
        gpu=next(iter(gpus), None),
    )


def _is_stored(wheel: NodeWheel, store: Path) -> bool:
    """Return whether a wheel is in a folder, whole: a part of it may be there."""
    path = store / wheel.name
    if path.is_symlink() or not path.is_file():
        return False
    if path.stat().st_size != wheel.size:
        return False
    return sha256_of(path) == wheel.sha256


def _find_python(house: WheelLock) -> str:
    """Return the Python that an environment is made with. Raises HostError if there is none."""
    machine = platform.machine()
    if house.cpu not in ("", machine):
        raise HostError(f"is a machine of {machine}; the wheels are for {house.cpu}")

    release = ".".join(map(str, sys.version_info[:2]))
    python = sys.executable if house.python == release else f"python{house.python}"
    # A shim on PATH may stand for a Python that is not installed.
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
    folder: str,
    names: Sequence[str],
    ssh: Sequence[str],
    destination: str,
    target: str,
) -> Copying:
    """Copy files of a folder, as ``copy_files`` does."""
    sources = [Path(folder).expanduser() / name for name in names]
    # The target holds a part of each file, whatever its size and time say.
    options = ("-tp", "--ignore-times", "--mkpath")
    total = sum(source.stat().st_size for source in sources)
    return (yield from copy_files(options, sources, total, ssh, destination, target))


def install_wheels(lock: Any) -> Generator[tuple[int, int], None, InstalledVenv]:
    """Make the environment of a lock beside others, or find it; yield the progress in bytes."""
    house = record(WheelLock, lock)
    folder = share_folder("venvs")
    place = folder / house.id
    size = sum(wheel.unpacked for wheel in house.wheels)

    with translated(at=folder):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, _PATIENCE):
        if venv := _read_whole(place):
            return venv
        _require_unused(place)

        try:
            return (yield from _make_venv(place, house, size))
        except (OSError, PatchkitError) as error:
            if not is_full(folder):
                raise
            shutil.rmtree(place, ignore_errors=True)
            raise StorageError(
                f"{folder}: the disk is full; the environment takes {size / 1e6:,.0f} MB",
                why=str(getattr(error, "what", error)),
                hint="make room there, then run the same command again",
            ) from None


def _make_venv(
    place: Path,
    house: WheelLock,
    size: int,
) -> Generator[tuple[int, int], None, InstalledVenv]:
    """Make an environment in place of anything there; the marker is its last file."""
    shutil.rmtree(place, ignore_errors=True)
    python = _find_python(house)
    done = attempt(python, "-I", "-m", "venv", place, timeout=None)
    if done.trouble:
        raise done.error(hint=_AGAIN)
    (place / _LIST).write_text(house.requirements, encoding="utf-8")
    yield from _run_pip(place, len(house.wheels), size)

    os.sync()
    venv = _describe_venv(place, [wheel.name for wheel in house.wheels])
    description = json.dumps(asdict(venv), indent=1)
    with translated(at=place), replacing(place / MARKER) as file:
        file.write(description.encode())
    return venv


def _run_pip(
    place: Path,
    wheels: int,
    size: int,
) -> Iterator[tuple[int, int]]:
    """Install the list of an environment; yield the bytes so far, by the wheels begun, of all."""
    links = ("--find-links", share_folder("wheelhouse"))
    words = (place / "bin" / "python", *_PIP, *links, "-r", place / _LIST)

    begun = 0
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    with Follow(*words, env=environment) as pip:
        for line in pip:
            begun += line.startswith("Processing ")
            yield size * min(begun, wheels) // (wheels + 1), size
    if not pip.done.trouble:
        return

    output = pip.done.output
    errors = [line for line in output.split("\n") if line.startswith(_ERROR)]
    text = (errors or [pip.done.trouble])[0].removeprefix(_ERROR)
    is_other = "THESE PACKAGES DO NOT MATCH THE HASHES" in output
    kind = HashMismatchError if is_other else HostError
    raise kind(f"pip: {text}", hint="patchkit verify")


def _require_unused(place: Path) -> None:
    """Raise HostError for a damaged environment that a unit serves from."""
    if not place.exists():
        return

    users = [
        file.name
        for file in unit_folder().glob("patchkit-*.service")
        if f"{place}/bin/" in read_text(file, limit=_LARGEST, follow=False)
    ]
    if not users:
        return

    states = run_for_user("systemctl", "is-active", *users).output.split()
    if "active" in states or "activating" in states:
        raise HostError(
            f"{place}: another pip changed it, and {users[0]} runs from it",
            why="it is made anew, and what runs would lose its files",
            hint="patchkit down",
        )


def _describe_venv(place: Path, wheels: Iterable[str]) -> InstalledVenv:
    """Return the content of an environment. Raises HostError for a wheel that is missing."""
    (site,) = place.glob("lib/python3.*/site-packages")
    homes = find_distributions([str(site)])
    names = (wheel.partition("-")[0] for wheel in wheels)
    projects = {name.lower().replace(".", "_") for name in names}
    if absent := sorted(projects - {*homes}):
        raise HostError(f"{place}: {absent[0]} is not installed", hint=_AGAIN)

    fields: dict[str, Any] = {}
    if "torch" in homes:
        answer = find_loaded_nccl(str(place / "bin" / "python"), os.environ)
        fields["warnings"] = answer.warnings
        for copy in answer.copies:
            if copy.path == answer.torch.path:
                fields["nccl"] = copy.path.removeprefix(f"{place}/")
                fields["nccl_version"] = copy.version
                fields["nccl_sha256"] = copy.sha256

    return InstalledVenv(
        name=place.name,
        folder=str(place),
        python=site.parent.name.removeprefix("python"),
        versions={
            name: read_header(homes[name][0], "Version") for name in sorted(projects)
        },
        record=_digest_records(site, projects),
        **fields,
    )


def _read_whole(place: Path) -> InstalledVenv | None:
    """Return a whole environment; None for a part of one, or if another pip changed it."""
    try:
        text = read_text(place / MARKER, limit=_LARGEST, follow=False)
        venv = read_json(InstalledVenv, text)
        (site,) = place.glob("lib/python3.*/site-packages")
    except (OSError, ValueError, RecordError, PatchkitError):
        return None

    is_changed = _digest_records(site, venv.versions) != venv.record
    if is_changed or venv.name != place.name:
        return None
    return venv


def _digest_records(site: Path, projects: Iterable[str]) -> str:
    homes = find_distributions([str(site)])
    installed = (name for name in projects if name in homes)
    rows = [f"{name} {digest_record(homes[name][0])}" for name in installed]
    return digest("\n".join(sorted(rows)))


def digest_record(home: Path) -> str:
    """Return a digest over the files and hashes in a RECORD, "" if there is none.

    Scripts are left out, which depend on the folder, and .dist-info, which notes where a wheel came
    from.
    """
    try:
        text = read_text(home / "RECORD", limit=_LARGEST)
        rows = list(csv.reader(text.splitlines()))
    except (PatchkitError, csv.Error):
        return ""

    left_out = ("../", f"{home.name}/")
    files = []
    for row in rows:
        is_hashed = len(row) > 1 and row[1]
        if is_hashed and not row[0].startswith(left_out):
            files.append(",".join(row[:2]))
    if not files:
        return ""
    return digest("\n".join(sorted(files)))


def switch_link(venv: str, name: str) -> None:
    """Let the link lead to an installation, in one step.

    Raises HostError for an installation that is not whole, UsageError for a link that patchkit did
    not make.
    """
    folder = share_folder("venvs")
    link = Path(venv).expanduser()
    if os.sep in name or _read_whole(folder / name) is None:
        raise HostError(f"{folder / name}: is not a whole installation", hint=_AGAIN)
    if leads_to(link, check=True) == name:
        return

    with translated(at=link):
        link.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder, patience=10):
            fresh = link.with_name(f".{link.name}.{secrets.token_hex(8)}.part")
            fresh.symlink_to(folder / name)
            fresh.replace(link)
            sync(link.parent)


def environment_of(link: Path) -> Path:
    """Return the environment that a link leads to; the path itself if patchkit did not make it."""
    if name := leads_to(link):
        return share_folder("venvs") / name
    return link


def describe_successor(link: str, served: str) -> str:
    """Return which installation a link leads to now, if a unit serves from another one; else ""."""
    current = leads_to(Path(link))
    place = Path(served)
    if not current or current == place.name:
        return ""

    installed = _describe_release(share_folder("venvs") / current)
    return f"{installed} is installed, and {_describe_release(place)} serves until the next `up`"


def _describe_release(place: Path) -> str:
    """Return the release of vLLM in an environment that `install` made, and its name."""
    venv = _read_whole(place)
    if venv and (release := venv.versions.get("vllm")):
        return f"vLLM {release} ({place.name})"
    return place.name


def leads_to(link: Path, *, check: bool = False) -> str:
    """Return the name of the installation that a link leads to; "" if patchkit did not make it.

    With ``check`` raises UsageError for a path of somebody else.
    """
    if link.is_symlink():
        target = link.parent / link.readlink()
        if target != link and target.parent == share_folder("venvs"):
            return target.name
    if check and os.path.lexists(link):
        raise UsageError(
            f"{link}: patchkit did not make it, and does not replace it",
            hint='name another path in cluster.toml: venv = "~/patchkit-venv"',
        )
    return ""
