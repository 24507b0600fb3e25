"""Patch a tree in four steps: detect its project and version, plan, prove and commit the edits.

The command line and every build use this module.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from patchkit import __version__
from patchkit.durable.paths import is_file
from patchkit.errors import DriftError, UsageError
from patchkit.frozen import Texts, frozen
from patchkit.patching.commit import (
    NO_LIBRARIES,
    Applied,
    Libraries,
    commit_plan,
    commit_texts,
)
from patchkit.patching.fix import Request
from patchkit.patching.plan import Plan, TextPairs, make_plan
from patchkit.patching.recipe import Recipe
from patchkit.patching.workspace import (
    Ledger,
    LedgerRequest,
    Workspace,
    known_verdicts,
    locked_workspace,
    read_workspace,
    today,
)
from patchkit.proof.prove import prove
from patchkit.source.detect import detect, record_path
from patchkit.source.tree import Sandboxed
from patchkit.target import Target, targets


@frozen
class Draft:
    """A proved patch of the tree in ``workspace``; ``finish`` writes it, except in a ``dry_run``.

    ``outcome`` has the verdicts and the proofs. ``plan`` has the new texts; it is None if the
    ledger in the tree says that this request was carried out already.
    """

    workspace: Workspace
    recipe: Recipe
    request: Request
    dry_run: bool
    outcome: Applied
    plan: Plan | None


def apply(
    path: Path,
    recipe: Recipe,
    request: Request,
    *,
    dry_run: bool = False,
    anew: bool = False,
    sandboxed: Sandboxed = Sandboxed.ALWAYS,
) -> Applied:
    """Apply the fixes of ``request`` to the tree at ``path``; they replace fixes applied before.

    If the ledger in the tree says that the request was carried out already, nothing is planned,
    unless ``anew``: builds use that, since a wheel must not depend on the ledger. A dry run writes
    nothing. Raises before anything is written: UsageError or SourceError for a wrong path or
    request, DriftError if a fix does not fit, ProofError if a proof fails, BusyError if another
    patchkit has locked the tree. Raises StorageError if writing fails.
    """
    with drafted(
        path, recipe, request, dry_run=dry_run, anew=anew, sandboxed=sandboxed
    ) as draft:
        return finish(draft)


@contextmanager
def drafted(
    path: Path,
    recipe: Recipe,
    request: Request,
    *,
    dry_run: bool,
    anew: bool = False,
    sandboxed: Sandboxed,
) -> Iterator[Draft]:
    """Plan and prove a request for the tree at ``path``, and write nothing.

    The tree is locked during the block, and an interrupted commit in it is taken back first. A dry
    run does neither, and reads the tree as it is. If the ledger in the tree is about the same
    request, its verdicts and proofs are taken instead, unless ``anew``. Raises DriftError if a fix
    does not fit, ProofError if a proof fails.
    """
    find = partial(detect, path, recipe.project, sandboxed=sandboxed)
    opened = nullcontext(read_workspace(find())) if dry_run else locked_workspace(find)
    with opened as workspace:
        plan = None
        ledger = workspace.ledger
        verdicts = None if anew else known_verdicts(workspace, recipe, request)
        if ledger is not None and verdicts is not None:
            day = f" on {ledger.date}" if ledger.date else ""
            outcome = Applied(
                verdicts=verdicts,
                recorded_proofs=ledger.proofs,
                recorded_by=f"patchkit {ledger.patchkit}{day}",
            )
        else:
            plan = plan_for(workspace, recipe, request)
            outcome = Applied(verdicts=plan.verdicts, proofs=prove(plan))

        yield Draft(
            workspace=workspace,
            recipe=recipe,
            request=request,
            dry_run=dry_run,
            outcome=outcome,
            plan=plan,
        )


def finish(draft: Draft, libraries: Libraries = NO_LIBRARIES) -> Applied:
    """Write the texts of a draft, and new libraries of an installed package.

    ``libraries`` maps a path in the tree to the file with the new contents. A dry run writes
    nothing, and returns the paths that would be written as ``pending``. Raises StorageError if
    writing fails.
    """
    workspace = draft.workspace
    plan = draft.plan
    if draft.dry_run:
        texts = plan.texts if plan else ()
        return replace(draft.outcome, pending=(*texts, *libraries))

    if plan is not None:
        proofs = draft.outcome.proofs
        return commit_plan(workspace, draft.recipe, plan, proofs, libraries)
    if not libraries:
        return draft.outcome

    written = commit_libraries(workspace, libraries, draft.request.target)
    return replace(draft.outcome, written=written)


def plan_for(workspace: Workspace, recipe: Recipe, request: Request) -> Plan:
    """Return the plan for a tree.

    Raises DriftError, which names every fix that does not fit. If the plan works without these
    fixes, they are in ``without`` of the error.
    """
    plan = make_plan(workspace.tree, recipe, request)
    if not plan.drifted:
        return plan

    ids = tuple(verdict.fix.id for verdict in plan.drifted)
    error = _drift_error(plan)
    # Offer to leave the drifted fixes out only if that works. It is a UsageError if another fix
    # needs one of them, or --only names one.
    with suppress(UsageError):
        reduced = replace(request, skip=request.skip.union(ids))
        if not make_plan(workspace.tree, recipe, reduced).drifted:
            error.without = ids
    raise error


def _drift_error(plan: Plan) -> DriftError:
    count = f"{len(plan.drifted)} of {len(plan.verdicts)}"
    lines = [f"{count} fixes do not fit; nothing was changed"]
    symptoms = []
    for verdict in plan.drifted:
        lines.append(f"  {verdict.fix.id}: {verdict.reason}")
        symptoms.append(f"{verdict.fix.id} is about: {verdict.fix.symptom}")
    return DriftError("\n".join(lines), why="; ".join(symptoms))


def revert(path: Path, project: str) -> Texts:
    """Restore upstream's files and libraries, byte by byte; return their paths.

    Return nothing if patchkit changed nothing in the tree. Raises DriftError if a patched file was
    edited since.
    """
    with locked_workspace(partial(detect, path, project)) as workspace:
        if workspace.ledger is None:
            return ()

        commit_texts(workspace, {}, None)
        return (*workspace.ledger.files, *workspace.ledger.libraries)


def commit_libraries(
    workspace: Workspace, libraries: Libraries, target: Target
) -> Texts:
    """Replace libraries of an installed package; its patched texts stay as they are.

    ``libraries`` maps a path in the tree to the file with the new contents, made for the device
    ``target``. Return the paths of the libraries that were written.
    """
    tree = workspace.tree
    texts: TextPairs = {}
    for path, upstream_text in tree.pristine.items():
        if path != record_path(tree) and is_file(tree.root / path):
            texts[path] = (upstream_text, tree.read_bytes(path).decode())

    ledger = _library_ledger(workspace, target)
    written = commit_texts(workspace, texts, ledger, libraries)
    return tuple(path for path in written if path in libraries)


def _library_ledger(workspace: Workspace, target: Target) -> Ledger:
    """Return the ledger to write for replaced libraries.

    That is the present ledger if it records fixes or the same request, else a new one.
    """
    tree = workspace.tree
    request = LedgerRequest.of(Request(target=target))
    ledger = workspace.ledger
    if ledger is not None and (ledger.verdicts or ledger.request == request):
        return ledger

    return Ledger(
        patchkit=__version__,
        recipe="none",  # libraries alone were replaced: no fix was tried
        project=tree.project,
        version=str(tree.version),
        request=request,
        files={},
        seen={},
        verdicts=(),
        proofs=(),
        date=today(),
    )


def revert_libraries(workspace: Workspace) -> Texts:
    """Restore upstream's libraries, byte by byte, and return their paths; texts stay patched.

    Raises HashMismatchError if the kept original of a library is damaged.
    """
    ledger = workspace.ledger
    if ledger is None or not ledger.libraries:
        return ()

    originals = {path: workspace.upstream_library(path) for path in ledger.libraries}
    commit_libraries(workspace, originals, targets()[ledger.request.target])
    return tuple(originals)
