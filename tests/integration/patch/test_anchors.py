"""Trees that somebody edited: every place that a plan touches, altered in turn, and half patched.

There are two good ends. Either the tree is refused and nothing is written, or the patched tree has
the whole effect that it has on the untouched release.
"""

import itertools
import re
import shutil
from difflib import SequenceMatcher

import pytest

from patchkit.apply import apply, plan_for
from patchkit.errors import DriftError, ProofError, SourceError, UsageError
from patchkit.patching.workspace import open_workspace
from patchkit.proof.prove import prove
from patchkit.recipes.vllm.archs import evaluate
from support.selection import WHOLE
from tools.regenerate import plan as proved

pytestmark = pytest.mark.releases
REFUSED = (DriftError, ProofError, SourceError, UsageError)
# The old routes, and lists that are edited one by one, are for the matrix.
of_release = pytest.mark.parametrize(
    "version", ["0.11.2", "0.18.1", "0.24.0"] if WHOLE else ["0.24.0"]
)

NEWLINE = "\n"
_LABEL = re.compile(r"\.gb10\.p[0-9a-f]{8}")


def _without_anchor(text, edit):
    """The text without the lines of an edit's anchor."""
    start, stop = _anchor(text, edit)
    return (
        text[: text.rfind("\n", 0, start) + 1] + text[text.index("\n", stop - 1) + 1 :]
    )


def _anchor(text, edit):
    """The span of an edit; of an insertion, the line or the quoted list that it goes into."""
    if edit.start < edit.stop:
        return edit.start, edit.stop
    if edit.path.endswith(".py"):
        return edit.start, text.index("\n", edit.start)
    return text.rindex('"', 0, edit.start), text.index('"', edit.start) + 1


@pytest.fixture
def checked(recipe, ask):
    """The proved plan of a tree; None if it is refused."""

    def run(root, arch="native", **selection):
        try:
            plan = plan_for(
                open_workspace(root, "vllm"), recipe, ask(arch, **selection)
            )
            prove(plan)
        except REFUSED:
            return None
        return plan

    return run


@of_release
def test_code_without_an_anchor_is_refused_or_patched_all_the_same(
    version, tree, rewrite, checked, recipe
):
    """A fix for Python is asked for alone, a fix for the build with its like."""
    root = tree(version)
    stock = checked(root, also={fix.id for fix in recipe.fixes})
    build = {"only": {fix.id for fix in recipe.fixes if fix.layer == "build"}}
    wanted, lost, refused = _kernels(stock), {}, 0
    for fix, edit in itertools.islice(_edits(stock), 0, None, 1 if WHOLE else 5):
        text = stock.stock.find(edit.path)
        if text is None:
            continue
        alone = {"only": {fix.id}, "also": set(fix.requires)}
        rewrite(root / edit.path, _without_anchor(text, edit))
        plan = checked(root, **(alone if fix.layer == "python" else build))
        refused += plan is None
        if plan and (
            loss := _lost(plan, edit, wanted if fix.layer == "build" else None)
        ):
            lost[f"{fix.id} {edit.path}:{text.count(NEWLINE, 0, edit.start) + 1}"] = (
                loss
            )
        rewrite(root / edit.path, text)
    assert not lost
    assert refused > 0


def _edits(plan):
    """Fixes and their edits, as offsets in the untouched texts."""
    for verdict in plan.verdicts:
        if verdict.edits:
            edits = verdict.fix.look(plan.stock, plan.request).edits
            assert len(edits) == len(verdict.edits)
            yield from ((verdict.fix, edit) for edit in edits)


def _lost(plan, edit, wanted):
    """What of the effect on the untouched release is missing; "" if nothing is."""
    if wanted and (
        gone := {variable for _, variable, *_ in set(wanted) - set(_kernels(plan))}
    ):
        return f"{', '.join(sorted(gone))}: fewer archs"
    if edit.path.endswith((".cmake", "CMakeLists.txt")):
        return ""
    replacement = _LABEL.sub("", edit.replacement)
    there = replacement in _LABEL.sub("", plan.patched.read(edit.path))
    return "" if there else "not edited"


def _kernels(plan):
    """Which list leads to which archs, when asked for 12.1a and when torch looks at the device."""
    target = plan.request.target
    return [
        (arch_list, group.variable, group.defines, group.archs)
        for arch_list in (plan.request.arch_list, "Auto")
        for group in evaluate(plan.patched, target, arch_list, target.cuda)
    ]


@of_release
def test_a_half_patched_tree_is_refused_or_made_whole(
    version, arch, tree, rewrite, checked, recipe, ask
):
    root = tree(version)
    stock = proved(root, arch)
    apply(root, recipe, ask(arch))
    shutil.rmtree(root / ".patchkit")
    halves = [
        (path, text)
        for path, (before, after) in stock.texts.items()
        for text in dict.fromkeys([before, *_one_hunk_less(before, after)])
    ]
    assert len(halves) > len(stock.texts)
    wrong = []
    for path, text in halves[:: 1 if WHOLE else 5]:
        rewrite(root / path, text)
        plan = checked(root, arch)
        if plan is not None and not _whole(plan, stock):
            wrong.append(plan.diff())
        rewrite(root / path, stock.texts[path][1])
    assert not wrong


def _one_hunk_less(before, after):
    """The patched text with one of its hunks taken back, for each hunk."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    for kind, i, j, k, m in SequenceMatcher(
        None, old, new, autojunk=False
    ).get_opcodes():
        if kind != "equal":
            yield "".join([*new[:k], *old[i:j], *new[m:]])


def _whole(plan, stock):
    # The label names what was changed in this run, so it may differ.
    return all(
        _LABEL.sub("", plan.patched.read(path)) == _LABEL.sub("", after)
        for path, (_before, after) in stock.texts.items()
    )
