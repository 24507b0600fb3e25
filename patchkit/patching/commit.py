"""Write or put back the files of a plan, its ledger and the originals as one change."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from patchkit import __version__
from patchkit.digests import digest, sha256_of
from patchkit.durable.atomic import give
from patchkit.durable.journal import Change
from patchkit.durable.paths import file_digest, place_of
from patchkit.errors import translated
from patchkit.frozen import Texts, frozen
from patchkit.patching.fix import State, Verdict
from patchkit.patching.plan import Plan, TextPairs
from patchkit.patching.recipe import Recipe
from patchkit.patching.workspace import (
    Ledger,
    LedgerRequest,
    LedgerVerdict,
    Workspace,
    journal_of,
    ledger_path,
    original_path,
    today,
)
from patchkit.reading import decoded
from patchkit.source.detect import record_path
from patchkit.source.installed_record import rewrite_record

_Contents = dict[str, bytes | None]  # by path; None where there is no file
_Rows = dict[str, tuple[str, int]]  # path → sha256, size
_Digests = dict[str, tuple[str, str]]  # path → sha256 of upstream's file, of ours
Libraries = Mapping[str, Path]  # path in the tree → the file with the new contents
NO_LIBRARIES: Libraries = MappingProxyType({})


@frozen
class Applied:
    """Result of an apply: the verdicts after it, the proofs, and the paths that were written.

    ``pending`` are the paths that a dry run would write. If the ledger says that the request was
    carried out already, nothing is proved again: ``recorded_proofs`` are the proofs in the ledger,
    ``recorded_by`` the patchkit version and day of that run.
    """

    verdicts: tuple[Verdict, ...]
    proofs: Texts = ()
    written: Texts = ()
    pending: Texts = ()
    recorded_proofs: Texts = ()
    recorded_by: str = ""


def commit_plan(
    workspace: Workspace,
    recipe: Recipe,
    plan: Plan,
    proofs: Texts,
    libraries: Libraries = NO_LIBRARIES,
) -> Applied:
    """Write the texts of a plan, the ledger and the originals: all files or none.

    ``libraries`` are as for ``commit_texts``. ``written`` in the result names no file of patchkit
    itself and no RECORD. Raises as ``commit_texts`` does.
    """
    tree = workspace.tree
    texts = plan.texts
    verdicts = tuple(map(mark_applied, plan.verdicts))
    files = {
        path: (digest(before), digest(after)) for path, (before, after) in texts.items()
    }
    seen = {path: sha256 for path, sha256 in tree.seen.items() if path not in texts}

    ledger = Ledger(
        patchkit=__version__,
        recipe=recipe.digest,
        project=tree.project,
        version=str(tree.version),
        request=LedgerRequest.of(plan.request),
        files=files,
        seen=seen,
        verdicts=tuple(map(LedgerVerdict.of, verdicts)),
        proofs=proofs,
        date=today(),
    )
    written = commit_texts(workspace, texts, ledger, libraries)

    # A pristine file is written if it goes back to upstream's text.
    sources = {*texts, *libraries, *tree.pristine}
    shown = [
        path for path in written if path in sources and not path.endswith("/RECORD")
    ]
    return Applied(
        verdicts=verdicts,
        proofs=proofs,
        written=tuple(shown),
    )


def mark_applied(verdict: Verdict) -> Verdict:
    """Return a verdict as it is after the commit: APPLY becomes APPLIED, others stay."""
    if verdict.state is State.APPLY:
        return replace(verdict, state=State.APPLIED, reason=verdict.done)
    return verdict


def commit_texts(
    workspace: Workspace,
    texts: TextPairs,
    ledger: Ledger | None,
    libraries: Libraries = NO_LIBRARIES,
) -> list[str]:
    """Write texts, ledger and originals, and remove those no longer needed; return the paths.

    Without a ledger, or if it would name no file, all files become as upstream shipped them.

    ``libraries`` maps the path of a library to its new file, which is linked into the tree and gets
    the owner and mode of the old file. A library that an earlier run replaced stays replaced if it
    is not named; naming upstream's own file for it puts it back. Raises if a file has changed since
    it was read; nothing is written then.
    """
    tree = workspace.tree
    past = workspace.ledger
    if past and ledger is None:
        libraries = {path: workspace.upstream_library(path) for path in past.libraries}
    replaced, changes = _swap_libraries(workspace, libraries)
    if ledger:
        is_needed = texts or replaced
        ledger = replace(ledger, libraries=replaced) if is_needed else None

    upstream = _encode_texts(tree.pristine)
    originals: dict[str, bytes] = {}
    patched: dict[str, bytes] = {}
    for path, (before, after) in texts.items():
        patched[path] = after.encode()
        upstream[path] = None
        if before is not None:
            upstream[path] = originals[path] = before.encode()

    # Files that an earlier plan patched and this one does not go back to upstream's text.
    targets: _Contents = {**upstream, **patched}
    if tree.kind == "installed":
        record = record_path(tree)
        shipped = upstream.get(record) or _unpatched_record(workspace, record)
        targets[record] = shipped
        if ledger:
            # RECORD is patched like any other file, so its original is kept for a revert.
            originals[record] = shipped
            rows = _rows_of(patched)
            for path, (_upstream, sha256) in replaced.items():
                library = libraries.get(path, tree.root / path)
                rows[path] = (sha256, library.stat().st_size)
            saved = [*originals, *replaced]
            text = _patched_record(workspace, shipped, rows, saved)
            targets[record] = text
            files = dict(ledger.files)
            files[record] = (digest(shipped), digest(text))
            ledger = replace(ledger, files=files)

    targets |= _state_files(workspace, ledger, originals)
    # The commit refuses a file that has changed or appeared since the plan read the tree.
    first_patched = texts.keys() - tree.pristine.keys()
    read_before = {path: upstream[path] for path in first_patched}
    changes += _changes_to(targets, tree.root, read_before)
    changes.sort(key=partial(_change_turn, workspace.home))
    journal_of(tree, workspace.state).commit(changes)
    return [change.path for change in changes]


def _changes_to(
    targets: _Contents,
    root: Path,
    read_before: _Contents,
) -> Iterator[Change]:
    """Yield a change for every file whose content differs from its target.

    ``read_before`` has the content of files that the plan has read; others are read now.
    """
    for path, data in targets.items():
        place = root / path
        if path in read_before:
            present = read_before[path]
        else:
            present = place.read_bytes() if place.is_file() else None
        if present != data:
            yield Change(path, digest(present), data)


def _swap_libraries(
    workspace: Workspace,
    libraries: Libraries,
) -> tuple[_Digests, list[Change]]:
    """Return sha256 (upstream's, new) of all replaced libraries, and the changes to get there.

    The changes name files, which are linked: no library is read into memory or copied on disk.
    """
    root = workspace.tree.root
    past = workspace.ledger.libraries if workspace.ledger else {}
    replaced = {}
    changes = []
    for path in sorted({*past, *libraries}):
        place = root / path
        new = libraries.get(path)
        now = workspace.libraries.get(path) or sha256_of(place_of(root, path))
        after = sha256_of(new) if new else now
        upstream, _patched = past.get(path, (now, ""))

        is_replaced = after != upstream
        if is_replaced:
            replaced[path] = (upstream, after)
        if is_replaced != (path in past):
            original = original_path(workspace.home, path)
            present = file_digest(root / original)
            source = place if is_replaced else None
            changes.append(Change(str(original), present, source))

        if new and after != now:
            if is_replaced:
                with translated(), new.open("rb") as stream:
                    give(stream.fileno(), place.stat(), place.parent)
            changes.append(Change(path, now, new))
    return replaced, changes


def _state_files(
    workspace: Workspace,
    ledger: Ledger | None,
    originals: Mapping[str, bytes],
) -> _Contents:
    """Return the content of each file of the state folder by path, None for a file to remove."""
    home = workspace.home
    text = ledger.to_json() if ledger else None
    files: _Contents = {str(ledger_path(home)): text}
    # `git status` must not show the folder, and `git add` must not add it.
    if workspace.tree.kind == "git":
        files[str(home / ".gitignore")] = b"*\n" if ledger else None

    past_files = workspace.ledger.files if workspace.ledger else {}
    for path in {*past_files, *originals}:
        original = str(original_path(home, path))
        files[original] = originals.get(path)
    return files


def _change_turn(home: Path, change: Change) -> tuple[int, str]:
    """Return the sort key of a change.

    Originals and ledger are written before any file of upstream is changed, and removed after: at
    every moment a changed file has its original and the ledger.
    """
    path = change.path
    if not Path(path).is_relative_to(home):
        return 2, path

    is_ledger = path == str(ledger_path(home))
    if change.after is None:
        return 3 if is_ledger else 4, path
    return 1 if is_ledger else 0, path


def _patched_record(
    workspace: Workspace,
    shipped: bytes,
    rows: _Rows,
    originals: Iterable[str],
) -> bytes:
    """Return RECORD with the rows of patched files and of patchkit's own files.

    pip removes the files that RECORD lists, and patchkit's files must go with the package.
    """
    home = workspace.home
    added = [str(ledger_path(home))]
    added += [str(original_path(home, path)) for path in originals]
    text = rewrite_record(shipped.decode(), rows, added)
    return text.encode()


def _unpatched_record(workspace: Workspace, record: str) -> bytes:
    """Return the RECORD that the package would have without patches.

    Called if no original RECORD is kept: nothing was patched yet, or a patched wheel was installed.
    """
    data = workspace.tree.read_bytes(record)
    text = decoded(data, str(workspace.tree.root / record))
    ledger = workspace.ledger
    if ledger is None:
        return data

    home = workspace.home
    upstream = {}
    created = [str(ledger_path(home))]
    created += [str(original_path(home, path)) for path in ledger.files]
    for path, shipped in _encode_texts(workspace.tree.pristine).items():
        if shipped is None:
            created.append(path)
        else:
            upstream[path] = shipped

    record_text = rewrite_record(text, _rows_of(upstream), dropped=created)
    return record_text.encode()


def _rows_of(files: Mapping[str, bytes]) -> _Rows:
    """Return sha256 and size (bytes) of files, for the rows of a RECORD."""
    return {path: (digest(data), len(data)) for path, data in files.items()}


def _encode_texts(texts: Mapping[str, str | None]) -> _Contents:
    return {
        path: None if text is None else text.encode() for path, text in texts.items()
    }
