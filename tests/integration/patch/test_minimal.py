"""Every changed line of a plan has an effect that a proof names: without it, something differs."""

from __future__ import annotations

import difflib
from itertools import product

import pytest

from patchkit.errors import PatchkitError
from patchkit.patching.fix import Case, State
from patchkit.recipes.vllm.archs import evaluate
from support.selection import MODES, RELEASES, WHOLE
from tools.seen import unproved

pytestmark = pytest.mark.releases
IN_EFFECT = (State.APPLY, State.APPLIED, State.UPSTREAM)
# A compiler says what these do: docs/kernel-proof.md.
COMPILED = {"sm120_guard", "marlin_w4a8_fp8", "block_fp8_swizzle", "int8_azp"}
# A real configure says what this does: tests/integration/patch/test_fa2.py.
CONFIGURED = "cmake/external_projects/vllm_flash_attn.cmake"
COMPILERS = ("13.0", "13.4")  # the later one has a list of all archs of its own from 0.27 on


@pytest.mark.parametrize(
    ("version", "arch"),
    [*product(RELEASES, MODES)] if WHOLE else [("0.19.1", "native"), (RELEASES[-1], "family")],
)
def test_no_changed_line_is_without_effect(version, arch, release):
    plan = unproved(release(version), arch)
    changed = {path: pair for path, pair in plan.texts.items() if pair[0] is not None}
    built = _built(plan, plan.patched)

    idle = [
        (path, line)
        for path, (before, after) in changed.items()
        for line, text in _without_one(before, after)
        if not _shows(plan, path, plan.patched.with_texts({path: text}), built)
    ]

    assert changed
    assert not idle


def _without_one(before, after):
    """Every change of a text taken back alone: the line that it has in ``after``, and the text."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    steps = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    for back in steps:
        if back[0] != "equal":
            parts = (
                old[i:j] if step is back or step[0] == "equal" else new[k:m]
                for step in steps
                for _, i, j, k, m in [step]
            )
            yield back[3] + 1, "".join(line for part in parts for line in part)


def _shows(plan, path, tree, built):
    """Whether a proof tells the tree from the patched one."""
    if path == CONFIGURED:
        return True
    if path.endswith((".cmake", "CMakeLists.txt")):
        return _built(plan, tree) != built
    fixes = [v.fix for v in plan.verdicts if any(edit.path == path for edit in v.edits)]
    if not path.endswith(".py"):
        return {fix.id for fix in fixes} <= COMPILED
    return any(_refuses(plan, fix, tree) for fix in fixes)


def _built(plan, tree):
    """What each group is built for: as asked, as torch detects the device, by a later compiler."""
    target, asked = plan.request.target, plan.request.arch_list
    ways = [(asked, COMPILERS[0]), ("Auto", COMPILERS[0]), (asked, COMPILERS[1])]
    try:
        groups = [evaluate(tree, target, *way) for way in ways]
    except PatchkitError as error:
        return str(error)
    return [[(g.place[0], g.variable, g.name, g.archs) for g in of] for of in groups]


def _refuses(plan, fix, tree):
    active = frozenset(v.fix.id for v in plan.verdicts if v.state in IN_EFFECT)
    stock = plan.stock if fix.prove_from_stock else plan.before()[fix.id]
    try:
        fix.prove(Case(stock=stock, patched=tree, request=plan.request, active=active))
    except PatchkitError:
        return True
    return False
