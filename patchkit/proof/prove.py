"""Check the effect of a plan before anything is written."""

from collections.abc import Iterator

from patchkit.edit.python import parsed
from patchkit.errors import ProofError
from patchkit.frozen import Texts
from patchkit.patching.fix import Case, Fix, State
from patchkit.patching.plan import Plan, with_edits
from patchkit.patching.recipe import explain_failure

_PROVABLE = (State.APPLY, State.APPLIED)
_IN_EFFECT = (*_PROVABLE, State.UPSTREAM)


def prove(plan: Plan) -> Texts:
    """Check the effect of a plan, and that each fix recognises its own result.

    Returns one sentence for each proof. Raises ProofError if a check fails. Writes nothing.
    """
    for path, (_before, after) in plan.texts.items():
        if path.endswith(".py"):
            parsed(path, after)
    for verdict in plan.verdicts:
        if not verdict.edits:
            continue

        observation = verdict.fix.look(plan.patched, plan.request)
        if observation.state is not State.APPLIED:
            raise ProofError(
                f"{verdict.fix.id} does not recognise its own result: {observation.reason}",
                hint="please report this with the version",
            )

    # Make all cases first, so that a wrong edit is found before any upstream code runs.
    cases = list(_cases_of(plan))
    proofs = []
    for fix, case in cases:
        if fix.prove:
            with explain_failure(fix):
                proofs.append(fix.prove(case))
    return tuple(proofs)


def _cases_of(plan: Plan) -> Iterator[tuple[Fix, Case]]:
    """Yield each fix whose effect can be proved, with the trees to compare.

    The patched tree is that of the whole plan. The tree before it has the edits of the fixes that
    come earlier in the plan; it is upstream's own if the fix says ``prove_from_stock``.
    """
    in_effect = [v.fix.id for v in plan.verdicts if v.state in _IN_EFFECT]
    active = frozenset(in_effect)

    tree = plan.stock
    for verdict in plan.verdicts:
        fix = verdict.fix
        is_upstream = verdict.state is State.UPSTREAM
        if verdict.state in _PROVABLE or (is_upstream and fix.prove_upstream):
            case = Case(
                stock=plan.stock if fix.prove_from_stock else tree,
                patched=plan.patched,
                request=plan.request,
                active=active,
            )
            yield fix, case

        tree = with_edits(tree, verdict.edits)
