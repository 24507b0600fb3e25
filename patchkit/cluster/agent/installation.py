"""Install wheels on a node: make an environment beside others, and let a link lead to it.

Or bring a container image there: pull, save, load, tag; patch its vLLM. Runs on the node.
"""

import csv
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from patchkit.cluster.agent.image_facts import (
    ENGINES,
    LAYER,
    ImageFacts,
    find_image,
)
from patchkit.cluster.agent.node_files import run_for_user, unit_folder
from patchkit.cluster.models.model_files import require_room
from patchkit.cluster.ssh.answer import Steps
from patchkit.cluster.ssh.node import require_rsync
from patchkit.digests import digest, sha256_if_readable
from patchkit.durable.atomic import replacing, sync
from patchkit.durable.lock import locked
from patchkit.durable.staging import is_full
from patchkit.errors import (
    BuildError,
    HashMismatchError,
    HostError,
    PatchkitError,
    StorageError,
    UsageError,
    translated,
)
from patchkit.follow import Follow
from patchkit.frozen import Fields, Texts, Values, frozen
from patchkit.process import attempt, run
from patchkit.quoting import quoted
from patchkit.reading import read_text, user_path
from patchkit.records import RecordError, Sha256, matching, read_json, record
from patchkit.runtime.host.host import Gpu
from patchkit.runtime.host.probe import LIVE, Reader, read_gpus
from patchkit.runtime.python.distributions import (
    find_distributions,
    read_header,
)
from patchkit.runtime.python.libnccl import find_loaded_nccl

MARKER = "patchkit-installed.json"
"""The file that describes an environment, as an ``InstalledVenv``.

It is written last, so only a complete environment has it.
"""

_FILE = r"[A-Za-z0-9][\w.+!-]*\.whl"
_LIST = "requirements.txt"
_ERROR = "ERROR: "  # begins the last line of pip
_AGAIN = "patchkit cluster install"  # the command that tries it again
# Options of Python that install a list of wheels without an index and without the user's settings.
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
_PATIENCE = 20.0  # seconds to wait until the pip of a killed launcher has ended
_LARGEST = 32 << 20  # bytes of a RECORD


@frozen
class NodeWheel:
    """A wheel as a wheelhouse lists it; ``unpacked`` are the bytes of its members."""

    name: Annotated[str, matching(_FILE, "the name of a wheel")]
    sha256: Sha256
    unpacked: int


@frozen
class WheelLock:
    """The input of an installation: the text of requirements.txt, the wheels, and their Python.

    ``cpu`` is the CPU that the wheels are for, "" for any; ``target`` is the device that they were
    patched or built for, "" for several. ``native`` are the releases, such as ``vllm==0.33.0``,
    whose wheels hold no code for other devices.
    """

    requirements: str
    cpu: str
    python: Annotated[str, matching(r"3\.\d+", "a release of Python")]
    wheels: tuple[NodeWheel, ...]
    target: str
    native: Texts

    @property
    def id(self) -> str:
        """Return the name of the installation: the same for the same list, wheels and Python."""
        rows = sorted(f"{wheel.name} {wheel.sha256}" for wheel in self.wheels)
        content = "\n".join([self.requirements, *rows, self.python])
        return digest(content)[:12]


@frozen
class InstallState:
    """The state of a node before an installation.

    ``store`` is the path of the folder for wheels, ``lacking`` are the names of the wheels to copy
    there. ``installed`` says that the environment exists and is whole; ``current`` is the name of
    the installation that the link leads to, "" for none.
    """

    store: str
    installed: bool
    current: str
    lacking: Texts
    gpu: Gpu | None


@frozen
class InstalledVenv:
    """A whole environment: the versions of its projects, and the libnccl that torch loads.

    ``record`` is a digest over all RECORDs, without scripts: their content depends on the folder.
    """

    name: str
    folder: str
    python: str
    versions: Values
    record: str
    nccl: str = ""
    nccl_version: str = ""
    nccl_sha256: str = ""
    warnings: Texts = ()


def share_folder(name: str) -> Path:
    """Return one of patchkit's folders of this user: ``wheelhouse``, ``venvs`` or ``images``."""
    return Path.home() / ".local/share/patchkit" / name


def look_at_installation(venv: str, lock: Any) -> InstallState:
    """Return the state of this node before an installation.

    ``venv`` is the path of the link, ``lock`` has the fields of a ``WheelLock``. Raises UsageError
    for a path that patchkit did not make, HostError for a wrong machine and a missing Python or
    rsync.
    """
    wheel_lock = record(WheelLock, lock)
    store = share_folder("wheelhouse")
    current = leads_to(user_path(venv), check=True)
    installed = _read_whole(share_folder("venvs") / wheel_lock.id) is not None

    lacking: list[str] = []
    if not installed:
        _find_python(wheel_lock)
        lacking = [
            wheel.name
            for wheel in wheel_lock.wheels
            if sha256_if_readable(store / wheel.name) != wheel.sha256
        ]
    if lacking:
        require_rsync()

    gpus = read_gpus(Reader(LIVE))
    return InstallState(
        store=str(store),
        installed=installed,
        current=current,
        lacking=tuple(lacking),
        gpu=next(iter(gpus), None),
    )


def _find_python(lock: WheelLock) -> str:
    """Return the program of the Python that makes the environment.

    Raises HostError if this machine has another CPU than the wheels, no such Python, or a Python
    that cannot make environments.
    """
    machine = platform.machine()
    if lock.cpu not in ("", machine):
        raise HostError(f"is a machine of {machine}; the wheels are for {lock.cpu}")

    release = ".".join(map(str, sys.version_info[:2]))
    python = sys.executable if lock.python == release else f"python{lock.python}"
    # A shim on PATH may stand for a Python that is not installed.
    if attempt(python, "-Ic", "").trouble:
        raise HostError(
            f"has Python {release}, and the wheels are for {lock.python}",
            hint=quoted("patchkit", "wheelhouse", "fill", "--python-version", release),
        )
    if attempt(python, "-Ic", "import ensurepip, venv").trouble:
        hint = quoted("sudo", "apt", "install", f"python{lock.python}-venv")
        raise HostError("Python here cannot make environments", hint=hint)
    return python


def install_wheels(lock: Any) -> Steps[InstalledVenv]:
    """Return the environment of a lock, made unless it exists; yield the bytes so far, and of all.

    Raises StorageError if the disk is full, HostError if a unit runs from a damaged environment of
    that name or pip fails, HashMismatchError if pip finds another wheel than the lock names.
    """
    wheel_lock = record(WheelLock, lock)
    folder = share_folder("venvs")
    path = folder / wheel_lock.id
    size = sum(wheel.unpacked for wheel in wheel_lock.wheels)

    with translated(at=folder):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, _PATIENCE):
        if venv := _read_whole(path):
            return venv
        _require_unused(path)

        try:
            return (yield from _make_venv(path, wheel_lock, size))
        except (OSError, PatchkitError) as error:
            if not is_full(folder):
                raise
            shutil.rmtree(path, ignore_errors=True)
            raise StorageError(
                f"{folder}: the disk is full; the environment takes {size / 1e6:,.0f} MB",
                why=str(getattr(error, "what", error)),
                hint="make room there, then run the same command again",
            ) from None


def _make_venv(
    path: Path,
    lock: WheelLock,
    size: int,
) -> Steps[InstalledVenv]:
    """Make an environment instead of anything at its path; the marker is its last file.

    Yields bytes as ``install_wheels`` does.
    """
    shutil.rmtree(path, ignore_errors=True)
    python = _find_python(lock)
    done = attempt(python, "-I", "-m", "venv", path, timeout=None)
    if done.trouble:
        raise done.error(hint=_AGAIN)
    (path / _LIST).write_text(lock.requirements, encoding="utf-8")
    yield from _run_pip(path, len(lock.wheels), size)

    os.sync()
    venv = _describe_venv(path, [wheel.name for wheel in lock.wheels])
    description = json.dumps(asdict(venv), indent=1)
    with translated(at=path), replacing(path / MARKER) as file:
        file.write(description.encode())
    return venv


def _run_pip(
    path: Path,
    wheels: int,
    size: int,
) -> Iterator[tuple[int, int]]:
    """Install the list of an environment with pip; yield the bytes so far, and of all.

    The bytes so far are an estimate, by the number of wheels that pip has begun.
    """
    links = ("--find-links", share_folder("wheelhouse"))
    words = (path / "bin/python", *_PIP, *links, "-r", path / _LIST)

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


def _require_unused(path: Path) -> None:
    """Raise HostError if a unit serves from an environment that is to be made anew."""
    if not path.exists():
        return

    users = [
        file.name
        for file in unit_folder().glob("patchkit-*.service")
        if f"{path}/bin/" in read_text(file, limit=_LARGEST, follow=False)
    ]
    if not users:
        return

    states = run_for_user("systemctl", "is-active", *users).output.split()
    if "active" in states or "activating" in states:
        raise HostError(
            f"{path}: another pip changed it, and {users[0]} runs from it",
            why="it is made anew, and what runs would lose its files",
            hint="patchkit down",
        )


def _describe_venv(path: Path, wheels: Iterable[str]) -> InstalledVenv:
    """Return the content of an environment. Raises HostError if one of ``wheels`` is missing."""
    (site,) = path.glob("lib/python3.*/site-packages")
    homes = find_distributions([str(site)])
    names = (wheel.partition("-")[0] for wheel in wheels)
    projects = {name.lower().replace(".", "_") for name in names}
    if absent := sorted(projects - {*homes}):
        raise HostError(f"{path}: {absent[0]} is not installed", hint=_AGAIN)

    fields: Fields = {}
    if "torch" in homes:
        answer = find_loaded_nccl(str(path / "bin/python"), os.environ)
        fields["warnings"] = answer.warnings
        for copy in answer.copies:
            if copy.path == answer.torch.path:
                fields["nccl"] = copy.path.removeprefix(f"{path}/")
                fields["nccl_version"] = copy.version
                fields["nccl_sha256"] = copy.sha256

    return InstalledVenv(
        name=path.name,
        folder=str(path),
        python=site.parent.name.removeprefix("python"),
        versions={
            name: read_header(homes[name][0], "Version") for name in sorted(projects)
        },
        record=_digest_records(site, projects),
        **fields,
    )


def _read_whole(path: Path) -> InstalledVenv | None:
    """Return the description of a whole environment.

    Returns None if it is not whole, or if somebody changed its files with pip.
    """
    try:
        text = read_text(path / MARKER, limit=_LARGEST, follow=False)
        venv = read_json(InstalledVenv, text)
        (site,) = path.glob("lib/python3.*/site-packages")
    except (OSError, ValueError, RecordError, PatchkitError):
        return None

    is_changed = _digest_records(site, venv.versions) != venv.record
    if is_changed or venv.name != path.name:
        return None
    return venv


def _digest_records(site: Path, projects: Iterable[str]) -> str:
    """Return a digest over the RECORDs of projects in a folder of packages."""
    homes = find_distributions([str(site)])
    installed = (name for name in projects if name in homes)
    rows = [f"{name} {digest_record(homes[name][0])}" for name in installed]
    return digest("\n".join(sorted(rows)))


def digest_record(home: Path) -> str:
    """Return a digest over the paths and hashes in the RECORD of a .dist-info folder.

    Scripts are left out: their content depends on the environment's folder. So is .dist-info: it
    notes where the wheel came from. Returns "" without a RECORD that can be read.
    """
    try:
        text = read_text(home / "RECORD", limit=_LARGEST)
        rows = list(csv.reader(text.splitlines()))
    except (PatchkitError, csv.Error):
        return ""

    left_out = ("../", f"{home.name}/")
    hashed = (row[:2] for row in rows if len(row) > 1 and row[1])
    files = [",".join(row) for row in hashed if not row[0].startswith(left_out)]
    return digest("\n".join(sorted(files)) or None)


def switch_link(venv: str, name: str) -> None:
    """Let the link ``venv`` lead to the installation ``name``, in one step.

    Raises HostError if the installation is not whole, UsageError if patchkit did not make what is
    at the path of the link.
    """
    folder = share_folder("venvs")
    link = user_path(venv)
    if os.sep in name or _read_whole(folder / name) is None:
        raise HostError(f"{folder / name}: is not a whole installation", hint=_AGAIN)
    if leads_to(link, check=True) == name:
        return

    with translated(at=link):
        link.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder, patience=10):
            fresh = link.with_name(f".{link.name}.{os.urandom(8).hex()}.part")
            fresh.symlink_to(folder / name)
            fresh.replace(link)
            sync(link.parent)


def environment_of(link: Path) -> Path:
    """Return the environment that a link of patchkit leads to; any other path as it is."""
    if name := leads_to(link):
        return share_folder("venvs") / name
    return link


def describe_successor(link: str, served: str) -> str:
    """Return the words for an installation that waits for the next `up`.

    ``link`` leads to the environment that was installed last, ``served`` is the path of the
    environment that the unit serves from. Returns "" if both are the same, or if the link leads to
    an environment that patchkit did not make.
    """
    current = leads_to(Path(link))
    path = Path(served)
    if not current or current == path.name:
        return ""

    installed = _describe_release(share_folder("venvs") / current)
    return f"{installed} is installed, and {_describe_release(path)} serves until the next `up`"


def _describe_release(path: Path) -> str:
    """Return the release of vLLM in an environment and the environment's name, in words."""
    venv = _read_whole(path)
    if venv and (release := venv.versions.get("vllm")):
        return f"vLLM {release} ({path.name})"
    return path.name


def leads_to(link: Path, *, check: bool = False) -> str:
    """Return the name of the installation that a link leads to, "" if the link is not patchkit's.

    With ``check`` raises UsageError if anything that patchkit did not make is at that path.
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


_MAKE_ROOM = (
    "make room there: `docker system df`, `podman system df` say what images take"
)
# Docker's older builder has no `RUN --mount`. An attestation would hold the time of the build.
_BUILDKIT = {
    "DOCKER_BUILDKIT": "1",
    "BUILDKIT_PROGRESS": "plain",
    "BUILDX_NO_DEFAULT_ATTESTATIONS": "1",
}
_STEP = re.compile(r"^#\d+ [\d.]+ ")  # what BuildKit puts before each line
_PROGRESS = re.compile(r": ([\d,]+) of ([\d,]+) MB")  # of `apply --native`
_MARKS = (
    "✓ ",
    "✗ ",
    "error: ",
    "why: ",
)  # begin the lines that `apply` and engines report
_LOADED = re.compile(r"(?m)^Loaded image[^:\n]*: *(\S+)")


@frozen
class BuiltImage:
    """The id of an image that was built, and the lines that `apply` wrote during the build."""

    id: Annotated[str, matching("[0-9a-f]{64}", "an id")]
    said: Texts


def pull_image(
    engine: str,
    reference: str,
    names: Sequence[str],
) -> ImageFacts:
    """Pull an image; return the facts of the first image that exists of ``names``.

    Raises StorageError for a full disk, HostError for any other failure of the pull.
    """
    done = attempt(engine, "pull", reference, timeout=None)
    if not done.trouble:
        return find_image(engine, names)

    what = f"cannot pull {reference}: {done.last_line()}"
    if "no space left" in done.output + done.errors:
        raise StorageError(
            what,
            why="the disk is full",
            hint=_MAKE_ROOM,
        )
    why = "no such image, no network, or no login there"
    raise HostError(
        what,
        why=why,
        hint=quoted(engine, "pull", reference),
    )


def save_image(
    engine: str,
    image: str,
    size: int,
) -> str:
    """Save an image of ``size`` bytes; return the path of the archive, also of an earlier one.

    The archive is whole or does not exist. Raises StorageError if it has no room, HostError if the
    engine fails.
    """
    archive = share_folder("images") / f"{image[:12]}.tar"
    part = archive.with_suffix(".part")

    with translated(at=part):
        if not archive.exists():
            require_room(archive.parent, size, hint=_MAKE_ROOM)
            archive.parent.mkdir(parents=True, exist_ok=True)
            part.unlink(missing_ok=True)
            run(engine, "save", "--output", part, image, timeout=None, hint=_MAKE_ROOM)
            part.replace(archive)
    return str(archive)


def make_image_room(
    engine: str,
    root: str,
    size: int,
) -> str:
    """Return the folder for the archive of an image of ``size`` bytes; make it.

    ``root`` is the folder of the engine's images. Raises StorageError if the archive has no room,
    or what the engine makes of it; HostError without rsync.
    """
    require_rsync()
    folder = share_folder("images")

    with translated(at=folder):
        folder.mkdir(parents=True, exist_ok=True)
        files = (file for file in folder.iterdir() if file.is_file())
        present = sum(file.stat().st_size for file in files)
        unpacked = size * ENGINES[engine].copies

        # If both are on one disk, its free room has to do for both.
        device = folder.stat().st_dev
        is_shared = Path(root).stat().st_dev == device
        archive = size + unpacked * is_shared

        require_room(folder, archive - present, hint=_MAKE_ROOM)
        require_room(Path(root), unpacked, hint=_MAKE_ROOM)
    return str(folder)


def load_image(
    engine: str,
    archive: str,
    image: str,
) -> ImageFacts:
    """Load an image from an archive, and remove the archive; return the image's facts.

    Raises HostError if the engine fails.
    """
    done = run(engine, "load", "--input", archive, timeout=None, hint=_MAKE_ROOM)
    Path(archive).unlink()
    # In another kind of store it has another id: the engine's words name it as well.
    return find_image(engine, [image, *_LOADED.findall(done.output)])


def tag_image(
    engine: str,
    image: str,
    tag: str,
) -> None:
    """Give an image the name by which `up` finds it; remove the archives of images."""
    run(engine, "tag", image, tag, hint=quoted(engine, "info"))
    shutil.rmtree(share_folder("images"), ignore_errors=True)


def build_layer(
    engine: str,
    kit: str,
    label: str,
) -> Steps[BuiltImage]:
    """Build an image from the archive ``kit``; yield the bytes of native code so far, and of all.

    The image gets the label ``LAYER`` with the value ``label``. Raises BuildError with the lines
    that report what failed.
    """
    folder = share_folder("images") / "kit"
    with translated(at=folder):
        shutil.rmtree(folder, ignore_errors=True)
        # Without `filter`, which Python has only since 3.11.4; the launcher made the archive.
        shutil.unpack_archive(kit, folder)

    number = folder.with_name("kit.id")
    words = [engine, "build", "--network=none", *ENGINES[engine].layer]
    words += [f"--label={LAYER}={label}", "--file", str(folder / "Containerfile")]
    words += ["--iidfile", str(number), str(folder)]

    lines = []
    with Follow(*words, env={**os.environ, **_BUILDKIT}) as building:
        for output in building:
            line = _STEP.sub("", output).strip()
            if line.lower().startswith(_MARKS):
                lines.append(line)
            if progress := _PROGRESS.search(line):
                yield _bytes(progress[1]), _bytes(progress[2])

    if building.done.trouble:
        troubles = [line for line in lines if not line.startswith("✓")]
        troubles = troubles or [building.done.last_line()]
        what = "\n".join(["the layer was not built:", *troubles[:3]])
        raise BuildError(what, hint=quoted(*words))
    return BuiltImage(
        id=number.read_text().removeprefix("sha256:"),
        said=tuple(lines),
    )


def _bytes(megabytes: str) -> int:
    return int(megabytes.replace(",", "")) * 10**6
