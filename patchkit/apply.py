"""The whole way: look, plan, prove, commit. What the command line and every build call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from patchkit import __version__
from patchkit.digests import digest
from patchkit.durable.journal import Change
from patchkit.durable.lock import locked
from patchkit.errors import DriftError
from patchkit.patching.fix import Request, State, Verdict
from patchkit.patching.ledger import (
    Ledger,
    LedgerRequest,
    LedgerVerdict,
    edited_files,
    journal_of,
    ledger_path,
    original_path,
    originals,
    read_ledger,
    today,
    untouched,
    unusable,
)
from patchkit.patching.plan import Plan, Texts, check_selection, make_plan
from patchkit.patching.recipe import Recipe
from patchkit.patching.rescue import Rescued, rescue
from patchkit.prove import prove
from patchkit.reading import decoded
from patchkit.source.detect import detect, dist_info, state_folder
from patchkit.source.installed import restored_record, rewrite_record
from patchkit.source.tree import Sandboxed, SourceTree


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """A tree on disk, with what patchkit already did to it."""

    tree: SourceTree
    state: Path
    ledger: Ledger | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What an apply did: the verdicts as they now stand, what it proved, and the files written.

    ``diff`` is what a dry run would have changed. Where a ledger tells that nothing is to do, this
    run proves nothing: ``recorded_proofs`` are the ledger's words, ``recorded_by`` says whose.
    """

    verdicts: tuple[Verdict, ...]
    proofs: tuple[str, ...]
    written: tuple[str, ...]
    diff: str = ""
    recorded_proofs: tuple[str, ...] = ()
    recorded_by: str = ""


def open_workspace(
    path: Path,
    project: str = "vllm",
    *,
    writing: bool = False,
    sandboxed: Sandboxed = Sandboxed.ALWAYS,
) -> Workspace:
    """The tree of a project at ``path``; upstream's texts of changed files from the ledger.

    Raises SourceError if it is no such tree, DriftError if a patched file was edited since,
    StorageError if an earlier run was cut short and this one must not write.
    """
    tree = detect(path, project, sandboxed=sandboxed)
    state = state_folder(tree)
    if not writing:
        journal_of(tree, state).check_finished()
    ledger = read_ledger(state, project)
    if ledger is None:
        return Workspace(tree=tree, state=state, ledger=None)
    _check_unedited(tree, ledger)
    shipped = originals(state, ledger)
    pristine = {
        path: None if data is None else decoded(data, str(original_path(state, path)))
        for path, data in shipped.items()
    }
    return Workspace(tree=replace(tree, pristine=pristine), state=state, ledger=ledger)


def known_verdicts(
    workspace: Workspace, recipe: Recipe, request: Request
) -> tuple[Verdict, ...] | None:
    """The ledger's verdicts, if nothing that they rest on has changed; no parsing is needed."""
    ledger = workspace.ledger
    current = (
        ledger is not None
        and (ledger.patchkit, ledger.recipe) == (__version__, recipe.digest)
        and ledger.version == str(workspace.tree.version)
        and ledger.request == LedgerRequest.of(request)
        and untouched(workspace.tree, ledger)
    )
    return _recorded(workspace.state, ledger, recipe) if ledger is not None and current else None


def plan_for(workspace: Workspace, recipe: Recipe, request: Request) -> Plan:
    """The plan for a tree. Raises DriftError with every place that does not fit."""
    plan = make_plan(workspace.tree, recipe, request)
    if plan.drifted:
        raise DriftError(
            f"{len(plan.drifted)} of {len(plan.verdicts)} fixes do not fit; nothing was changed\n"
            + "\n".join(f"  {verdict.fix.id}: {verdict.reason}" for verdict in plan.drifted)
        )
    return plan


def apply(
    path: Path,
    recipe: Recipe,
    request: Request,
    *,
    dry_run: bool = False,
    anew: bool = False,
    sandboxed: Sandboxed = Sandboxed.ALWAYS,
) -> Applied:
    """Bring the tree at ``path`` to what ``request`` asks for, whatever was applied before.

    ``anew`` plans and proves even where a ledger says that it was done already: what becomes a
    wheel rests on nobody's word.
    """
    if dry_run:
        workspace = open_workspace(path, recipe.project, sandboxed=sandboxed)
        return _apply(workspace, recipe, request, dry_run=True, anew=anew)
    tree = detect(path, recipe.project)
    with locked(tree.root):
        journal_of(tree, state_folder(tree)).recover()
        workspace = open_workspace(path, recipe.project, writing=True, sandboxed=sandboxed)
        return _apply(workspace, recipe, request, dry_run=False, anew=anew)


def revert(path: Path, project: str = "vllm") -> tuple[str, ...]:
    """Put back what upstream shipped, byte by byte; the paths that were restored.

    There are none if patchkit has changed nothing here. Raises DriftError if a patched file was
    edited.
    """
    tree = detect(path, project)
    with locked(tree.root):
        journal_of(tree, state_folder(tree)).recover()
        workspace = open_workspace(path, project, writing=True)
        if workspace.ledger is None:
            return ()
        changes = _changes(workspace, {}, None)
        journal_of(tree, workspace.state).commit(changes)
        return tuple(workspace.ledger.files)


def revert_by_force(path: Path, project: str = "vllm") -> Rescued:
    """Put back every original though ledger, journal or patched files are damaged or edited.

    Raises SourceError if patchkit changed nothing here.
    """
    tree = detect(path, project)
    with locked(tree.root):
        return rescue(tree, state_folder(tree))


def _apply(
    workspace: Workspace, recipe: Recipe, request: Request, *, dry_run: bool, anew: bool
) -> Applied:
    check_selection(recipe, request)
    past = workspace.ledger
    verdicts = None if anew else known_verdicts(workspace, recipe, request)
    if verdicts is not None and past is not None:
        return Applied(
            verdicts=verdicts,
            proofs=(),
            written=(),
            recorded_proofs=past.proofs,
            recorded_by=past.author,
        )
    plan = plan_for(workspace, recipe, request)
    texts = plan.texts  # before the proofs, which take their time: nobody may write meanwhile
    proofs = prove(plan)
    if dry_run:
        return Applied(verdicts=plan.verdicts, proofs=proofs, written=(), diff=plan.diff())
    return commit_plan(workspace, recipe, plan, texts, proofs)


def commit_plan(
    workspace: Workspace, recipe: Recipe, plan: Plan, texts: Texts, proofs: tuple[str, ...]
) -> Applied:
    """Write the texts of a plan, with the ledger and the originals: all files or none."""
    ledger = _ledger(workspace.tree, recipe, plan, texts, proofs) if texts else None
    changes = _changes(workspace, texts, ledger)
    journal_of(workspace.tree, workspace.state).commit(changes)
    return Applied(
        verdicts=tuple(map(settled, plan.verdicts)),
        proofs=proofs,
        written=tuple(change.path for change in changes if change.path in texts),
    )


def settled(verdict: Verdict) -> Verdict:
    """A verdict after the commit: what was to be applied is applied."""
    if verdict.state is not State.APPLY:
        return verdict
    return replace(verdict, state=State.APPLIED, reason=verdict.done)


def _ledger(
    tree: SourceTree, recipe: Recipe, plan: Plan, texts: Texts, proofs: tuple[str, ...]
) -> Ledger:
    files = {path: (digest(b), digest(a)) for path, (b, a) in texts.items()}
    return Ledger(
        patchkit=__version__,
        recipe=recipe.digest,
        project=tree.project,
        version=str(tree.version),
        request=LedgerRequest.of(plan.request),
        files=files,
        seen={path: known for path, known in sorted(tree.seen.items()) if path not in files},
        verdicts=tuple(map(_kept, plan.verdicts)),
        proofs=proofs,
        date=today(),
    )


def _changes(workspace: Workspace, texts: Texts, ledger: Ledger | None) -> list[Change]:
    """Everything that has to be written or removed, the ledger and the originals included."""
    tree, state = workspace.tree, workspace.state
    before = _encoded(tree.pristine) | _encoded({path: pair[0] for path, pair in texts.items()})
    after = {path: pair[1].encode() for path, pair in texts.items()}
    wanted: dict[str, bytes | None] = {**before, **after}
    home = state.relative_to(tree.root)
    kept = {path: before[path] for path in texts if before[path] is not None}
    if tree.kind == "installed":
        record = str((dist_info(tree) / "RECORD").relative_to(tree.root))
        listed = before.get(record) or _unpatched_record(workspace, record)
        if ledger is not None:
            kept[record] = listed
        added = [str(home / "ledger.json"), *(str(home / "originals" / path) for path in kept)]
        text = rewrite_record(listed.decode(), after, added) if ledger else None
        wanted[record] = text.encode() if text is not None else listed
        if ledger is not None and text is not None:
            pair = (digest(listed), digest(text))
            ledger = replace(ledger, files={**ledger.files, record: pair})
    place = ledger_path(state).relative_to(tree.root)
    wanted[str(place)] = ledger.to_json() if ledger else None
    if tree.kind == "git":
        wanted[str(home / ".gitignore")] = b"*\n" if ledger else None
    stale = workspace.ledger.files if workspace.ledger else {}
    for path in {*stale, *kept}:
        wanted[str(original_path(state, path).relative_to(tree.root))] = kept.get(path)
    found = {path: _on_disk(tree.root / path) for path in wanted}
    # The commit refuses what is no longer as the plan read it, and what has appeared since.
    found |= {path: before[path] for path in texts if path not in tree.pristine}
    ordered = sorted(wanted.items(), key=lambda each: (_turn(home, *each), each[0]))
    return [
        Change(path, digest(found[path]), data) for path, data in ordered if found[path] != data
    ]


def _turn(home: Path, path: str, data: bytes | None) -> int:
    """When a file is changed: no file of upstream's ever lacks its original and its ledger."""
    if not Path(path).is_relative_to(home):
        return 2
    early, late = (1, 3) if path == str(home / "ledger.json") else (0, 4)
    return late if data is None else early


def _unpatched_record(workspace: Workspace, record: str) -> bytes:
    """RECORD of a package that was patched before it was installed, or not at all."""
    data, ledger = workspace.tree.read_bytes(record), workspace.ledger
    text = decoded(data, str(workspace.tree.root / record))
    if ledger is None:
        return data
    state, root = workspace.state, workspace.tree.root
    own = [ledger_path(state), *(original_path(state, path) for path in ledger.files)]
    shipped = _encoded(workspace.tree.pristine)
    gone = [str(place.relative_to(root)) for place in own]
    return restored_record(text, shipped, gone).encode()


def _encoded(texts: Mapping[str, str | None]) -> dict[str, bytes | None]:
    return {path: None if text is None else text.encode() for path, text in texts.items()}


def _on_disk(place: Path) -> bytes | None:
    return place.read_bytes() if place.is_file() else None


def _check_unedited(tree: SourceTree, ledger: Ledger) -> None:
    edited = edited_files(tree, ledger)
    if not edited:
        return
    moved = ledger.version != str(tree.version)
    raise DriftError(
        f"{', '.join(edited)}: edited since patchkit wrote "
        f"{'it' if len(edited) == 1 else 'them'}; nothing was changed",
        why=f"the tree was {ledger.version} when it was patched, and is {tree.version} now"
        if moved
        else "the ledger knows another text, and your edits must not be lost",
        hint=f"if nothing of the patch is left, remove {state_folder(tree)}; else check out "
        f"{ledger.version} and revert first"
        if moved
        else "take your edits out, then run again; the texts that patchkit replaced are in "
        f"{state_folder(tree) / 'originals'}",
    )


def _kept(verdict: Verdict) -> LedgerVerdict:
    verdict = settled(verdict)
    return LedgerVerdict(
        id=verdict.fix.id,
        state=verdict.state,
        severity=verdict.severity or "",
        reason=verdict.reason,
        note=verdict.note,
    )


def _recorded(state: Path, ledger: Ledger, recipe: Recipe) -> tuple[Verdict, ...]:
    """The ledger's verdicts. Raises DriftError unless they are about the recipe's fixes."""
    fixes = {fix.id: fix for fix in recipe.fixes}
    if {entry.id for entry in ledger.verdicts} != set(fixes):
        what = "its verdicts are not about the fixes of the recipe that it names"
        raise unusable(state, recipe.project, what)
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
