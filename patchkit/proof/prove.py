"""The effect of a plan, checked before a byte is written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from patchkit.edit.python import check_syntax
from patchkit.errors import ProofError
from patchkit.patching.fix import Case, Fix, State
from patchkit.patching.fix_file import mistakes_shown
from patchkit.patching.plan import Plan
from patchkit.proof.parallel import side_by_side
from patchkit.proof.sandbox import missing

_PROVABLE = (State.APPLY, State.APPLIED)
_IN_EFFECT = (*_PROVABLE, State.UPSTREAM)


def prove(plan: Plan) -> tuple[str, ...]:
    """Check the effect of a plan, and that each fix recognises its own result.

    Raises ProofError; nothing has been written then. Returns what was established.
    """
    missing()  # asked once, not by each process that is forked below
    before = plan.before()
    calls: list[Callable[[], str]] = [partial(_check_recognised, plan)]
    active = frozenset(v.fix.id for v in plan.verdicts if v.state in _IN_EFFECT)
    for verdict in plan.verdicts:
        fix, upstream = verdict.fix, verdict.state is State.UPSTREAM
        if fix.prove and ((upstream and fix.prove_upstream) or verdict.state in _PROVABLE):
            stock = plan.stock if fix.prove_from_stock else before[fix.id]
            case = Case(stock=stock, patched=plan.patched, request=plan.request, active=active)
            calls.append(partial(_prove_fix, fix, case))
    said = []
    for sentence, seen in side_by_side([partial(_with_digests, call, plan) for call in calls]):
        plan.stock.seen.update(seen)
        said.append(sentence)
    # The first call, _check_recognised, raises or has nothing to say.
    return tuple(said[1:])


def _with_digests(call: Callable[[], str], plan: Plan) -> tuple[str, dict[str, str]]:
    """Return what a call says, and the digests of the files that this rests on."""
    return call(), plan.stock.seen


def _check_recognised(plan: Plan) -> str:
    for path, (_before, after) in plan.texts.items():
        if path.endswith(".py"):
            check_syntax(path, after)
    for verdict in plan.verdicts:
        if verdict.edits:
            again = verdict.fix.look(plan.patched, plan.request)
            if again.state is not State.APPLIED:
                raise ProofError(
                    f"{verdict.fix.id} does not recognise its own result: {again.reason}",
                    hint="please report this with the version",
                )
    return ""


def _prove_fix(fix: Fix, case: Case) -> str:
    assert fix.prove is not None
    with mistakes_shown(fix):
        return fix.prove(case)
