"""Patch a tree: look, plan, prove, commit. The command line and every build call this."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from patchkit import __version__
from patchkit.durable.paths import is_file
from patchkit.errors import DriftError, UsageError
from patchkit.patching.commit import Applied, commit_plan, commit_texts
from patchkit.patching.fix import Request
from patchkit.patching.ledger import Ledger, LedgerRequest, today
from patchkit.patching.plan import Plan, make_plan
from patchkit.patching.recipe import Recipe
from patchkit.patching.workspace import (
    Workspace,
    known_verdicts,
    locked_workspace,
    read_workspace,
)
from patchkit.proof.prove import prove
from patchkit.source.detect import detect, record_path
from patchkit.source.tree import Sandboxed
from patchkit.target import Target, targets


def plan_for(workspace: Workspace, recipe: Recipe, request: Request) -> Plan:
    """Return the plan for a tree. Raises DriftError that names every fix that does not fit."""
    plan = make_plan(workspace.tree, recipe, request)
    if not plan.drifted:
        return plan
    drifted = {verdict.fix.id: verdict for verdict in plan.drifted}
    error = DriftError(
        f"{len(drifted)} of {len(plan.verdicts)} fixes do not fit; nothing was changed\n"
        + "\n".join(f"  {name}: {verdict.reason}" for name, verdict in drifted.items()),
        why="; ".join(
            f"{name} is about: {it.fix.symptom}" for name, it in drifted.items()
        ),
    )
    with suppress(UsageError):  # where another fix rests on it, or it was asked for
        rest = make_plan(
            workspace.tree, recipe, replace(request, skip=request.skip | {*drifted})
        )
        error.without = () if rest.drifted else tuple(drifted)
    raise error


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
    with ExitStack() as stack, ExitStack() as planning:
        if (
            gc.isenabled()
        ):  # what a plan makes lives to its end: a collection finds nothing
            gc.disable()
            planning.callback(gc.enable)
        find = partial(detect, path, recipe.project, sandboxed=sandboxed)
        # A dry run writes nothing: it takes no lock and recovers nothing.
        opened = (
            locked_workspace(find)
            if not dry_run
            else nullcontext(read_workspace(find()))
        )
        workspace = stack.enter_context(opened)
        past = workspace.ledger
        # A ledger of this very request saves planning and proving; its proofs are then shown.
        verdicts = None if anew else known_verdicts(workspace, recipe, request)
        if verdicts is not None and past is not None:
            planning.close()
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
        texts = (
            plan.texts
        )  # before the proofs, so that what is written meanwhile is noticed
        proofs = prove(plan)
        planning.close()  # new libraries may take an hour
        libraries = native(workspace)
        if dry_run:
            pending = (*texts, *libraries)
            return Applied(
                verdicts=plan.verdicts, proofs=proofs, written=(), pending=pending
            )
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


def commit_libraries(
    workspace: Workspace, libraries: Mapping[str, Path], target: Target
) -> tuple[str, ...]:
    """Replace libraries of an installed package, as ``commit_texts`` does; its texts stay.

    Return which of them were written. ``target`` is the device that they are for.
    """
    tree, ledger = workspace.tree, workspace.ledger
    request = LedgerRequest.of(Request(target=target))
    if ledger is None or not (ledger.verdicts or ledger.request == request):
        ledger = Ledger(
            patchkit=__version__,
            recipe="none",  # no text of the package was looked at
            project=tree.project,
            version=str(tree.version),
            request=request,
            files={},
            seen={},
            verdicts=(),
            proofs=(),
            date=today(),
        )
    texts = {
        path: (text, tree.read_bytes(path).decode())
        for path, text in tree.pristine.items()
        if path != record_path(tree) and is_file(tree.root / path)
    }
    written = commit_texts(workspace, texts, ledger, libraries)
    return tuple(path for path in written if path in libraries)


def revert_libraries(workspace: Workspace) -> tuple[str, ...]:
    """Put upstream's libraries back, byte by byte; return their paths. Texts stay patched."""
    if workspace.ledger is None or not workspace.ledger.libraries:
        return ()
    back = {
        path: workspace.upstream_library(path) for path in workspace.ledger.libraries
    }
    commit_libraries(workspace, back, targets()[workspace.ledger.request.target])
    return tuple(back)
