"""Name a model: repository, revision and folder; pin its commit in ``cluster.toml``."""

from __future__ import annotations

import json
import os
import re
import shutil
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from patchkit.durable.atomic import replacing
from patchkit.durable.lock import locked
from patchkit.durable.paths import is_plain
from patchkit.errors import StorageError, UsageError, translated
from patchkit.reading import read_text
from patchkit.records import RecordError, Utf8, matching

# As the Hub has them: no -- and no .. in a name, which makes folder names unambiguous.
_PART = r"(?!\.)(?!-)[A-Za-z0-9._-]{1,96}(?<![.-])"
_REPO = re.compile(
    rf"(?!.*(?:--|\.\.))(?:{_PART}/)?{_PART}"
)  # or an old one's, without org
_REVISION = re.compile(r"(?![-/.])[A-Za-z0-9._/-]{1,200}")
_FOLDER = re.compile(
    rf"(?:(?P<org>{_PART})--)?(?P<name>{_PART})@(?P<commit>[0-9a-f]{{12}})"
)
SHORT = 12
"""The digits of a commit in the name of a folder."""

_HINT = "name it as the Hub does: openai/gpt-oss-120b, or openai/gpt-oss-120b@main"
_PATTERNS = frozenset("*?[]\\")
_SPARE = 1.05  # of what is to be written: a full disk stops more than a download


def _require_file_name(path: str) -> None:
    # `hf download` takes names for patterns, and each name is shown, copied and joined to a folder.
    odd = (
        not path.isprintable()
        or _PATTERNS & set(path)
        or path.startswith(("-", ".cache/"))
    )
    if odd or not is_plain(path):
        raise RecordError(f"is {path!r}, which is no plain name of a file")


FileName = Annotated[Utf8, _require_file_name]
"""A file of a model, as the Hub, an index or a record names it: it leads nowhere else."""

Commit = Annotated[str, matching("[0-9a-f]{40}", "a commit, 40 hex digits")]
Digest = Annotated[
    str, matching("[0-9a-f]{40}|[0-9a-f]{64}", "a sha256, or git's sha1")
]


def split_revision(spec: str) -> tuple[str, str]:
    """Return repository and revision of ``REPO[@REV]``, "" for none. Raises UsageError."""
    repo, _, revision = spec.partition("@")
    if not _REPO.fullmatch(repo):
        raise UsageError(f"{spec!r} names no model", hint=_HINT)
    if "@" in spec and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise UsageError(f"{revision!r} is no branch, tag or commit", hint=_HINT)
    return repo, revision


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A commit of a model by the name of its folder, which has the first 12 digits."""

    repo: str
    commit: str

    @property
    def name(self) -> str:
        """Return the folder's name."""
        return f"{self.repo.replace('/', '--')}@{self.commit[:SHORT]}"


def folder_of(name: str) -> ModelFolder | None:
    """Return what a folder's name says; None if it is no name of a model's folder."""
    match = _FOLDER.fullmatch(name)
    if not match:
        return None
    repo = f"{match['org']}/{match['name']}" if match["org"] else match["name"]
    return (
        ModelFolder(repo=repo, commit=match["commit"])
        if _REPO.fullmatch(repo)
        else None
    )


def models_folder(text: str) -> Path:
    """Return the folder of all models, on the machine that asks. Raises UsageError."""
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
    folder: Path, left: int, more: int = 0, hint: str = _OTHER_DISK
) -> int:
    """Return the bytes that are free where a folder is or goes, and ``more`` that it may replace.

    Raises StorageError where what is left to write does not fit.
    """
    nearest = next(
        place for place in (folder, *folder.parents) if os.access(place, os.F_OK)
    )
    free = shutil.disk_usage(nearest).free + more
    if (needed := int(left * _SPARE)) > free:
        raise StorageError(
            f"{folder}: needs {needed:,} bytes, and {free:,} are free", hint=hint
        )
    return free


_PATIENCE = 10.0  # seconds for others that write there
_TABLE = "models"
_HEADER = re.compile(r"""(?m)^[ \t]*\[[ \t]*["']?models["']?[ \t]*\][ \t]*(?:#.*)?\n""")
_IMAGE = re.compile(
    r"""(?m)^([ \t]*(?:serve[ \t]*\.[ \t]*)?image[ \t]*=[ \t]*)(["'])([^"'\n]*)\2"""
)


def pin(path: Path, repo: str, commit: str) -> None:
    """Write the commit of a model into a cluster file, below ``[models]``.

    Raises UsageError if the file is no TOML, or is one that only a person can edit.
    """
    line = f"{json.dumps(repo)} = {json.dumps(commit)}"
    key = rf"(?m)^[ \t]*[\"']{re.escape(repo)}[\"'][ \t]*=[ \t]*([\"'])[^\"'\n]*\1"

    def write_line(text: str) -> str:
        changed = text + ("\n" if text and not text.endswith("\n") else "")
        if own := re.search(key, changed):
            return changed[: own.start()] + line + changed[own.end() :]
        if header := _HEADER.search(changed):
            return f"{changed[: header.end()]}{line}\n{changed[header.end() :]}"
        return changed + ("\n" if text.strip() else "") + f"[{_TABLE}]\n{line}\n"

    _replace_value(path, (_TABLE, repo), commit, write_line, line)


def pin_image(path: Path, image: str, *, former: bool = False) -> None:
    """Write the image of a cluster file, in the place of the one that it names.

    With ``former`` that one stays, in a comment above the line. Raises UsageError as ``pin`` does.
    """
    value = json.dumps(image)

    def write_value(own: re.Match[str]) -> str:
        before = f"# {own[0].strip()}  # before --apply\n" if former else ""
        return f"{before}{own[1]}{value}"

    change = partial(_IMAGE.sub, write_value, count=1)
    _replace_value(path, ("serve", "image"), image, change, f"image = {value}")


def _replace_value(
    path: Path,
    key: tuple[str, str],
    value: str,
    change: Callable[[str], str],
    line: str,
) -> None:
    # Whoever pins something else meanwhile would lose one of the two lines.
    with translated(at=path), locked(path.parent, patience=_PATIENCE):
        text, (table, name) = read_text(path), key
        try:
            before = tomllib.loads(text)
            held = before.get(table, {})
            if isinstance(held, dict) and held.get(name) == value:
                return
            changed = change(text)
            # The edit is by lines: only this says that it did what it should, and nothing else.
            if tomllib.loads(changed) == {**before, table: {**held, name: value}}:
                with replacing(path) as file:
                    file.write(changed.encode())
                return
        except (tomllib.TOMLDecodeError, TypeError):
            pass
    raise UsageError(
        f"{path}: {name} cannot be pinned in it",
        why=f"it is not TOML, or its table [{table}] is written in another way",
        hint=f"write below [{table}] by hand: {line}",
    )
