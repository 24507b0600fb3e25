"""Send a model from one node to another: rsync over ssh, resumable, with the speed measured."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from patchkit.durable.failure import translated
from patchkit.errors import HostError, SourceError, StorageError, UsageError
from patchkit.process import Completed, output
from patchkit.quoting import quoted
from patchkit.runtime.models.check import is_complete
from patchkit.runtime.models.expected import read_record
from patchkit.runtime.models.names import folder_of, models_folder
from patchkit.runtime.models.report import ModelRoom, SentModel
from patchkit.runtime.remote.ssh import ssh_words

_SPARE = 1.05
_PROGRESS = re.compile(r"\s*(\d+)\s+\d+%\s")  # bytes, of --info=progress2
_SENT = re.compile(r"^Literal data: (\d+) bytes", re.MULTILINE)
# What ssh says if it did not get there; rsync's own exit code is 12 or 255, as it happens.
_NO_LOGIN = re.compile(
    r"^ssh: |Permission denied \(|Host key verification failed|HOST IDENTIFICATION HAS CHANGED",
    re.MULTILINE,
)
_INSTALL = "sudo apt install rsync"


def make_room(models: str, name: str, size: int, dry_run: bool = False) -> dict[str, Any]:
    """Return where a model goes on this node, and make its folder.

    Raises HostError without rsync, StorageError without room, UsageError for odd names.
    """
    _require_rsync()
    if folder_of(name) is None:
        raise UsageError(f"{name!r} is no folder of a model", hint="`patchkit model list`")
    folder = models_folder(models) / name
    place = folder
    while not place.exists():
        place = place.parent
    held = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
    free, needed = shutil.disk_usage(place).free, int((size - held) * _SPARE)
    if needed > free:
        raise StorageError(
            f"{folder}: needs {needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free",
            hint="make room there, as `patchkit model remove` does",
        )
    if not dry_run:
        with translated(at=folder):
            folder.mkdir(parents=True, exist_ok=True)
    return asdict(ModelRoom(folder=str(folder), held=held, free=free))


def send_words(folder: str, destination: str, target: str) -> tuple[str, ...]:
    """Return the rsync command for a folder. Raises UsageError for what rsync takes otherwise."""
    if ":" in destination or "/" in destination:
        raise UsageError(f"{destination!r} is not a host", hint="write it as for ssh: user@host")
    *ssh, _dashes, _destination = ssh_words(destination, "-o", "ControlMaster=no")
    return (
        "rsync",
        # Links are resolved: what they lead to lies on this node alone.
        *("-rLtp", "--partial", "--inplace", "--protect-args", "--no-inc-recursive"),
        *("--exclude=*.incomplete", "--exclude=*.lock", "--exclude=.git/"),
        *("--info=progress2", "--stats", "--no-human-readable", "--outbuf=L"),
        # Plain words without a blank, which rsync splits at.
        *("-e", " ".join(ssh)),
        "--",
        f"{folder}/",
        f"{destination}:{target}/",
    )


def send_model(folder: str, destination: str, target: str) -> Iterator[dict[str, Any]]:
    """Yield the progress in bytes, at last ``{"result": SentModel}``.

    Raises SourceError if the model is not complete here, HostError or StorageError if rsync fails.
    """
    place = Path(folder)
    _require_rsync()
    if not is_complete(place):
        named = folder_of(place.name)
        model = f"{named.repo}@{named.commit}" if named else "REPO"
        raise SourceError(
            f"{folder}: is not complete", hint=quoted("patchkit", "model", "check", model)
        )
    made = read_record(place)
    total = made.size if made else sum(_sizes(place))
    begun = time.monotonic()
    running = output(*send_words(folder, destination, target), env={**os.environ, "LC_ALL": "C"})
    while True:
        try:
            said = _PROGRESS.match(next(running))
        except StopIteration as end:
            done: Completed = end.value
            break
        if said:
            yield {"done": min(int(said[1]), total), "total": total}
    if done.trouble:
        raise _failure(done, destination)
    sent = _SENT.search(done.output)
    seconds = time.monotonic() - begun
    result = SentModel(size=total, sent=int(sent[1]) if sent else 0, seconds=round(seconds, 3))
    yield {"result": asdict(result)}


def _require_rsync() -> None:
    if not shutil.which("rsync"):
        raise HostError("rsync is not installed", why="models are copied with it", hint=_INSTALL)


def _sizes(place: Path) -> Iterator[int]:
    return (each.stat().st_size for each in place.rglob("*") if each.is_file())


def _failure(done: Completed, destination: str) -> HostError | StorageError:
    lines = [line.strip() for line in done.output.split("\n")]
    told = [line for line in lines if line and "rsync error" not in line and "%" not in line]
    told = [line for line in told if not line.startswith("rsync: connection unexpectedly closed")]
    said = told[-1] if told else done.trouble
    what = f"rsync to {destination} ended with exit code {done.status}: {said}"
    again = "run the same command again: it goes on where it was"
    if _NO_LOGIN.search(done.output):
        return HostError(
            what,
            why="the head logs in to the other nodes, over the cable",
            hint=f"try it on the head: `{quoted('ssh', destination, 'true')}`",
        )
    if "command not found" in done.output or done.status == 127:
        return HostError(what, why="rsync is not installed there", hint=_INSTALL)
    return StorageError(what, why="no room there, or the link was cut", hint=again)
