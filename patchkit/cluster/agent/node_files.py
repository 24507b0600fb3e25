"""Write and remove the files of a cluster on a node; hold the cluster. Runs on the node."""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from patchkit.cluster.agent.memory_record import record_path
from patchkit.cluster.ssh.answer import LEASE
from patchkit.durable.atomic import replacing
from patchkit.durable.lock import holder, locked
from patchkit.errors import BusyError, HostError, UsageError, translated
from patchkit.follow import Completed
from patchkit.frozen import Values
from patchkit.process import attempt
from patchkit.reading import read_environment, read_text
from patchkit.units import BYTES_PER_MIB

_UNIT = re.compile(r"patchkit-[a-z0-9-]+@?\.service")
_FILE = re.compile(r"[a-z][a-z0-9_.-]*")
_LARGEST = BYTES_PER_MIB  # bytes of a file that `up` wrote
_LONG = 3600.0  # seconds of one sleep while the lock is held
_BETWEEN = (
    "some files are of this start, some of the one before it, and nothing is started"
)
# Words of systemd's programs → the cure. The first row whose words occur counts.
_CURES = {
    "not been booted with systemd": "use a machine that systemd boots, as DGX OS is; or start "
    "the server by hand: `patchkit serve-args MODEL`",
    "Failed to connect to": "loginctl enable-linger",
    "": "systemctl --user status",
}


def config_folder(name: str) -> Path:
    """Return the folder of a cluster's files on this node, without the units."""
    return Path.home() / ".config/patchkit" / name


def unit_folder() -> Path:
    """Return the folder of this user's units."""
    return Path.home() / ".config/systemd/user"


def run_for_user(
    program: str,
    *words: str,
    check: bool = False,
    timeout: float = 60,
) -> Completed:
    """Run a program of systemd with --user.

    With ``check`` raises HostError if it fails, with the last line that it wrote. Without ``check``
    the failure is in the result.
    """
    # A login without PAM does not have this variable, and systemd's programs need it.
    environment = {"XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}", **os.environ}
    done = attempt(
        program,
        "--user",
        *words,
        env=environment,
        timeout=timeout,
    )

    if check and done.trouble:
        cures = (cure for text, cure in _CURES.items() if text in done.trouble)
        raise HostError(
            f"{program} --user {words[0]}: {done.trouble.splitlines()[-1]}",
            why="the systemd of this user keeps the ranks",
            hint=next(cures),
        )
    return done


def read_placed(folder: Path) -> Values:
    """Return the files of a cluster on this node, units included: name to content."""
    files = _placed_files(folder)
    return {file.name: read_text(file, limit=_LARGEST, follow=False) for file in files}


def _placed_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a cluster in its ``folder``, then its units."""
    if folder.is_dir():
        for file in sorted(folder.iterdir()):
            if _FILE.fullmatch(file.name):
                yield file

    for part in ("", "-worker@", "-memory", "-alive"):
        file = unit_folder() / f"patchkit-{folder.name}{part}.service"
        if file.is_file():
            yield file


def put_files(name: str, files: Values) -> None:
    """Write the files of a node, each whole or not at all, and let systemd read them.

    Files of an earlier `up` that ``files`` does not have are removed. ``group.json`` is written
    last: it names the start, and a rank whose files are of two starts is not started. The caller
    holds the cluster by ``hold_alone``. Raises StorageError if the disk is full, UsageError for a
    name that no file of a cluster has, HostError if systemd fails.
    """
    folder = config_folder(name)
    unit = f"patchkit-{name}.service"

    # Only the head starts at a boot: this node may have been the head of the former start.
    if "[Install]" not in files.get(unit, ""):
        run_for_user("systemctl", "disable", "--quiet", unit)

    with translated(_BETWEEN):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        unit_folder().mkdir(parents=True, exist_ok=True)
        for path in list(_placed_files(folder)):
            if path.name not in files:
                path.unlink()
        # A start by a person takes the planned cache, and was not ended for memory.
        for ending in ("json", "env"):
            record_path(name, ending).unlink(missing_ok=True)
        for file in sorted(files, key=lambda file: file == "group.json"):
            _put_file(folder, file, files[file])

    run_for_user("systemctl", "daemon-reload", check=True)


def _put_file(
    folder: Path,
    name: str,
    text: str,
) -> None:
    """Write a file in ``folder``, or a unit among the user's units, unless it has that text."""
    is_unit = _UNIT.fullmatch(name)
    path = (unit_folder() if is_unit else folder) / name
    if not is_unit and not _FILE.fullmatch(name):
        raise UsageError(f"{name!r} is no file of a cluster")
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return

    # Values of variables may be secret: no other user may read the file.
    with translated(_BETWEEN, at=path), replacing(path, private=True) as part:
        part.write(text.encode())


def hold_alone(name: str) -> Iterator[bool]:
    """Hold a cluster for the caller: yield once, then keep the lock until the caller is gone.

    It is called on the head alone, and stands for all nodes. Raises BusyError if another patchkit
    holds the cluster.
    """
    folder = config_folder(name)
    with translated():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    try:
        with locked(folder, patience=2):
            yield True
            # This process, and its lock, ends when the connection to the caller does.
            while True:
                time.sleep(_LONG)
    except BusyError:
        raise BusyError(
            f"another patchkit is changing the cluster {name!r}: {_describe_holder(folder)}",
            why=f"a launcher loses the cluster after {LEASE:.0f} s of silence",
            hint="wait until it is done, or end that process there",
        ) from None


def _describe_holder(folder: Path) -> str:
    """Return in words which process holds the lock of a folder, from where, and since when."""
    process = holder(folder)
    try:
        environment = read_environment(process)
    except OSError:
        return "another user's process"

    origin = "on this machine"
    if connection := environment.get("SSH_CONNECTION"):
        origin = f"from {connection.partition(' ')[0]}"

    shown = attempt("ps", "-o", "lstart=", "-p", str(process))
    since = shown.output.strip() or "some time ago"
    return f"process {process}, {origin}, since {since}"
