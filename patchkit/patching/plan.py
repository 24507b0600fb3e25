"""Make a plan for a tree and a request: verdicts in order, and the resulting texts."""

import contextlib
import difflib
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from packaging.version import Version

from patchkit.edit.splice import Edit, Edits, git_diff, splice
from patchkit.errors import AbsentError, DriftError, MissingError, UsageError
from patchkit.frozen import frozen
from patchkit.patching.fix import Fix, Request, Severity, State, Verdict
from patchkit.patching.recipe import Recipe, explain_failure
from patchkit.patching.user_patch import fixes_for
from patchkit.source.releases import foreign_file
from patchkit.source.tree import SourceTree

# path → (before, after); before is None for a file that is created.
TextPairs = dict[str, tuple[str | None, str]]

_CODE_ALONE = "decided by the code alone"
_LEFT_OUT = "left out with --without"


@frozen
class Plan:
    """Verdicts in order, the tree without edits (``stock``) and with all edits (``patched``).

    ``texts`` are the texts, before and after, of the files that change.
    """

    request: Request
    stock: SourceTree
    patched: SourceTree
    verdicts: tuple[Verdict, ...]
    texts: TextPairs

    @property
    def drifted(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.state is State.DRIFTED]

    def diff(self) -> str:
        """Return one unified diff of the whole plan, in git's format."""
        return "".join(git_diff(path, *pair) for path, pair in self.texts.items())


def make_plan(tree: SourceTree, recipe: Recipe, request: Request) -> Plan:
    """Judge every fix in order and return the plan. Each fix sees the edits of earlier fixes.

    Raises SourceError for an unsupported version; UsageError for an impossible selection, or if
    an active fix requires one that is left out. Drift is not raised: see ``Plan.drifted``.
    """
    recipe.check(tree.version)
    fixes = fixes_for(recipe.fixes, request)
    _check_selection([fix.id for fix in fixes], request)

    patched = tree
    verdicts: list[Verdict] = []
    for fix in fixes:
        with explain_failure(fix):
            verdict = judge(fix, patched, recipe, request)
        verdicts.append(verdict)
        patched = with_edits(patched, verdict.edits)

    _check_required(verdicts, tree, request)
    return Plan(
        request=request,
        stock=tree,
        patched=patched,
        verdicts=tuple(verdicts),
        texts=_changed_texts(tree, patched),
    )


def _changed_texts(stock: SourceTree, patched: SourceTree) -> TextPairs:
    """Return the texts of every file that changes, sorted by path."""
    texts: TextPairs = {}
    for path, after in sorted(patched.overlay.items()):
        before = stock.find(path)
        if before != after:
            texts[path] = (before, after)
    return texts


def _check_selection(ids: list[str], request: Request) -> None:
    """Raise UsageError if the request names an unknown fix, or both selects and skips a fix."""
    chosen = request.only | request.also
    named = chosen | request.skip
    for unknown in sorted(named.difference(ids)):
        close = difflib.get_close_matches(unknown, ids, n=1)
        hint = f"did you mean {close[0]}?" if close else "`patchkit fixes` lists them"
        raise UsageError(f"no fix is called {unknown!r}", hint=hint)
    for fix_id in sorted(chosen & request.skip):
        raise UsageError(f"{fix_id} is asked for and left out at once")


def _check_required(
    verdicts: Sequence[Verdict], tree: SourceTree, request: Request
) -> None:
    """Raise UsageError if an active fix requires a fix that is off and would have edits to make."""
    fixes_off = {v.fix.id: v.fix for v in verdicts if v.state is State.OFF}

    for verdict in verdicts:
        if verdict.state not in (State.APPLY, State.APPLIED):
            continue

        fix = verdict.fix
        for required_id in sorted(fixes_off.keys() & fix.requires):
            required = fixes_off[required_id]

            # If upstream has the required change already, its fix may be off.
            if required.look(tree, request).state is State.APPLY:
                raise UsageError(
                    f"{fix.id} without {required_id} would build kernels that do not work",
                    why=required.why,
                    hint=f"add --with {required_id}, or leave {fix.id} out too",
                )


@frozen
class _Expectation:
    """What the version table says about a fix in a release, before the code is read.

    ``known``: the table has the release. ``needed``: the release needs the fix. ``unneeded``: why
    the code need not be asked, "" if it has to be: the release is older than every release that
    needs the fix, or another device or arch mode does. ``early``: a tree between two releases, of
    which the later one is the first that needs the fix; the code may not be there yet.
    """

    known: bool
    needed: bool
    unneeded: str
    early: bool
    severity: Severity


def judge(
    fix: Fix,
    tree: SourceTree,
    recipe: Recipe,
    request: Request,
) -> Verdict:
    """Return the verdict about one fix in a tree.

    The version table selects the fix, the code decides, and for a known release both must agree;
    otherwise the verdict is DRIFTED. In an unknown pre-release, and in a fork, code that is absent
    is no drift, but code in another form is, except between two releases of which only the later
    needs the fix: there the code alone decides. So it does for a user's patch, which has no table.
    """
    if not fix.needs:
        return _judge_patch(fix, tree, request)
    if reason := _outside_reason(fix, tree, request):
        return Verdict(fix, State.NOT_APPLICABLE, reason)

    version = tree.version
    expected = _expect(fix, tree, recipe, request)
    severity = expected.severity
    if expected.unneeded:
        return Verdict(fix, State.NOT_APPLICABLE, expected.unneeded)
    if reason := _off_reason(fix, severity, request):
        return _judge_off(fix, tree, request, expected, reason)

    not_there = MissingError if expected.early else AbsentError
    try:
        finding = fix.look(tree, request)
    except not_there as error:
        return _judge_absent(fix, tree, request, expected, error)
    except DriftError as error:
        return Verdict(fix, State.DRIFTED, str(error), severity=severity)

    note = ""
    if not expected.known:
        note = f"{version} is not in the table; {_CODE_ALONE}"
    state = _agreed_state(expected.known, expected.needed, finding.state)
    if state is State.DRIFTED:
        foreign = _foreign_file(fix, tree, request)
        if not foreign:
            right = f"is known to be right ({fix.upstream})"
            fact = "is known to need this" if expected.needed else right
            reason = f"{version} {fact}, but the code says: {finding.reason}"
            return Verdict(fix, state, reason, severity=severity)

        # The fork has changed this file, so the table for the release does not apply to it.
        state = _agreed_state(False, expected.needed, finding.state)
        note = f"{fix.id}: {foreign} is not that of {version}; {_CODE_ALONE}"

    return Verdict(
        fix,
        state,
        finding.reason,
        edits=finding.edits,
        severity=severity,
        note=note,
        done=finding.done,
    )


def _agreed_state(known: bool, needed: bool, code: State) -> State:
    """Return the state that follows from the version table and from the code (``code``)."""
    match known, needed, code:
        case True, True, State.UPSTREAM:
            return State.DRIFTED
        case True, False, State.APPLY:
            return State.DRIFTED
        case _, False, State.APPLIED:
            # In a release that does not need the fix, code that looks fixed is upstream's own.
            return State.UPSTREAM
        case _:
            return code


def _expect(
    fix: Fix,
    tree: SourceTree,
    recipe: Recipe,
    request: Request,
) -> _Expectation:
    """Return what the version table says about a fix."""
    kind = "installed" if tree.kind == "installed" else "source"
    release = recipe.following(tree.version)
    need = fix.need(tree.version, request.arch, kind)
    need = need or fix.need(release, request.arch, kind)
    needs = fix.needs_of(request.arch, kind)

    # A release newer than the last is not excluded: its code has to show upstream's solution.
    begins = chain.from_iterable(candidate.begins for candidate in needs)
    first = min(begins, default=Version("0"))

    latest = need or (needs or fix.needs)[-1]
    unneeded = ""
    if need is None and release < first:
        unneeded = f"not needed in {tree.version}"
    elif not needs or (need and need.target not in ("", request.target.name)):
        unneeded = f"needed for {latest.limits} alone"

    return _Expectation(
        known=recipe.knows(tree.version),
        needed=need is not None,
        unneeded=unneeded,
        early=tree.version < first <= release,
        severity=latest.severity,
    )


def _judge_off(
    fix: Fix,
    tree: SourceTree,
    request: Request,
    expected: _Expectation,
    reason: str,
) -> Verdict:
    """Return OFF with ``reason``, or UPSTREAM if the code of a known release has the change.

    Otherwise an optional fix would look missing in a release that no longer needs it.
    """
    is_past = expected.known and not expected.needed
    is_chosen = request.only or fix.id in request.skip
    if is_past and not is_chosen:
        with contextlib.suppress(DriftError):
            finding = fix.look(tree, request)
            if not finding.edits and finding.reason:
                return Verdict(
                    fix,
                    State.UPSTREAM,
                    finding.reason,
                    severity=expected.severity,
                )

    return Verdict(fix, State.OFF, reason, severity=expected.severity)


def _judge_absent(
    fix: Fix,
    tree: SourceTree,
    request: Request,
    expected: _Expectation,
    error: MissingError,
) -> Verdict:
    """Return the verdict on absent code: DRIFTED, or NOT_APPLICABLE in a fork or a pre-release."""
    if foreign := _foreign_file(fix, tree, request):
        excuse = f"{foreign} is not that of {tree.version}"
    elif tree.version.is_prerelease and not expected.known:
        excuse = f"{tree.version} is no release"
    else:
        return Verdict(fix, State.DRIFTED, str(error), severity=expected.severity)

    note = f"{fix.id} is left out: {excuse}, and has no code for it"
    return Verdict(fix, State.NOT_APPLICABLE, error.what, note=note)


def _foreign_file(fix: Fix, tree: SourceTree, request: Request) -> str:
    """Return the path of a file that the fix reads and that a fork has changed, "" if none."""
    stock = replace(
        tree,
        overlay={},
        seen={},
        texts={},
        answers={},
    )
    with contextlib.suppress(DriftError):
        fix.look(stock, request)
    return foreign_file(tree, stock.seen)


def _judge_patch(fix: Fix, tree: SourceTree, request: Request) -> Verdict:
    """Return the verdict on a user's patch. The code alone decides."""
    if fix.id in request.skip:
        return Verdict(fix, State.OFF, _LEFT_OUT)
    try:
        finding = fix.look(tree, request)
    except DriftError as error:
        return Verdict(fix, State.DRIFTED, str(error))

    state = _agreed_state(False, False, finding.state)
    return Verdict(
        fix,
        state,
        finding.reason,
        edits=finding.edits,
        note=finding.note,
        done=finding.done,
    )


def _outside_reason(fix: Fix, tree: SourceTree, request: Request) -> str:
    """Return why a fix does not apply to this device or kind of tree; "" if it does."""
    if request.target.major not in fix.majors:
        majors = " or ".join(f"SM{major}x" for major in fix.majors)
        return f"{request.target.name} is not {majors}"
    if fix.layer == "build" and tree.kind == "installed":
        return "an installed package is already compiled"
    return ""


def _off_reason(fix: Fix, severity: Severity, request: Request) -> str:
    """Return why the request leaves a fix out; "" if it does not."""
    if fix.id in request.skip:
        return _LEFT_OUT
    if fix.id in request.only | request.also:
        return ""
    if request.only:
        return "not named with --only"
    if severity is Severity.OPTIONAL:
        return f"optional; --with {fix.id} turns it on"
    return ""


def with_edits(tree: SourceTree, edits: tuple[Edit, ...]) -> SourceTree:
    """Return the tree with edits made in its overlay.

    Raises DriftError if an edit creates a file that exists or that another edit changes.
    """
    edits_by_path: dict[str, Edits] = {}
    for edit in edits:
        edits_by_path.setdefault(edit.path, []).append(edit)

    texts = {}
    for path, file_edits in edits_by_path.items():
        creates = any(edit.creates for edit in file_edits)
        is_contested = tree.exists(path) or len(file_edits) > 1
        if creates and is_contested:
            raise DriftError(
                f"{path}: is there already ({file_edits[0].note})",
                why="two fixes want to create it, or one does not look before it does",
                hint="leave one of them out with --without",
            )

        text = "" if creates else tree.read(path)
        texts[path] = splice(text, file_edits)
    return tree.with_texts(texts)
