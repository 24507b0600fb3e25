"""The effect of a plan, checked before a byte is written."""

from __future__ import annotations

from patchkit.edit.python import parsed
from patchkit.errors import ProofError
from patchkit.patching.fix import Case, State
from patchkit.patching.fix_file import explain_failure
from patchkit.patching.plan import Plan, with_edits

_PROVABLE = (State.APPLY, State.APPLIED)
_IN_EFFECT = (*_PROVABLE, State.UPSTREAM)


def prove(plan: Plan) -> tuple[str, ...]:
    """Check the effect of a plan, and that each fix recognises its own result.

    Raises ProofError; nothing has been written then. Returns what was established.
    """
    for path, (_before, after) in plan.texts.items():
        if path.endswith(".py"):
            parsed(path, after)
    for verdict in plan.verdicts:
        again = verdict.fix.look(plan.patched, plan.request) if verdict.edits else None
        if again and again.state is not State.APPLIED:
            raise ProofError(
                f"{verdict.fix.id} does not recognise its own result: {again.reason}",
                hint="please report this with the version",
            )
    active = frozenset(v.fix.id for v in plan.verdicts if v.state in _IN_EFFECT)
    cases, found = [], plan.stock
    for verdict in plan.verdicts:
        fix, upstream = verdict.fix, verdict.state is State.UPSTREAM
        if (upstream and fix.prove_upstream) or verdict.state in _PROVABLE:
            stock = plan.stock if fix.prove_from_stock else found
            case = Case(
                stock=stock, patched=plan.patched, request=plan.request, active=active
            )
            cases.append((fix, case))
        found = with_edits(found, verdict.edits)
    proofs = []
    for fix, case in cases:
        with explain_failure(fix):
            proofs += [fix.prove(case)] if fix.prove else []
    return tuple(proofs)
