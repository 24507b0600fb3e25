"""Open a tree on disk together with its ledger, which says what patchkit has changed in it."""

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
from patchkit.frozen import Values, frozen
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
    """A tree on disk, and the ledger of what patchkit has changed in it.

    ``state`` is the folder of the ledger. ``libraries`` collects the sha256 that each library had
    when it was first read: a commit refuses a library that has changed since.
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
        """Make and return a folder for new libraries, in the file system of the tree.

        ``locked_workspace`` removes it at its end. Raises StorageError if it cannot be made.
        """
        journal = journal_of(self.tree, self.state)
        folder = journal.folder / "new"
        with translated():
            make_folders(folder)
        return folder

    def upstream_library(self, path: str) -> Path:
        """Return the path of upstream's library: in the tree, or among the originals if replaced.

        Raises HashMismatchError if the original is damaged or missing.
        """
        if self.ledger is None or path not in self.ledger.libraries:
            place = place_of(self.tree.root, path)
            # Note the digest before the caller reads the file.
            self.libraries.setdefault(path, sha256_of(place))
            return place

        original = original_path(self.state, path)
        sha256, _ours = self.ledger.libraries[path]
        if not is_file(original) or sha256_of(original) != sha256:
            raise damaged_original(original, path)
        return original


def open_workspace(
    path: Path,
    project: str,
    *,
    sandboxed: Sandboxed = Sandboxed.ALWAYS,
) -> Workspace:
    """Detect the tree of a project at ``path`` and read it, to look at only.

    Raises as ``detect`` and ``read_workspace`` do.
    """
    return read_workspace(detect(path, project, sandboxed=sandboxed))


@contextlib.contextmanager
def locked_workspace(find: Callable[[], SourceTree]) -> Iterator[Workspace]:
    """Lock the tree that ``find`` returns, undo an interrupted commit, and open it for writing.

    Raises BusyError if another patchkit holds the tree, and as ``read_workspace`` does.
    """
    tree = find()
    with locked(tree.root):
        journal = journal_of(tree, state_folder(tree))
        journal.recover()

        try:
            # Call find again: recovery may have restored files and ledger.
            yield read_workspace(find(), writing=True)
        finally:
            with contextlib.suppress(OSError):  # the next run clears it
                journal.clear_staged()


def read_workspace(tree: SourceTree, *, writing: bool = False) -> Workspace:
    """Return a tree with its ledger, and with upstream's texts of patched files as ``pristine``.

    Raises DriftError if a patched file was edited or the ledger is unusable, HashMismatchError if
    an original is damaged. Raises StorageError if a commit was interrupted, unless ``writing``.
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


def _check_unedited(tree: SourceTree, state: Path, ledger: Ledger) -> Values:
    """Return the sha256 of every patched file. Raises DriftError if one was edited afterwards."""
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
    """Return the verdicts in the ledger if they still hold, else None.

    They hold if patchkit, recipe, request and all files that were read are the same. Raises
    DriftError if the ledger has verdicts about other fixes than the recipe has.
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
    """Return whether patchkit, recipe, version, request and files are those of the ledger."""
    # Another patchkit or recipe may decide differently about the same files.
    basis = (ledger.patchkit, ledger.recipe, ledger.version, ledger.request)
    wanted_request = LedgerRequest.of(request)
    if basis != (__version__, recipe.digest, str(tree.version), wanted_request):
        return False

    expected = dict(ledger.seen)
    for path, (_before, after) in ledger.files.items():
        expected.setdefault(path, after)
    return all(digest_now(tree, path) == sha256 for path, sha256 in expected.items())
