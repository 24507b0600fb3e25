"""A tree on disk with what patchkit already did to it, as its ledger says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from patchkit import __version__
from patchkit.errors import DriftError
from patchkit.patching.fix import Request, Verdict
from patchkit.patching.ledger import (
    Ledger,
    LedgerRequest,
    digest_now,
    journal_of,
    original_path,
    originals,
    read_ledger,
    unusable,
)
from patchkit.patching.recipe import Recipe
from patchkit.reading import decoded
from patchkit.source.detect import detect, state_folder
from patchkit.source.tree import Sandboxed, SourceTree


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """A tree on disk, with what patchkit already did to it."""

    tree: SourceTree
    state: Path
    ledger: Ledger | None


def open_workspace(
    path: Path,
    project: str = "vllm",
    *,
    writing: bool = False,
    sandboxed: Sandboxed = Sandboxed.ALWAYS,
) -> Workspace:
    """Return the tree of a project at ``path``, with upstream's texts of changed files.

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
    pairs = ledger.files.items()
    if edited := [path for path, pair in pairs if digest_now(tree, path) not in pair]:
        moved = ledger.version != str(tree.version)
        raise DriftError(
            f"{', '.join(edited)}: edited since patchkit wrote "
            f"{'it' if len(edited) == 1 else 'them'}; nothing was changed",
            why=f"the tree was {ledger.version} when it was patched, and is {tree.version} now"
            if moved
            else "the ledger knows another text, and your edits must not be lost",
            hint=f"if nothing of the patch is left, remove {state}; else check out "
            f"{ledger.version} and revert first"
            if moved
            else "take your edits out, then run again; the texts that patchkit replaced are in "
            f"{state / 'originals'}",
        )
    pristine = {
        path: None if data is None else decoded(data, str(original_path(state, path)))
        for path, data in originals(state, ledger).items()
    }
    return Workspace(tree=replace(tree, pristine=pristine), state=state, ledger=ledger)


def known_verdicts(
    workspace: Workspace, recipe: Recipe, request: Request
) -> tuple[Verdict, ...] | None:
    """Return the ledger's verdicts if nothing that they rest on has changed; nothing is parsed.

    Raises DriftError unless they are about the recipe's fixes.
    """
    ledger, tree = workspace.ledger, workspace.tree
    if ledger is None:
        return None
    # Another engine or another fact may decide otherwise about the same files.
    wrote = (ledger.patchkit, ledger.recipe, ledger.version, ledger.request)
    if wrote != (__version__, recipe.digest, str(tree.version), LedgerRequest.of(request)):
        return None
    expected = {path: after for path, (_before, after) in ledger.files.items()} | {**ledger.seen}
    if any(digest_now(tree, path) != known for path, known in expected.items()):
        return None
    fixes = {fix.id: fix for fix in recipe.fixes}
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
