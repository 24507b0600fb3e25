"""Name a model and its folder, and check the room for one."""

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

# As the Hub has them: no -- and no .. in a name, which makes folder names unambiguous.
_PART = r"(?!\.)(?!-)[A-Za-z0-9._-]{1,96}(?<![.-])"
# Old repositories have no organization.
_REPO = re.compile(rf"(?!.*(?:--|\.\.))(?:{_PART}/)?{_PART}")
_REVISION = re.compile(r"(?![-/.])[A-Za-z0-9._/-]{1,200}")
_FOLDER = re.compile(
    rf"(?:(?P<org>{_PART})--)?(?P<name>{_PART})@(?P<commit>[0-9a-f]{{12}})"
)
SHORT = 12
"""The digits of a commit in the name of a folder."""

_HINT = "name it as the Hub does: openai/gpt-oss-120b, or openai/gpt-oss-120b@main"
_PATTERNS = frozenset("*?[]\\")
_SPARE = 1.05  # times the size: a full disk stops more than a download


def _require_file_name(path: str) -> None:
    # `hf download` takes names for patterns, and each name is shown, copied and joined to a folder.
    if path.isprintable() and is_plain(path):
        is_option = path.startswith(("-", ".cache/"))
        if not is_option and _PATTERNS.isdisjoint(path):
            return
    raise RecordError(f"is {path!r}, which is no plain name of a file")


FileName = Annotated[Utf8, _require_file_name]
"""A file of a model, as the Hub, an index or a record names it: it leads nowhere else."""

Commit = Annotated[str, matching("[0-9a-f]{40}", "a commit, 40 hex digits")]
_DIGEST = matching("[0-9a-f]{40}|[0-9a-f]{64}", "a sha256, or git's sha1")
Digest = Annotated[str, _DIGEST]


def split_revision(spec: str) -> tuple[str, str]:
    """Return repository and revision of ``REPO[@REV]``, "" for none. Raises UsageError."""
    repo, sign, revision = spec.partition("@")
    if not _REPO.fullmatch(repo):
        raise UsageError(f"{spec!r} names no model", hint=_HINT)

    is_revision = _REVISION.fullmatch(revision) and ".." not in revision
    if sign and not is_revision:
        raise UsageError(f"{revision!r} is no branch, tag or commit", hint=_HINT)
    return repo, revision


@frozen
class ModelFolder:
    """A commit of a model by the name of its folder, which has the first 12 digits."""

    repo: str
    commit: str

    @property
    def name(self) -> str:
        """Return the folder's name."""
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
    """Return the folder of all models, on the machine that runs this. Raises UsageError."""
    try:
        folder = Path(text).expanduser()
    except RuntimeError:  # ~somebody who is not known there
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
    """Return the bytes that are free where a folder is or goes, and ``more`` that it may replace.

    Raises StorageError where ``size`` bytes do not fit.
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
