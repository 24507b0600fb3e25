"""Put the originals back even if ledger or journal are damaged, without losing any content."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from patchkit.durable.journal import Change
from patchkit.durable.lock import locked
from patchkit.durable.paths import file_digest, is_file, place_of
from patchkit.errors import PatchkitError, SourceError
from patchkit.frozen import positional
from patchkit.patching.workspace import journal_of, original_path, read_ledger
from patchkit.reading import LARGEST_IN_TREE
from patchkit.source.detect import state_folder
from patchkit.source.tree import SourceTree

ASIDE = ".patchkit-aside"
"""The folder in a tree for what a forced revert moves away: edited files, an unreadable journal."""


@positional
class ForcedRevert:
    """Paths that were restored, and those whose content was moved to ``aside``.

    ``created`` is True if a readable ledger says which files patchkit has created; without it,
    such files stay. ``lost`` are files whose original is damaged or missing: they stay unchanged,
    and the user has to take them from the release.
    """

    restored: list[str]
    moved: list[str]
    lost: list[str]
    created: bool
    aside: Path


def revert_by_force(tree: SourceTree) -> ForcedRevert:
    """Put back every original, even if ledger, journal or patched files are damaged or edited.

    Raises SourceError if patchkit has changed nothing in the tree, BusyError if another patchkit
    holds it, StorageError if reading or writing fails.
    """
    state = state_folder(tree)
    with locked(tree.root):
        aside = _free_folder(tree.root)
        journal = journal_of(tree, state)
        moved = []
        try:
            journal.recover()
        except PatchkitError:
            # Move the journal, do not remove it: it may hold the only copy of a text.
            journal.discard(aside / "transaction")
            moved.append("transaction")
        if not state.is_dir() and not moved:
            raise SourceError(f"{tree.root}: patchkit has changed nothing here")

        ledger = None
        with contextlib.suppress(PatchkitError):
            ledger = read_ledger(state, tree.project)
        pairs = _kept_originals(state)
        if ledger is not None:
            pairs = {**ledger.files, **ledger.libraries}
        outcome = ForcedRevert([], moved, [], ledger is not None, aside)
        changes: list[Change] = []
        for path, pair in pairs.items():
            changes += _put_back(outcome, state, path, pair)
        for file in filter(is_file, sorted(state.rglob("*"))):
            path = file.relative_to(tree.root).as_posix()
            changes.append(Change(path, file_digest(file), None))

        journal.commit(changes)
        return outcome


def _put_back(
    outcome: ForcedRevert, state: Path, path: str, pair: tuple[str, str]
) -> Iterator[Change]:
    """Yield the changes that restore a file, and note the result in ``outcome``.

    ``pair`` is the sha256 of upstream's file, and of the file as patchkit wrote it.
    """
    upstream, patched = pair
    aside = outcome.aside
    original = original_path(state, path)
    saved = file_digest(original) if is_file(original) else ""
    # A damaged original must not overwrite the file, which may be the better copy.
    if saved != upstream:
        outcome.lost.append(path)
        if saved:
            yield Change(f"{aside.name}/originals/{path}", "", original)
        return

    place = place_of(aside.parent, path)
    now = file_digest(place)
    # Neither upstream's nor patchkit's content: the user edited the file, so keep it aside.
    if now not in ("", upstream, patched):
        outcome.moved.append(path)
        # Pass the path, not the content, so that the file keeps its mode.
        yield Change(f"{aside.name}/{path}", "", place)
    if now != upstream:
        yield Change(path, now, _content(original) if saved else None)
    outcome.restored.append(path)


def _free_folder(root: Path) -> Path:
    """Return the path of a folder to move files to; it does not exist yet."""
    aside = root / ASIDE
    number = 1
    while aside.exists():
        number += 1
        aside = root / f"{ASIDE}-{number}"
    return aside


def _kept_originals(state: Path) -> dict[str, tuple[str, str]]:
    """Return path → (sha256, "") of every original that is kept.

    "" stands for the unknown sha256 of patchkit's file, so a changed file counts as edited.
    """
    home = original_path(state, "")
    return {
        file.relative_to(home).as_posix(): (file_digest(file), "")
        for file in sorted(home.rglob("*"))
        if is_file(file)
    }


def _content(place: Path) -> bytes | Path:
    # Pass a large file (a library) by its path: it keeps its mode and is not read into memory.
    return place if place.stat().st_size > LARGEST_IN_TREE else place.read_bytes()
