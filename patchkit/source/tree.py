"""Read the texts of an upstream tree, with an overlay of texts that are not written yet."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from packaging.version import Version

from patchkit.digests import digest
from patchkit.durable.paths import place_inside
from patchkit.errors import AbsentError, DriftError, SourceError, UsageError
from patchkit.frozen import Values, frozen
from patchkit.reading import LARGEST_IN_TREE, read_bytes

RESTORE = "restore the file from the release"


class Sandboxed(enum.Enum):
    """When code of a tree runs in a sandbox, while a plan is proved."""

    ALWAYS = "always"
    IF_POSSIBLE = "if possible"  # for a tree that a lock verifies, or to be built
    NEVER = "never"  # with --trust-source


Kind = str  # "sdist" | "archive" | "git" | "installed"


@frozen
class SourceTree:
    """The texts of an upstream tree. Paths are POSIX and relative to ``root``.

    ``pristine`` has upstream's texts of the files that patchkit has changed on disk, None for a
    file that it created. ``overlay`` has the texts that are not written yet. ``seen`` collects the
    sha256 of every file that was read or looked for ("" if absent), so that a later run can tell
    whether one has changed. ``texts`` caches texts that were read, ``answers`` results of slow
    computations by their inputs. ``note`` says how the version was found if no release and no tag
    names it.
    """

    root: Path
    project: str
    version: Version
    kind: Kind
    pristine: Mapping[str, str | None] = field(default_factory=dict)
    overlay: Values = field(default_factory=dict)
    # A tree that `with_texts` makes of this one shares these dicts with it.
    seen: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    answers: dict[object, Any] = field(default_factory=dict)
    sandboxed: Sandboxed = Sandboxed.ALWAYS
    note: str = ""

    def exists(self, path: str) -> bool:
        if path in self.overlay:
            return True

        if path in self.pristine:
            exists = self.pristine[path] is not None
        else:
            exists = (self.root / path).is_file()

        if not exists:
            self.seen.setdefault(path, "")
        return exists

    def read(self, path: str) -> str:
        """Return the text of a file: the one in ``overlay``, or upstream's.

        Raises AbsentError if it is missing, DriftError if it is not UTF-8 or has CR line ends,
        SourceError if a link leads out of the tree or the file cannot be read.
        """
        if path in self.overlay:
            return self.overlay[path]

        if path in self.pristine:
            text = self.pristine[path]
            if text is None:
                raise self._missing(path)
            self.seen.setdefault(path, digest(text))
            return text

        if path not in self.texts:
            data = self.read_bytes(path)
            self.seen.setdefault(path, digest(data))
            self.texts[path] = _decode(path, data)
        return self.texts[path]

    def digest_of(self, path: str) -> str:
        """Return the sha256 of upstream's text of a file, "" if there is none.

        Raises as ``read`` does.
        """
        if self.exists(path) and path not in self.seen:
            self.read(path)
        return self.seen[path]

    def find(self, path: str) -> str | None:
        """Return the text of a file, None if there is none. Raises as ``read`` does."""
        return self.read(path) if self.exists(path) else None

    def read_bytes(self, path: str) -> bytes:
        """Return a file's contents on disk.

        Raises AbsentError if it is missing, SourceError if it cannot be read.
        """
        place = place_inside(self.root, path)
        if not os.path.lexists(place):
            raise self._missing(path)

        try:
            return read_bytes(place, limit=LARGEST_IN_TREE, follow=False)
        except UsageError as error:
            # A UsageError would say that the request is wrong, but the tree is.
            what = error.what.removeprefix(f"{place}: ")
            raise SourceError(f"{path}: {what}", hint=RESTORE) from None

    def _missing(self, path: str) -> AbsentError:
        return AbsentError(
            f"{path}: not found in {self.root}",
            why="the release moved it, or the tree is incomplete",
            hint="compare the tree with the release, or leave the fix out with --without",
        )

    def glob(self, pattern: str) -> list[str]:
        """Return the sorted paths of upstream's files that match; ``**`` matches any folders."""
        files = filter(Path.is_file, self.root.glob(pattern))
        paths = sorted(file.relative_to(self.root).as_posix() for file in files)
        # In ``pristine``, None stands for a file that patchkit created: it is not upstream's.
        return [path for path in paths if self.pristine.get(path, "") is not None]

    def containing(self, pattern: str, needle: str) -> list[str]:
        """Return the paths that match ``pattern`` and whose texts contain ``needle``."""
        return [path for path in self.glob(pattern) if needle in self.read(path)]

    def with_texts(self, texts: Values) -> SourceTree:
        return replace(self, overlay={**self.overlay, **texts})


def _decode(path: str, data: bytes) -> str:
    """Return the text of a file. Raises DriftError if it is not UTF-8 or has CR line ends."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DriftError(
            f"{path}:{line}: not UTF-8",
            why="every release ships UTF-8, so this file was converted",
            hint=RESTORE,
        ) from None

    if "\r" in text:
        line = text.count("\n", 0, text.index("\r")) + 1
        raise DriftError(
            f"{path}:{line}: has CR line endings",
            why="every release ships LF; git's core.autocrlf or an editor changed them",
            hint="git config core.autocrlf false; then check the file out again",
        )
    return text


def first_existing(tree: SourceTree, paths: Sequence[str]) -> str:
    """Return the first path that exists in the tree. Raises AbsentError if none does."""
    for path in paths:
        if tree.exists(path):
            return path
    raise AbsentError(
        f"{paths[0]}: not found, nor {' nor '.join(paths[1:])}",
        why="upstream moved the file, or the tree is incomplete",
        hint="compare the tree with the release, or leave the fix out with --without",
    )
