"""Open a tree on disk together with its ledger, which says what patchkit has changed in it.

By its ledger, a later run can check, repeat or undo what was done.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from packaging.version import Version

from patchkit import __version__
from patchkit.digests import Digest, digest, sha256_of
from patchkit.durable.journal import Journal
from patchkit.durable.lock import locked
from patchkit.durable.paths import PlainPath, is_file, place_of
from patchkit.durable.staging import make_folders
from patchkit.errors import (
    DriftError,
    HashMismatchError,
    PatchkitError,
    SourceError,
    UsageError,
    translated,
)
from patchkit.frozen import Values, frozen
from patchkit.patching.fix import Id, Patch, Request, Severity, State, Verdict
from patchkit.patching.recipe import Recipe
from patchkit.patching.user_patch import fixes_for
from patchkit.quoting import quoted
from patchkit.reading import LARGEST_IN_TREE, decoded, read_bytes, read_text
from patchkit.records import RecordError, Sha256, Utf8, matching, one_of, read_json
from patchkit.source.detect import detect, state_folder
from patchkit.source.project import projects
from patchkit.source.tree import Sandboxed, SourceTree
from patchkit.target import MODES, targets

_NAME = "ledger.json"
_ORIGINALS = "originals"


_DAY = matching(r"(\d{4}-\d\d-\d\d)?", "a day, such as 2026-11-22")


@frozen
class LedgerRequest:
    """The user's request when a tree was patched, with the texts of patches.

    Every field is checked on reading: a tree may come from elsewhere, with its ledger.
    """

    target: Annotated[str, one_of(*targets())]
    arch: Annotated[str, one_of(*MODES)]
    only: tuple[Id, ...]
    skip: tuple[Id, ...]
    also: tuple[Id, ...]
    patches: tuple[Patch, ...] = ()

    @classmethod
    def of(cls, request: Request) -> LedgerRequest:
        return cls(
            target=request.target.name,
            arch=request.arch,
            only=tuple(sorted(request.only)),
            skip=tuple(sorted(request.skip)),
            also=tuple(sorted(request.also)),
            patches=request.patches,
        )

    def fields(self) -> dict[str, object]:
        """Return the fields of the request for JSON, without the patches."""
        fields = asdict(self)
        del fields["patches"]
        return fields


@frozen
class LedgerVerdict:
    """A verdict in the ledger; ``severity`` is "" if the verdict has none."""

    id: Id
    state: State
    severity: Severity | Literal[""]
    reason: Utf8
    note: Utf8

    @classmethod
    def of(cls, verdict: Verdict) -> LedgerVerdict:
        return cls(
            id=verdict.fix.id,
            state=verdict.state,
            severity=verdict.severity or "",
            reason=verdict.reason,
            note=verdict.note,
        )


@frozen
class Ledger:
    """The content of ``.patchkit/ledger.json``; the originals are in the same folder.

    ``files`` maps the path of each patched text to its sha256 (before, after); before is "" for a
    file that patchkit created. ``libraries`` is the same for binary files. ``seen`` maps every
    other file that a fix looked at to its sha256, "" if it did not exist. ``date`` is the day of
    the proofs, from ``today``; "" in wheels, whose bytes must not depend on the day.
    """

    patchkit: Annotated[str, Version]
    recipe: Annotated[str, matching("[0-9a-z]{1,64}", "a digest")]
    project: Id
    version: Annotated[str, Version]
    request: LedgerRequest
    files: Mapping[PlainPath, tuple[Digest, Sha256]]
    seen: Mapping[PlainPath, Digest]
    verdicts: tuple[LedgerVerdict, ...]
    proofs: tuple[Utf8, ...]
    libraries: Mapping[PlainPath, tuple[Sha256, Sha256]] = field(default_factory=dict)
    date: Annotated[str, _DAY] = ""
    format: Literal[1] = 1

    def __post_init__(self) -> None:
        """Raise ValueError if a fix has two verdicts, or a path is both text and library."""
        if len({verdict.id for verdict in self.verdicts}) < len(self.verdicts):
            raise ValueError("has a fix twice")
        if self.files.keys() & self.libraries.keys():
            raise ValueError("has a file twice")

    def to_json(self) -> bytes:
        """Return the ledger as JSON. The same request, tree and day give the same bytes."""
        fields = asdict(self)
        # Leave out empty fields that ledgers of earlier versions do not have.
        for name in ("date", "libraries"):
            if not fields[name]:
                del fields[name]
        if not self.request.patches:
            del fields["request"]["patches"]

        # Sort the keys: the order of the dicts depends on the order in which files were read.
        return (json.dumps(fields, indent=1, sort_keys=True) + "\n").encode()


def today() -> str:
    """Return the day for a ledger, ``2026-11-22`` in UTC, of SOURCE_DATE_EPOCH if that is set.

    Raises UsageError if SOURCE_DATE_EPOCH is not a number of seconds.
    """
    epoch = os.environ.get("SOURCE_DATE_EPOCH") or time.time()
    try:
        return datetime.fromtimestamp(int(epoch), UTC).date().isoformat()
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"SOURCE_DATE_EPOCH is {epoch!r}, which is no number of seconds since 1970",
            hint="unset SOURCE_DATE_EPOCH",
        ) from None


def journal_of(tree: SourceTree, state: Path) -> Journal:
    """Return the journal that changes a tree and its ledger together."""
    revert = _revert_command(tree.project, state)
    return Journal(
        root=tree.root,
        folder=state / "transaction",
        home=state,
        again=revert,
        rescue=f"{revert} --force",
    )


def _revert_command(project: str, state: Path) -> str:
    if project in projects():
        return quoted("patchkit", "revert", f"--{project}-src", state.parent)

    # Only libraries are replaced in any other package; its state folder is in its .dist-info.
    return quoted("patchkit", "native", state.parents[1], "--revert")


def ledger_path(state: Path) -> Path:
    return state / _NAME


def original_path(state: Path, path: str) -> Path:
    return state / _ORIGINALS / path


def read_ledger(state: Path, project: str) -> Ledger | None:
    """Return the ledger of a tree, None if there is none.

    Raises DriftError, which says how to revert, if a field is not as patchkit writes it.
    """
    place = ledger_path(state)
    # lexists: a dangling link counts as an unusable ledger, not as a missing one.
    if not os.path.lexists(place):
        return None

    try:
        return read_json(Ledger, read_text(place, limit=LARGEST_IN_TREE, follow=False))
    except (UsageError, SourceError) as error:
        problem = error.what.removeprefix(f"{place}: ")
    except RecordError as error:
        problem = f"not a ledger of this patchkit: {error}"
    raise unusable(state, project, problem)


def unusable(state: Path, project: str, what: str) -> DriftError:
    """Return the error for a ledger that cannot be used, with the command that reverts the tree."""
    return DriftError(
        f"{ledger_path(state)}: {what}",
        why="it was edited, or written by another version of patchkit",
        hint=f"put the originals back: {_revert_command(project, state)} --force",
    )


def originals(state: Path, ledger: Ledger) -> dict[str, bytes | None]:
    """Return upstream's content of each patched text file, None for a file that patchkit created.

    Raises HashMismatchError if an original is not the one that the ledger names.
    """
    texts: dict[str, bytes | None] = {}
    for path, (before, _after) in ledger.files.items():
        place = original_path(state, path)
        data = None
        # A path that is no file, or a file that is too large, counts as a missing original.
        with contextlib.suppress(UsageError, SourceError):
            data = read_bytes(place, limit=LARGEST_IN_TREE, follow=False)

        if digest(data) != before:
            raise damaged_original(place, path)
        texts[path] = data
    return texts


def damaged_original(place: Path, path: str) -> HashMismatchError:
    """Return the error for an original that is not what upstream shipped."""
    return HashMismatchError(
        f"{place}: is not the original of {path}",
        why="files in the ledger's folder were edited or removed",
        hint="unpack the release again, or install the package again",
    )


def digest_now(tree: SourceTree, path: str) -> str:
    """Return the sha256 of a file as it is now; "" if missing, "unreadable" if no plain file."""
    if not os.path.lexists(tree.root / path):
        return ""

    try:
        # Read in pieces: a library may be larger than the memory.
        return sha256_of(place_of(tree.root, path))
    except PatchkitError:
        return "unreadable"


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
