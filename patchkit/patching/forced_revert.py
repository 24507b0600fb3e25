"""The way out when ledger or journal are damaged: the originals go back, and nothing is lost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from patchkit.durable.journal import Change
from patchkit.durable.lock import locked
from patchkit.durable.paths import file_digest, is_file, place_of
from patchkit.errors import PatchkitError, SourceError
from patchkit.patching.ledger import journal_of, original_path, read_ledger
from patchkit.reading import LARGEST_IN_TREE
from patchkit.source.detect import state_folder
from patchkit.source.tree import SourceTree

ASIDE = ".patchkit-aside"
"""Folder of the tree for what was in the way: edited files, a journal that cannot be read."""


@dataclass(frozen=True, slots=True)
class Rescued:
    """Paths that were restored, and those whose content was moved to ``aside``.

    ``created`` is False if no ledger says which files patchkit had created: those stay.
    ``lost`` are files whose original is damaged: they stay as they are, to be had from the release.
    """

    restored: tuple[str, ...]
    moved: tuple[str, ...]
    lost: tuple[str, ...]
    created: bool
    aside: Path


def revert_by_force(tree: SourceTree) -> Rescued:
    """Put back every original though ledger, journal or patched files are damaged or edited.

    Raises SourceError if there is nothing of patchkit's, StorageError for I/O.
    """
    state = state_folder(tree)
    with locked(tree.root):
        number, aside = 1, tree.root / ASIDE
        while aside.exists():
            number += 1
            aside = tree.root / f"{ASIDE}-{number}"
        journal, moved = journal_of(tree, state), []
        try:
            journal.recover()
        except PatchkitError:
            # Moved, not removed: it may hold the only copy of a text.
            journal.discard(aside / "transaction")
            moved.append("transaction")
        if not state.is_dir() and not moved:
            raise SourceError(f"{tree.root}: patchkit has changed nothing here")
        ours, known = _known_files(state, tree.project)
        changes, restored, lost = [], [], []
        for path, (wanted, left) in ours.items():
            original = original_path(state, path)
            kept = file_digest(original) if is_file(original) else ""
            # A damaged original must not overwrite the file, which may be the better copy.
            if kept != wanted:
                lost.append(path)
                if kept:
                    changes.append(
                        Change(f"{aside.name}/originals/{path}", "", original)
                    )
                continue
            found = file_digest(place_of(tree.root, path))
            # Neither upstream's text nor patchkit's: edits of the user's, which must not be lost.
            if found not in (wanted, left) and found:
                moved.append(path)
                # By its name, so that it keeps its mode.
                changes.append(Change(f"{aside.name}/{path}", "", tree.root / path))
            if found != wanted:
                changes.append(
                    Change(path, found, _content(original) if kept else None)
                )
            restored.append(path)
        for file in filter(is_file, sorted(state.rglob("*"))):
            path = file.relative_to(tree.root).as_posix()
            changes.append(Change(path, file_digest(file), None))
        journal.commit(changes)
        return Rescued(tuple(restored), tuple(moved), tuple(lost), known, aside)


def _known_files(state: Path, project: str) -> tuple[dict[str, tuple[str, str]], bool]:
    """Return path → sha256 (of the original, as patchkit left it), and whether a ledger says so."""
    try:
        ledger = read_ledger(state, project)
    except PatchkitError:
        ledger = None
    if ledger is not None:
        return {**ledger.files, **ledger.libraries}, True
    home = original_path(state, "")
    files = filter(is_file, sorted(home.rglob("*")))
    # Without a ledger it is not known what patchkit wrote: the present files go aside.
    return {
        file.relative_to(home).as_posix(): (file_digest(file), "") for file in files
    }, False


def _content(place: Path) -> bytes | Path:
    # A library is handed on by its name, with its mode: it may be larger than the memory.
    return place if place.stat().st_size > LARGEST_IN_TREE else place.read_bytes()
