"""Put the files of a cluster's node in their places, and take them away. Runs on the node."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from patchkit.cluster.ssh.answer import LEASE
from patchkit.durable.atomic import replacing
from patchkit.durable.lock import holder, locked
from patchkit.errors import BusyError, HostError, UsageError, translated
from patchkit.follow import Completed
from patchkit.process import attempt
from patchkit.reading import read_text
from patchkit.units import BYTES_PER_MIB

_UNIT = re.compile(r"patchkit-[a-z0-9-]+@?\.service")
_FILE = re.compile(r"[a-z][a-z0-9_.-]*")
_LARGEST = BYTES_PER_MIB  # bytes of a file that `up` wrote
_LONG = 3600.0  # seconds
_BETWEEN = (
    "some files are of this start, some of the one before it, and nothing is started"
)


def config_folder(name: str) -> Path:
    """Return the folder of a cluster's files."""
    return Path.home() / ".config" / "patchkit" / name


def unit_folder() -> Path:
    """Return where a user's units lie."""
    return Path.home() / ".config" / "systemd" / "user"


def run_for_user(
    program: str, *words: str, check: bool = False, timeout: float = 60
) -> Completed:
    """Run a program of systemd with --user, which a login without PAM does not find by itself.

    With ``check`` raises HostError if it fails, by its last words: a command may be long.
    """
    runtime = {"XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}"}
    done = attempt(
        program, "--user", *words, env=runtime | dict(os.environ), timeout=timeout
    )
    if check and done.trouble:
        raise HostError(
            f"{program} --user {words[0]}: {done.trouble.splitlines()[-1]}",
            why="the systemd of this user keeps the ranks",
            hint=_CURES.get(_find_cure(done.trouble), "systemctl --user status"),
        )
    return done


# By what systemd's programs say, in this order.
_CURES = {
    "not been booted with systemd": "use a machine that systemd boots, as DGX OS is; or start "
    "the server by hand: `patchkit serve-args MODEL`",
    "Failed to connect to": "loginctl enable-linger",
}


def _find_cure(trouble: str) -> str:
    return next((words for words in _CURES if words in trouble), "")


def read_placed(folder: Path) -> dict[str, str]:
    """Return the files that are there, by name."""
    found = _present_files(folder)
    return {path.name: read_text(path, limit=_LARGEST, follow=False) for path in found}


def _present_files(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from (
            path for path in sorted(folder.iterdir()) if _FILE.fullmatch(path.name)
        )
    for part in ("", "-worker@", "-ray", "-alive"):
        if (path := unit_folder() / f"patchkit-{folder.name}{part}.service").is_file():
            yield path


def put_files(name: str, files: Mapping[str, str]) -> None:
    """Write a node's files, each whole or not at all, and let systemd read them.

    What an earlier `up` left and this one does not have is removed. The file that names the start,
    ``group.json``, is written last: a rank whose files are of two starts is not started.
    Raises StorageError if the disk is full, HostError as systemd fails. Who calls it holds the
    cluster: ``hold_alone``.
    """
    folder = config_folder(name)
    unit = f"patchkit-{name}.service"
    # Only the head of this start comes back at a boot, whatever this node was in the former one.
    if "[Install]" not in files.get(unit, ""):
        run_for_user("systemctl", "disable", "--quiet", unit)
    with translated(_BETWEEN):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        unit_folder().mkdir(parents=True, exist_ok=True)
        for path in list(_present_files(folder)):
            if path.name not in files:
                path.unlink()
        for file in sorted(files, key=lambda name: name == "group.json"):
            path = (unit_folder() if _UNIT.fullmatch(file) else folder) / file
            if not _UNIT.fullmatch(file) and not _FILE.fullmatch(file):
                raise UsageError(f"{file!r} is no file of a cluster")
            if path.is_file() and path.read_text(encoding="utf-8") == files[file]:
                continue
            # Variables may be private: others than the user have no business in this folder.
            with translated(_BETWEEN, at=path), replacing(path, private=True) as part:
                part.write(files[file].encode())
    run_for_user("systemctl", "daemon-reload", check=True)


def hold_alone(name: str) -> Iterator[bool]:
    """Yield once while nobody else may change a cluster: as long as the asker listens.

    Called on the head, for all nodes. Raises BusyError.
    """
    folder = config_folder(name)
    with translated():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        with locked(folder, patience=2):
            yield True
            while (
                True
            ):  # the end of the asker's words ends this process, and the lock with it
                time.sleep(_LONG)
    except BusyError:
        process = holder(folder)
        who = "another user's process"
        with contextlib.suppress(OSError):
            environ = Path(f"/proc/{process}/environ").read_bytes()
            peer = re.search(rb"(?:^|\0)SSH_CONNECTION=([^ \0]+)", environ)
            place = (
                f"from {peer[1].decode(errors='replace')}"
                if peer
                else "on this machine"
            )
            since = attempt("ps", "-o", "lstart=", "-p", str(process)).output.strip()
            who = f"process {process}, {place}, since {since or 'some time ago'}"
        raise BusyError(
            f"another patchkit is changing the cluster {name!r}: {who}",
            why=f"a launcher loses the cluster after {LEASE:.0f} s of silence",
            hint="wait until it is done, or end that process there",
        ) from None
