"""Patch a tree: look, plan, prove, commit. The command line and every build call this."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path

from patchkit.durable.lock import locked
from patchkit.errors import DriftError
from patchkit.patching.commit import Applied, commit_plan, commit_texts
from patchkit.patching.fix import Request
from patchkit.patching.ledger import journal_of
from patchkit.patching.plan import Plan, make_plan
from patchkit.patching.recipe import Recipe
from patchkit.patching.workspace import Workspace, known_verdicts, open_workspace
from patchkit.proof.prove import prove
from patchkit.source.detect import detect, state_folder
from patchkit.source.tree import Sandboxed


def plan_for(workspace: Workspace, recipe: Recipe, request: Request) -> Plan:
    """Return the plan for a tree. Raises DriftError that names every fix that does not fit."""
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

    ``anew`` plans and proves even where a ledger says that it was done already: a wheel does not
    rest on what a tree says of itself.
    """
    with contextlib.ExitStack() as stack:
        if gc.isenabled():  # what a plan makes lives to its end: a collection finds nothing
            gc.disable()
            stack.callback(gc.enable)
        # A dry run writes nothing: it takes no lock and recovers nothing.
        if not dry_run:
            tree = detect(path, recipe.project)
            stack.enter_context(locked(tree.root))
            journal_of(tree, state_folder(tree)).recover()
        # Opened after recovery, which may bring files and ledger back.
        workspace = open_workspace(path, recipe.project, writing=not dry_run, sandboxed=sandboxed)
        past = workspace.ledger
        # A ledger of this very request saves planning and proving; its proofs are then shown.
        verdicts = None if anew else known_verdicts(workspace, recipe, request)
        if verdicts is not None and past is not None:
            return Applied(
                verdicts=verdicts,
                proofs=(),
                written=(),
                recorded_proofs=past.proofs,
                recorded_by=f"patchkit {past.patchkit}{f' on {past.date}' if past.date else ''}",
            )
        plan = plan_for(workspace, recipe, request)
        texts = plan.texts  # before the proofs, so that what is written meanwhile is noticed
        proofs = prove(plan)
        if dry_run:
            return Applied(verdicts=plan.verdicts, proofs=proofs, written=(), pending=(*texts,))
        return commit_plan(workspace, recipe, plan, texts, proofs)


def revert(path: Path, project: str = "vllm") -> tuple[str, ...]:
    """Put back what upstream shipped, byte by byte; return the paths that were restored.

    There are none if patchkit has changed nothing here. Raises DriftError if a patched file was
    edited.
    """
    tree = detect(path, project)
    with locked(tree.root):
        journal_of(tree, state_folder(tree)).recover()
        workspace = open_workspace(path, project, writing=True)
        if workspace.ledger is None:
            return ()
        commit_texts(workspace, {}, None)
        return tuple(workspace.ledger.files)
