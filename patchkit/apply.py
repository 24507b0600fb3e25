"""Patch a tree: look, plan, prove, commit. The command line and every build call this."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from patchkit.errors import DriftError
from patchkit.patching.commit import Applied, commit_libraries, commit_plan, commit_texts
from patchkit.patching.fix import Request
from patchkit.patching.plan import Plan, make_plan
from patchkit.patching.recipe import Recipe
from patchkit.patching.workspace import (
    Workspace,
    known_verdicts,
    locked_workspace,
    open_workspace,
)
from patchkit.proof.prove import prove
from patchkit.source.detect import detect
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
    native: Callable[[Workspace], Mapping[str, Path]] = lambda _workspace: {},
) -> Applied:
    """Bring the tree at ``path`` to what ``request`` asks for, whatever was applied before.

    ``anew`` plans and proves even where a ledger says that it was done already: a wheel does not
    rest on what a tree says of itself. ``native`` makes the new libraries of an installed package,
    by path, after everything else was proved; in a dry run it only names them.
    """
    with contextlib.ExitStack() as stack:
        if gc.isenabled():  # what a plan makes lives to its end: a collection finds nothing
            gc.disable()
            stack.callback(gc.enable)
        find = partial(detect, path, recipe.project, sandboxed=sandboxed)
        # A dry run writes nothing: it takes no lock and recovers nothing.
        if dry_run:
            workspace = open_workspace(path, recipe.project, sandboxed=sandboxed)
        else:
            workspace = stack.enter_context(locked_workspace(find))
        past = workspace.ledger
        # A ledger of this very request saves planning and proving; its proofs are then shown.
        verdicts = None if anew else known_verdicts(workspace, recipe, request)
        if verdicts is not None and past is not None:
            libraries = native(workspace)
            written: tuple[str, ...] = ()
            if libraries and not dry_run:
                written = commit_libraries(workspace, libraries, request.target)
            return Applied(
                verdicts=verdicts,
                proofs=(),
                written=written,
                pending=(*libraries,) if dry_run else (),
                recorded_proofs=past.proofs,
                recorded_by=f"patchkit {past.patchkit}{f' on {past.date}' if past.date else ''}",
            )
        plan = plan_for(workspace, recipe, request)
        texts = plan.texts  # before the proofs, so that what is written meanwhile is noticed
        proofs = prove(plan)
        libraries = native(workspace)
        if dry_run:
            pending = (*texts, *libraries)
            return Applied(verdicts=plan.verdicts, proofs=proofs, written=(), pending=pending)
        return commit_plan(workspace, recipe, plan, texts, proofs, libraries)


def revert(path: Path, project: str = "vllm") -> tuple[str, ...]:
    """Put back what upstream shipped, byte by byte; return the paths that were restored.

    There are none if patchkit has changed nothing here. Raises DriftError if a patched file was
    edited.
    """
    with locked_workspace(partial(detect, path, project)) as workspace:
        if workspace.ledger is None:
            return ()
        commit_texts(workspace, {}, None)
        return (*workspace.ledger.files, *workspace.ledger.libraries)
