"""The files of a plan, its ledger and the originals, written or put back as one change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from patchkit import __version__
from patchkit.digests import digest
from patchkit.durable.journal import Change
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
from patchkit.source.detect import dist_info
from patchkit.source.installed_record import rewrite_record


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """Result of an apply: the verdicts as they now stand, what it proved, and the files written.

    ``pending`` is what a dry run would write. Where a ledger says that nothing is to do, this
    run proves nothing: ``recorded_proofs`` are the ledger's words, ``recorded_by`` says whose.
    """

    verdicts: tuple[Verdict, ...]
    proofs: tuple[str, ...]
    written: tuple[str, ...]
    pending: tuple[str, ...] = ()
    recorded_proofs: tuple[str, ...] = ()
    recorded_by: str = ""


def commit_plan(
    workspace: Workspace, recipe: Recipe, plan: Plan, texts: Texts, proofs: tuple[str, ...]
) -> Applied:
    """Write the texts of a plan, with the ledger and the originals: all files or none."""
    tree, verdicts = workspace.tree, tuple(map(settled, plan.verdicts))
    files = {path: (digest(before), digest(after)) for path, (before, after) in texts.items()}
    ledger = Ledger(
        patchkit=__version__,
        recipe=recipe.digest,
        project=tree.project,
        version=str(tree.version),
        request=LedgerRequest.of(plan.request),
        files=files,
        seen={path: known for path, known in sorted(tree.seen.items()) if path not in files},
        verdicts=tuple(
            LedgerVerdict(
                id=verdict.fix.id,
                state=verdict.state,
                severity=verdict.severity or "",
                reason=verdict.reason,
                note=verdict.note,
            )
            for verdict in verdicts
        ),
        proofs=proofs,
        date=today(),
    )
    written = commit_texts(workspace, texts, ledger if texts else None)
    return Applied(
        verdicts=verdicts, proofs=proofs, written=tuple(path for path in written if path in texts)
    )


def settled(verdict: Verdict) -> Verdict:
    """Return a verdict as it is after the commit: what was to be applied is applied."""
    if verdict.state is not State.APPLY:
        return verdict
    return replace(verdict, state=State.APPLIED, reason=verdict.done)


def commit_texts(workspace: Workspace, texts: Texts, ledger: Ledger | None) -> list[str]:
    """Write texts, ledger and originals, and remove what is not needed any more; return the paths.

    Without a ledger, and texts, everything is as upstream shipped it.
    """
    tree, state = workspace.tree, workspace.state
    before = _encode_texts(tree.pristine) | _encode_texts(
        {path: pair[0] for path, pair in texts.items()}
    )
    after = {path: pair[1].encode() for path, pair in texts.items()}
    # Files of an earlier plan that this one leaves alone go back to upstream's text.
    wanted: dict[str, bytes | None] = {**before, **after}
    home = state.relative_to(tree.root)
    kept = {path: before[path] for path in texts if before[path] is not None}
    if tree.kind == "installed":
        record = str((dist_info(tree) / "RECORD").relative_to(tree.root))
        listed = before.get(record) or _unpatched_record(workspace, record)
        if ledger is not None:
            # RECORD is patched like any other file, so a revert needs upstream's.
            kept[record] = listed
        # pip uninstalls what RECORD lists: patchkit's own files have to go with the package.
        added = [str(home / "ledger.json"), *(str(home / "originals" / path) for path in kept)]
        # Without a ledger nothing is patched any more: upstream's own lines come back.
        text = rewrite_record(listed.decode(), after, added) if ledger else None
        wanted[record] = text.encode() if text is not None else listed
        if ledger is not None and text is not None:
            pair = (digest(listed), digest(text))
            ledger = replace(ledger, files={**ledger.files, record: pair})
    place = ledger_path(state).relative_to(tree.root)
    wanted[str(place)] = ledger.to_json() if ledger else None
    # `git status` must not show patchkit's own folder, nor `git add` take it along.
    if tree.kind == "git":
        wanted[str(home / ".gitignore")] = b"*\n" if ledger else None
    # Originals that an earlier plan kept, and this one does not need, are removed.
    stale = workspace.ledger.files if workspace.ledger else {}
    for path in {*stale, *kept}:
        wanted[str(original_path(state, path).relative_to(tree.root))] = kept.get(path)
    places = {path: tree.root / path for path in wanted}
    found = {path: at.read_bytes() if at.is_file() else None for path, at in places.items()}
    # The commit refuses what is no longer as the plan read it, and what has appeared since.
    found |= {path: before[path] for path in texts if path not in tree.pristine}
    ordered = sorted(wanted.items(), key=lambda item: (_change_turn(home, *item), item[0]))
    changes = [
        Change(path, digest(found[path]), data) for path, data in ordered if found[path] != data
    ]
    journal_of(tree, state).commit(changes)
    return [change.path for change in changes]


def _change_turn(home: Path, path: str, data: bytes | None) -> int:
    """Return when to change a file: none of upstream's ever lacks its original and its ledger."""
    if not Path(path).is_relative_to(home):
        return 2
    early, late = (1, 3) if path == str(home / "ledger.json") else (0, 4)
    return late if data is None else early


def _unpatched_record(workspace: Workspace, record: str) -> bytes:
    """Return RECORD of a package that was patched before it was installed, or not at all."""
    data, ledger = workspace.tree.read_bytes(record), workspace.ledger
    text = decoded(data, str(workspace.tree.root / record))
    if ledger is None:
        return data
    state, root = workspace.state, workspace.tree.root
    own = [ledger_path(state), *(original_path(state, path) for path in ledger.files)]
    shipped = _encode_texts(workspace.tree.pristine)
    back = {path: data for path, data in shipped.items() if data is not None}
    created = [str(place.relative_to(root)) for place in own] + [*(shipped.keys() - back.keys())]
    return rewrite_record(text, back, dropped=created).encode()


def _encode_texts(texts: Mapping[str, str | None]) -> dict[str, bytes | None]:
    return {path: None if text is None else text.encode() for path, text in texts.items()}
