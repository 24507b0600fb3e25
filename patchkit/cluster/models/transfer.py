"""Send a model from one node to another: rsync over ssh, resumable, with the speed measured."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from patchkit.cluster.models.check import is_complete
from patchkit.cluster.models.expected import CHECKED, read_record
from patchkit.cluster.models.names import folder_of, models_folder
from patchkit.cluster.models.report import ModelRoom, SentModel
from patchkit.cluster.ssh.rsync import copied, require_rsync, rsync_words
from patchkit.cluster.ssh.ssh import ssh_words
from patchkit.durable.failure import translated
from patchkit.errors import SourceError, StorageError, UsageError
from patchkit.quoting import quoted

_SPARE = 1.05


def make_model_room(models: str, name: str, size: int, dry_run: bool = False) -> dict[str, Any]:
    """Return where a model goes on this node, and make its folder.

    Raises HostError without rsync, StorageError without room, UsageError for odd names.
    """
    require_rsync()
    if folder_of(name) is None:
        raise UsageError(f"{name!r} is no folder of a model", hint="`patchkit model list`")
    folder = models_folder(models) / name
    place = folder
    while not place.exists():
        place = place.parent
    held = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    free, needed = shutil.disk_usage(place).free, int((size - held) * _SPARE)
    if needed > free:
        raise StorageError(
            f"{folder}: needs {needed:,} bytes, and {free:,} are free",
            hint="make room there: `patchkit model list` names the folders of models",
        )
    if not dry_run:
        with translated(at=folder):
            folder.mkdir(parents=True, exist_ok=True)
    return asdict(ModelRoom(folder=str(folder), held=held, free=free))


def send_words(folder: str, destination: str, target: str) -> tuple[str, ...]:
    """Return the rsync command for a folder. Raises UsageError for what rsync takes otherwise."""
    *ssh, _dashes, _destination = ssh_words(destination, "-o", "ControlMaster=no")
    options = (
        # Links are resolved: what they lead to lies on this node alone.
        *("-rLtp", "--inplace", "--no-inc-recursive"),
        *("--exclude=*.incomplete", "--exclude=*.lock", "--exclude=.git/"),
        f"--exclude=/{CHECKED}",
    )
    return rsync_words(options, [f"{folder}/"], ssh, destination, target)


def send_model(folder: str, destination: str, target: str) -> Iterator[dict[str, Any]]:
    """Yield the progress in bytes, at last ``{"result": SentModel}``.

    Raises SourceError if the model is not complete here, HostError or StorageError if rsync fails.
    """
    place = Path(folder)
    require_rsync()
    if not is_complete(place):
        named = folder_of(place.name)
        model = f"{named.repo}@{named.commit}" if named else "REPO"
        raise SourceError(
            f"{folder}: is not complete", hint=quoted("patchkit", "model", "check", model)
        )
    made = read_record(place)
    total = made.size if made else sum(f.stat().st_size for f in place.rglob("*") if f.is_file())
    took = yield from copied(send_words(folder, destination, target), total, destination)
    yield {"result": asdict(SentModel(size=total, sent=took.sent, seconds=took.seconds))}
