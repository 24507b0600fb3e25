"""A tree on disk with what patchkit already did to it, as its ledger says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import field, replace
from pathlib import Path

from patchkit import __version__
from patchkit.digests import sha256_of
from patchkit.durable.lock import locked
from patchkit.durable.paths import is_file, place_of
from patchkit.durable.staging import make_folders
from patchkit.errors import DriftError, translated
from patchkit.frozen import frozen
from patchkit.patching.fix import Request, Verdict
from patchkit.patching.ledger import (
    Ledger,
    LedgerRequest,
    damaged_original,
    digest_now,
    journal_of,
    original_path,
    originals,
    read_ledger,
    unusable,
)
from patchkit.patching.recipe import Recipe
from patchkit.patching.user_patch import fixes_for
from patchkit.reading import decoded
from patchkit.source.detect import detect, state_folder
from patchkit.source.tree import Sandboxed, SourceTree


@frozen
class Workspace:
    """A tree on disk, with what patchkit already did to it.

    ``libraries`` collects the sha256 of each library when it was first looked at: the commit
    refuses one that has changed since.
    """

    tree: SourceTree
    state: Path
    ledger: Ledger | None
    libraries: dict[str, str] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        """The folder of ledger and originals, relative to the tree."""
        return self.state.relative_to(self.tree.root)

    def make_folder(self) -> Path:
        """Make a folder for new libraries on the disk of the tree; the end of the run clears it.

        Raises StorageError where a commit could not write either.
        """
        journal = journal_of(self.tree, self.state)
        folder = journal.folder / "new"
        with translated():
            make_folders(folder)
        return folder

    def upstream_library(self, path: str) -> Path:
        """Return where upstream's library lies, in its place or among the originals.

        Raises HashMismatchError if the original is damaged.
        """
        if self.ledger is None or path not in self.ledger.libraries:
            place = place_of(self.tree.root, path)
            # Before somebody reads it.
            self.libraries.setdefault(path, sha256_of(place))
            return place

        original = original_path(self.state, path)
        sha256, _ours = self.ledger.libraries[path]
        if not is_file(original) or sha256_of(original) != sha256:
            raise damaged_original(original, path)
        return original


def open_workspace(
    path: Path,
    project: str = "vllm",
    *,
    sandboxed: Sandboxed = Sandboxed.ALWAYS,
) -> Workspace:
    """Return the tree of a project at ``path``, as ``read_workspace`` does."""
    return read_workspace(detect(path, project, sandboxed=sandboxed))


@contextlib.contextmanager
def locked_workspace(find: Callable[[], SourceTree]) -> Iterator[Workspace]:
    """Open the tree that ``find`` returns to change it, alone; take back what was cut short first.

    Raises as ``read_workspace`` does, and BusyError.
    """
    tree = find()
    with locked(tree.root):
        journal = journal_of(tree, state_folder(tree))
        journal.recover()

        try:
            # Once more: recovery may bring files and ledger back.
            yield read_workspace(find(), writing=True)
        finally:
            with contextlib.suppress(OSError):  # the next run does it
                journal.clear_staged()


def read_workspace(tree: SourceTree, *, writing: bool = False) -> Workspace:
    """Return a tree with upstream's texts of changed files; every file of the ledger is read.

    Raises SourceError if it is no such tree, DriftError if a patched file was edited since,
    StorageError if an earlier run was cut short and this one must not write.
    """
    state = state_folder(tree)
    if not writing:
        journal_of(tree, state).check_finished()

    ledger = read_ledger(state, tree.project)
    if ledger is None:
        return Workspace(tree=tree, state=state, ledger=None)

    digests = _check_unedited(tree, state, ledger)
    pristine: dict[str, str | None] = dict.fromkeys(ledger.files)
    for path, data in originals(state, ledger).items():
        if data is not None:
            pristine[path] = decoded(data, str(original_path(state, path)))
    return Workspace(
        tree=replace(tree, pristine=pristine),
        state=state,
        ledger=ledger,
        libraries={path: digests[path] for path in ledger.libraries},
    )


def _check_unedited(tree: SourceTree, state: Path, ledger: Ledger) -> dict[str, str]:
    """Return the digest of every patched file. Raises DriftError if one was edited since."""
    digests = {}
    edited = []
    pairs = {**ledger.files, **ledger.libraries}
    for path, pair in pairs.items():
        digests[path] = digest_now(tree, path)
        if digests[path] not in pair:
            edited.append(path)
    if not edited:
        return digests

    why = "the ledger knows another content, and your edits must not be lost"
    hint = f"take your edits out, then run again; upstream's files are in {state / 'originals'}"
    if ledger.version != str(tree.version):
        why = f"the tree was {ledger.version} when it was patched, and is {tree.version} now"
        hint = f"remove {state} if nothing of it is left; else revert {ledger.version} first"
    wrote = "it" if len(edited) == 1 else "them"
    what = (
        f"{', '.join(edited)}: edited since patchkit wrote {wrote}; nothing was changed"
    )
    raise DriftError(what, why=why, hint=hint)


def known_verdicts(
    workspace: Workspace, recipe: Recipe, request: Request
) -> tuple[Verdict, ...] | None:
    """Return the ledger's verdicts if nothing that they rest on has changed; nothing is parsed.

    Raises DriftError unless they are about the recipe's fixes.
    """
    ledger = workspace.ledger
    if ledger is None or not _is_current(ledger, workspace.tree, recipe, request):
        return None

    fixes = {fix.id: fix for fix in fixes_for(recipe.fixes, request)}
    if {entry.id for entry in ledger.verdicts} != set(fixes):
        what = "its verdicts are not about the fixes of the recipe that it names"
        raise unusable(workspace.state, recipe.project, what)
    return tuple(
        Verdict(
            fixes[entry.id],
            entry.state,
            entry.reason,
            severity=entry.severity or None,
            note=entry.note,
        )
        for entry in ledger.verdicts
    )


def _is_current(
    ledger: Ledger,
    tree: SourceTree,
    recipe: Recipe,
    request: Request,
) -> bool:
    """Return whether engine, facts and files are those about which a ledger was written."""
    # Another engine or another fact may decide otherwise about the same files.
    basis = (ledger.patchkit, ledger.recipe, ledger.version, ledger.request)
    wanted_request = LedgerRequest.of(request)
    if basis != (__version__, recipe.digest, str(tree.version), wanted_request):
        return False

    expected = dict(ledger.seen)
    for path, (_before, after) in ledger.files.items():
        expected.setdefault(path, after)
    return all(digest_now(tree, path) == sha256 for path, sha256 in expected.items())
