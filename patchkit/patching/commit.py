"""The files of a plan, its ledger and the originals, written or put back as one change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from patchkit import __version__
from patchkit.digests import digest, sha256_of
from patchkit.durable.atomic import give
from patchkit.durable.journal import Change
from patchkit.durable.paths import file_digest, place_of
from patchkit.errors import translated
from patchkit.patching.fix import State, Verdict
from patchkit.patching.ledger import (
    Ledger,
    LedgerRequest,
    LedgerVerdict,
    journal_of,
    ledger_path,
    original_path,
    today,
)
from patchkit.patching.plan import Plan, Texts
from patchkit.patching.recipe import Recipe
from patchkit.patching.workspace import Workspace
from patchkit.reading import decoded
from patchkit.source.detect import record_path
from patchkit.source.installed_record import rewrite_record

NO_LIBRARIES: Mapping[str, Path] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """Result of an apply: the verdicts as they now stand, what it proved, and the files written.

    ``pending`` is what a dry run would write. Where a ledger says that nothing is to do, this
    run proves nothing: ``recorded_proofs`` are the ledger's words, ``recorded_by`` says whose.
    """

    verdicts: tuple[Verdict, ...]
    proofs: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()
    recorded_proofs: tuple[str, ...] = ()
    recorded_by: str = ""


def commit_plan(
    workspace: Workspace,
    recipe: Recipe,
    plan: Plan,
    texts: Texts,
    proofs: tuple[str, ...],
    libraries: Mapping[str, Path] = NO_LIBRARIES,
) -> Applied:
    """Write the texts of a plan, with the ledger and the originals: all files or none."""
    tree, verdicts = workspace.tree, tuple(map(mark_applied, plan.verdicts))
    files = {
        path: (digest(before), digest(after)) for path, (before, after) in texts.items()
    }
    ledger = Ledger(
        patchkit=__version__,
        recipe=recipe.digest,
        project=tree.project,
        version=str(tree.version),
        request=LedgerRequest.of(plan.request),
        files=files,
        seen={
            path: known
            for path, known in sorted(tree.seen.items())
            if path not in files
        },
        verdicts=tuple(
            LedgerVerdict(it.fix.id, it.state, it.severity or "", it.reason, it.note)
            for it in verdicts
        ),
        proofs=proofs,
        date=today(),
    )
    written = commit_texts(workspace, texts, ledger, libraries)
    ours = {
        *texts,
        *libraries,
        *tree.pristine,
    }  # the last: what goes back to upstream's text
    named = tuple(
        path for path in written if path in ours and not path.endswith("/RECORD")
    )
    return Applied(verdicts=verdicts, proofs=proofs, written=named)


def mark_applied(verdict: Verdict) -> Verdict:
    """Return a verdict as it is after the commit: what was to be applied is applied."""
    applied = replace(verdict, state=State.APPLIED, reason=verdict.done)
    return applied if verdict.state is State.APPLY else verdict


def commit_texts(
    workspace: Workspace,
    texts: Texts,
    ledger: Ledger | None,
    libraries: Mapping[str, Path] = NO_LIBRARIES,
) -> list[str]:
    """Write texts, ledger and originals, and remove what is not needed any more; return the paths.

    Without a ledger everything becomes as upstream shipped it; also where it would name no file.

    ``libraries``: path → its new file, which becomes the tree's: it gets a second name there, and
    the owner and mode of the old one. Those that an earlier run replaced stay, unless they are
    named; upstream's own file puts one back.
    """
    tree, state, past = workspace.tree, workspace.state, workspace.ledger
    before = _encode_texts(
        {**tree.pristine, **{path: pair[0] for path, pair in texts.items()}}
    )
    after = {path: pair[1].encode() for path, pair in texts.items()}
    # Files of an earlier plan that this one leaves alone go back to upstream's text.
    wanted: dict[str, bytes | None] = {**before, **after}
    home = state.relative_to(tree.root)
    kept = {path: before[path] for path in texts if before[path] is not None}
    if past and ledger is None:
        libraries = {path: workspace.upstream_library(path) for path in past.libraries}
    replaced, changes = _swap_libraries(workspace, libraries)
    ledger = (
        replace(ledger, libraries=replaced) if ledger and (texts or replaced) else None
    )
    if tree.kind == "installed":
        record = record_path(tree)
        listed = before.get(record) or _unpatched_record(workspace, record)
        # Without a ledger nothing is patched any more: upstream's own lines come back.
        wanted[record] = listed
        if ledger is not None:
            # RECORD is patched like any other file, so a revert needs upstream's.
            kept[record] = listed
            # pip uninstalls what RECORD lists: patchkit's own files have to go with the package.
            own = [str(original_path(home, path)) for path in (*kept, *replaced)]
            rows = {path: (digest(data), len(data)) for path, data in after.items()}
            for path, (_, now) in replaced.items():
                rows[path] = (now, libraries.get(path, tree.root / path).stat().st_size)
            text = rewrite_record(listed.decode(), rows, [str(ledger_path(home)), *own])
            wanted[record] = text.encode()
            pair = (digest(listed), digest(text))
            ledger = replace(ledger, files={**ledger.files, record: pair})
    wanted[str(ledger_path(home))] = ledger.to_json() if ledger else None
    # `git status` must not show patchkit's own folder, nor `git add` take it along.
    if tree.kind == "git":
        wanted[str(home / ".gitignore")] = b"*\n" if ledger else None
    # Originals that an earlier plan kept, and this one does not need, are removed.
    for path in {*(past.files if past else ()), *kept}:
        wanted[str(original_path(home, path))] = kept.get(path)
    places = {path: tree.root / path for path in wanted}
    found = {
        path: at.read_bytes() if at.is_file() else None for path, at in places.items()
    }
    # The commit refuses what is no longer as the plan read it, and what has appeared since.
    found |= {path: before[path] for path in texts if path not in tree.pristine}
    differing = (path for path in wanted if found[path] != wanted[path])
    changes += [Change(path, digest(found[path]), wanted[path]) for path in differing]
    changes.sort(key=lambda change: (_change_turn(home, change), change.path))
    journal_of(tree, state).commit(changes)
    return [change.path for change in changes]


def _swap_libraries(
    workspace: Workspace, libraries: Mapping[str, Path]
) -> tuple[dict[str, tuple[str, str]], list[Change]]:
    """Return sha256 (upstream's, ours) of what is not upstream's any more, and how it comes there.

    Content moves by second names: no library is in memory, nor twice on the disk.
    """
    root, home = workspace.tree.root, workspace.state.relative_to(workspace.tree.root)
    known = workspace.ledger.libraries if workspace.ledger else {}
    replaced, changes = {}, []
    for path in sorted({*known, *libraries}):
        place, kept, source = (
            root / path,
            original_path(home, path),
            libraries.get(path),
        )
        now = workspace.libraries.get(path) or sha256_of(place_of(root, path))
        before = known[path][0] if path in known else now
        after = sha256_of(source) if source else now
        if after != before:
            replaced[path] = (before, after)
        if (path in known) != (path in replaced):
            original = place if path in replaced else None
            changes.append(Change(str(kept), file_digest(root / kept), original))
        if source and after != now:
            if path in replaced:
                with translated(), source.open("rb") as stream:
                    give(stream.fileno(), place.stat(), place.parent)
            changes.append(Change(path, now, source))
    return replaced, changes


def _change_turn(home: Path, change: Change) -> int:
    """Return when to change a file: none of upstream's ever lacks its original and its ledger."""
    if not Path(change.path).is_relative_to(home):
        return 2
    early, late = (1, 3) if change.path == str(ledger_path(home)) else (0, 4)
    return late if change.after is None else early


def _unpatched_record(workspace: Workspace, record: str) -> bytes:
    """Return RECORD of a package that was patched before it was installed, or not at all."""
    data, ledger = workspace.tree.read_bytes(record), workspace.ledger
    text = decoded(data, str(workspace.tree.root / record))
    if ledger is None:
        return data
    home = workspace.state.relative_to(workspace.tree.root)
    own = [ledger_path(home), *(original_path(home, path) for path in ledger.files)]
    shipped = _encode_texts(workspace.tree.pristine)
    back = {path: data for path, data in shipped.items() if data is not None}
    created = [*map(str, own), *(shipped.keys() - back.keys())]
    rows = {path: (digest(data), len(data)) for path, data in back.items()}
    return rewrite_record(text, rows, dropped=created).encode()


def _encode_texts(texts: Mapping[str, str | None]) -> dict[str, bytes | None]:
    return {
        path: None if text is None else text.encode() for path, text in texts.items()
    }
