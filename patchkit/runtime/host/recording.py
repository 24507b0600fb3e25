"""Record a machine in a folder: what a probe read, in the layout of /, to replay it elsewhere.

Links are kept as relative links inside of the folder, so that tar carries them. commands/ holds
what tools answered, recording.json what could not be read and why.
"""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from patchkit import __version__
from patchkit.errors import SourceError, UsageError
from patchkit.reading import read_text
from patchkit.records import RecordError, read_json

_INDEX = "recording.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index:
    """The content of ``recording.json``: path → the error of reading it."""

    patchkit: str = ""
    errors: dict[str, str]


class RecordingWriter:
    """A copy, in ``folder``, of what a Reader reads below ``root``."""

    def __init__(self, root: Path, folder: Path) -> None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder}: is there, and not empty", hint="name a new folder")
        self.root = Path(os.path.realpath(root))
        self.home = folder
        self.files = 0
        self._errors: dict[str, str] = {}

    def file(self, path: str, data: bytes) -> None:
        place = self._place(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        self.files += not place.exists()
        place.write_bytes(data)

    def folder(self, path: str, names: Iterable[str]) -> None:
        """Add a folder and its folders; files come when they are read."""
        self._place(path).mkdir(parents=True, exist_ok=True)
        for name in names:
            if (self.root / path / name).is_dir():
                self._place(f"{path}/{name}").mkdir(parents=True, exist_ok=True)

    def error(self, path: str, words: str) -> None:
        self._errors[path] = words

    def finish(self) -> None:
        index = _Index(patchkit=__version__, errors=self._errors)
        self.home.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(index), indent=1, ensure_ascii=False)
        (self.home / _INDEX).write_text(f"{text}\n", encoding="utf-8")

    def _place(self, path: str) -> Path:
        """Return where a path lies in the copy, and make the links on its way."""
        here = "/"
        for part in path.split("/"):
            step = posixpath.join(here, part)
            try:
                target = str((self.root / step.lstrip("/")).readlink())
            except OSError:
                here = step
                continue
            # A link, absolute or not, is made again as a relative one within the copy.
            folder, here = here, posixpath.normpath(posixpath.join(here, target))
            link = self.home / step.lstrip("/")
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(posixpath.relpath(here, folder))
        return self.home / here.lstrip("/")


def recorded_errors(root: Path) -> dict[str, str]:
    """Return path → error of reading it; none for a folder that was made by hand."""
    place = root / _INDEX
    if not place.exists():
        return {}
    try:
        return read_json(_Index, read_text(place)).errors
    except RecordError as error:
        raise SourceError(
            f"{place}: is not what `patchkit probe --save` writes: {error}",
            hint="take the whole folder, as it was saved",
        ) from None
