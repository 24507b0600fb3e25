"""Read and build the names of models and their folders, and check the room on the disk."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Annotated

from patchkit.durable.paths import is_plain
from patchkit.errors import StorageError, UsageError
from patchkit.frozen import frozen
from patchkit.records import RecordError, Utf8, matching

# Names follow the Hub's rules. They hold no --, so that a folder can have it in place of the slash.
_PART = r"(?!\.)(?!-)[A-Za-z0-9._-]{1,96}(?<![.-])"
# Old repositories have no organization.
_REPO = re.compile(rf"(?!.*(?:--|\.\.))(?:{_PART}/)?{_PART}")
_REVISION = re.compile(r"(?![-/.])[A-Za-z0-9._/-]{1,200}")
_FOLDER = re.compile(
    rf"(?:(?P<org>{_PART})--)?(?P<name>{_PART})@(?P<commit>[0-9a-f]{{12}})"
)
SHORT = 12
"""Hex digits of a commit in the name of a model's folder."""

_HINT = "name it as the Hub does: openai/gpt-oss-120b, or openai/gpt-oss-120b@main"
_PATTERNS = frozenset("*?[]\\")
_SPARE = 1.05  # times the size must be free: a full disk stops more than a download


def _require_file_name(path: str) -> None:
    # `hf download` reads names as patterns; names are also printed, copied and joined to a folder.
    if path.isprintable() and is_plain(path):
        is_option = path.startswith(("-", ".cache/"))
        if not is_option and _PATTERNS.isdisjoint(path):
            return
    raise RecordError(f"is {path!r}, which is no plain name of a file")


FileName = Annotated[Utf8, _require_file_name]
"""The path of a model's file, as the Hub, an index or a record names it; it stays in the folder."""

Commit = Annotated[str, matching("[0-9a-f]{40}", "a commit, 40 hex digits")]
_DIGEST = matching("[0-9a-f]{40}|[0-9a-f]{64}", "a sha256, or git's sha1")
Digest = Annotated[str, _DIGEST]


def split_revision(spec: str) -> tuple[str, str]:
    """Return the repository and the revision of ``REPO[@REV]``; "" stands for no revision.

    Raises UsageError if either is no name that the Hub allows.
    """
    repo, sign, revision = spec.partition("@")
    if not _REPO.fullmatch(repo):
        raise UsageError(f"{spec!r} names no model", hint=_HINT)

    is_revision = _REVISION.fullmatch(revision) and ".." not in revision
    if sign and not is_revision:
        raise UsageError(f"{revision!r} is no branch, tag or commit", hint=_HINT)
    return repo, revision


@frozen
class ModelFolder:
    """A commit of a model; read from a folder's name, ``commit`` has its first 12 digits alone."""

    repo: str
    commit: str

    @property
    def name(self) -> str:
        """Return the folder's name: ORG--NAME@COMMIT, with 12 digits of the commit."""
        return f"{self.repo.replace('/', '--')}@{self.commit[:SHORT]}"


def folder_of(name: str) -> ModelFolder | None:
    """Return the model that a folder is named after; None for any other folder."""
    match = _FOLDER.fullmatch(name)
    if match is None:
        return None

    repo = f"{match['org']}/{match['name']}" if match["org"] else match["name"]
    if not _REPO.fullmatch(repo):
        return None
    return ModelFolder(repo=repo, commit=match["commit"])


def models_folder(text: str) -> Path:
    """Return the folder of all models as a path on this machine.

    Raises UsageError if it does not begin at / or ~, or has unprintable characters.
    """
    try:
        folder = Path(text).expanduser()
    except RuntimeError:  # ~NAME of a user whom this machine does not know
        folder = Path(text)

    if not folder.is_absolute() or not text.isprintable():
        raise UsageError(
            f"{text!r} is no folder for models",
            hint="name one from / or ~, as in ~/models",
        )
    return folder


_OTHER_DISK = (
    "make room there: `patchkit model list` names the folders of models; or name another disk: "
    "`model_folder` in cluster.toml"
)


def require_room(
    folder: Path,
    size: int,
    more: int = 0,
    hint: str = _OTHER_DISK,
) -> int:
    """Return the free bytes on the disk of a folder, which may not exist yet, plus ``more``.

    ``more`` are bytes that will be replaced. Raises StorageError if ``size`` bytes do not fit.
    """
    places = (folder, *folder.parents)
    nearest = next(place for place in places if os.access(place, os.F_OK))
    free = shutil.disk_usage(nearest).free + more

    needed = int(size * _SPARE)
    if needed > free:
        raise StorageError(
            f"{folder}: needs {needed:,} bytes, and {free:,} are free", hint=hint
        )
    return free
