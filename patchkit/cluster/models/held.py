"""List the models that lie on a node, and remove one."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from patchkit.cluster.models.check import is_complete
from patchkit.cluster.models.expected import read_record
from patchkit.cluster.models.names import folder_of, models_folder
from patchkit.cluster.models.report import HeldModel
from patchkit.durable.failure import translated
from patchkit.durable.lock import locked
from patchkit.errors import UsageError
from patchkit.records import RecordError

_REMOVED = ".removed-"  # before a name, while the files of it are removed


def held_models(models: str) -> list[dict[str, Any]]:
    """Return the models of a folder, with what the quick check says."""
    return [asdict(each) for each in _held(models_folder(models))]


def remove_model(models: str, folder: str) -> int:
    """Remove a model's folder, return its bytes. Raises UsageError for what is none of ours."""
    root, place = models_folder(models), Path(folder)
    ours = place.parent == root and folder_of(place.name) is not None and not place.is_symlink()
    if not ours or not place.is_dir() or not _is_ours(place):
        raise UsageError(
            f"{folder}: is no model that patchkit fetched",
            why="it has no record of patchkit's, or lies elsewhere",
            hint="`patchkit model list` names the models; remove others by hand",
        )
    size = _size(place)
    with translated(at=place), locked(place):
        # Renamed first: what an interrupt leaves is taken for no model.
        gone = place.with_name(f"{_REMOVED}{place.name}")
        shutil.rmtree(gone, ignore_errors=True)
        place.rename(gone)
        shutil.rmtree(gone)
    return size


def _held(root: Path) -> list[HeldModel]:
    found = []
    for place in sorted(root.iterdir()) if root.is_dir() else ():
        named = folder_of(place.name)
        if named and place.is_dir():
            made = HeldModel(
                folder=str(place),
                repo=named.repo,
                commit=_commit(place) or named.commit,
                size=_size(place),
                complete=is_complete(place),
                ours=_is_ours(place),
            )
            found.append(made)
    return found


def _is_ours(place: Path) -> bool:
    try:
        return read_record(place) is not None
    except RecordError:  # damaged, but written by patchkit
        return True


def _commit(place: Path) -> str:
    try:
        made = read_record(place)
    except RecordError:
        return ""
    return made.commit if made else ""


def _size(place: Path) -> int:
    return sum(
        Path(here, name).lstat().st_size
        for here, _folders, files in os.walk(place)
        for name in files
    )
