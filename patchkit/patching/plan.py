"""From a tree and a request to a plan: ordered verdicts and the resulting texts."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from patchkit.edit.splice import Edit, git_diff, splice
from patchkit.errors import AbsentError, DriftError, UsageError
from patchkit.patching.fix import Fix, Request, Severity, State, Verdict
from patchkit.patching.fix_file import stumbles_told
from patchkit.patching.recipe import Recipe
from patchkit.patching.user_patch import fixes_for
from patchkit.source.releases import foreign_file
from patchkit.source.tree import SourceTree

# path → (before, after); before is None for a file that is created.
Texts = dict[str, tuple[str | None, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Verdicts in order, the tree as it is (``stock``) and as it would be (``patched``)."""

    request: Request
    stock: SourceTree
    patched: SourceTree
    verdicts: tuple[Verdict, ...]

    @property
    def texts(self) -> Texts:
        """Every file that changes."""
        pairs = {
            path: (self.stock.find(path), text)
            for path, text in self.patched.overlay.items()
        }
        return {
            path: pair for path, pair in sorted(pairs.items()) if pair[0] != pair[1]
        }

    @property
    def drifted(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.state is State.DRIFTED]

    def diff(self) -> str:
        """Return one unified diff of the whole plan, in git's format."""
        return "".join(git_diff(path, *pair) for path, pair in self.texts.items())


def make_plan(tree: SourceTree, recipe: Recipe, request: Request) -> Plan:
    """Ask every fix, in order, each one seeing the edits of those before it.

    Raises SourceError for an unsupported version; UsageError for an impossible selection, or a fix
    that rests on another one that is left out.
    """
    recipe.check(tree.version)
    fixes = fixes_for(recipe.fixes, request)
    ids = [fix.id for fix in fixes]
    for unknown in sorted((request.only | request.skip | request.also) - set(ids)):
        close = difflib.get_close_matches(unknown, ids, n=1)
        hint = f"did you mean {close[0]}?" if close else "`patchkit fixes` lists them"
        raise UsageError(f"no fix is called {unknown!r}", hint=hint)
    if both := sorted((request.only | request.also) & request.skip):
        raise UsageError(f"{both[0]} is asked for and left out at once")
    patched, verdicts = tree, []
    for fix in fixes:
        with stumbles_told(fix):
            verdict = judge(fix, patched, recipe, request)
        verdicts.append(verdict)
        patched = with_edits(patched, verdict.edits)
    active = {
        v.fix.id: v.fix for v in verdicts if v.state in (State.APPLY, State.APPLIED)
    }
    off = {v.fix.id: v.fix for v in verdicts if v.state is State.OFF}
    for fix in active.values():
        for required in sorted(off.keys() & set(fix.requires)):
            # Where upstream has it already, leaving the other fix out costs nothing.
            if off[required].look(tree, request).state is State.APPLY:
                raise UsageError(
                    f"{fix.id} without {required} would build kernels that do not work",
                    why=off[required].why,
                    hint=f"add --with {required}, or leave {fix.id} out too",
                )
    return Plan(request=request, stock=tree, patched=patched, verdicts=tuple(verdicts))


def patch_steps(
    tree: SourceTree, verdicts: Sequence[Verdict]
) -> Iterator[tuple[Verdict, Texts]]:
    """Yield each verdict with edits, and the texts of a stock tree before and after it alone."""
    for verdict in verdicts:
        if verdict.edits:
            after = with_edits(tree, verdict.edits)
            paths = sorted({edit.path for edit in verdict.edits})
            yield verdict, {path: (tree.find(path), after.read(path)) for path in paths}
            tree = after


def judge(fix: Fix, tree: SourceTree, recipe: Recipe, request: Request) -> Verdict:
    """Return what one fix says of a tree: the version selects, the code decides, both must agree.

    A development version or pre-release may be older or newer than what a fix is about: code that
    is absent there is no drift. Code that is there in another form is. Of a patch that a user names
    no version says anything.
    """
    if not fix.needs:
        return _judge_patch(fix, tree, request)
    version, known = tree.version, recipe.knows(tree.version)
    kind = "installed" if tree.kind == "installed" else "source"
    need, needs = (
        fix.need(version, request.arch, kind),
        fix.needs_of(request.arch, kind),
    )
    if reason := _outside_reason(fix, tree, request):
        return Verdict(fix, State.NOT_APPLICABLE, reason)
    # Only before the first: of a later release the code has to say that upstream has it. A
    # pre-release of the first release that needs it counts as that release (Need.covers).
    specs = [spec for it in needs for spec in SpecifierSet(it.versions)]
    bounds = [Version(spec.version) for spec in specs if spec.operator in (">=", "==")]
    if need is None and bounds and Version(version.base_version) < min(bounds):
        return Verdict(fix, State.NOT_APPLICABLE, f"not needed in {version}")
    severity = (need or (needs or fix.needs)[-1]).severity
    if reason := _off_reason(fix, severity, request):
        # A release past the last that could use an optional fix should not seem to lack it.
        past = known and need is None and not (request.only or fix.id in request.skip)
        place = _upstream_place(fix, tree, request) if past else ""
        state = State.UPSTREAM if place else State.OFF
        return Verdict(fix, state, place or reason, severity=severity)
    try:
        finding = fix.look(tree, request)
    except DriftError as error:
        foreign = _foreign_file(fix, tree, request)
        if isinstance(error, AbsentError) and (
            foreign or (version.is_prerelease and not known)
        ):
            what = (
                f"{foreign} is not that of {version}"
                if foreign
                else f"{version} is no release"
            )
            note = f"{fix.id} is left out: {what}, and has no code for it"
            return Verdict(fix, State.NOT_APPLICABLE, error.what, note=note)
        return Verdict(fix, State.DRIFTED, str(error), severity=severity)
    conflict = State.UPSTREAM if need else State.APPLY
    note = "" if known else f"{version} is not in the table; decided by the code alone"
    if (
        known
        and finding.state is conflict
        and (foreign := _foreign_file(fix, tree, request))
    ):
        note = (
            f"{fix.id}: {foreign} is not that of {version}; decided by the code alone"
        )
    elif known and finding.state is conflict:
        fact = (
            "is known to need this"
            if need
            else f"is known to be right ({fix.upstream})"
        )
        reason = f"{version} {fact}, but the code says: {finding.reason}"
        return Verdict(fix, State.DRIFTED, reason, severity=severity)
    # In a release that needs no fix, code that looks fixed is upstream's own.
    done = (
        State.UPSTREAM
        if need is None and finding.state is State.APPLIED
        else finding.state
    )
    return Verdict(
        fix, done, finding.reason, finding.edits, severity, note, finding.done
    )


def _foreign_file(fix: Fix, tree: SourceTree, request: Request) -> str:
    """Return a file that a fix looks at and that a fork has otherwise; "" for none."""
    stock = replace(tree, overlay={}, seen={}, texts={}, answers={})
    with contextlib.suppress(DriftError):
        fix.look(stock, request)
    return foreign_file(tree, stock.seen)


def _judge_patch(fix: Fix, tree: SourceTree, request: Request) -> Verdict:
    if fix.id in request.skip:
        return Verdict(fix, State.OFF, "left out with --without")
    try:
        finding = fix.look(tree, request)
    except DriftError as error:
        return Verdict(fix, State.DRIFTED, str(error))
    state = State.UPSTREAM if finding.state is State.APPLIED else finding.state
    return Verdict(
        fix, state, finding.reason, finding.edits, None, finding.note, finding.done
    )


def _outside_reason(fix: Fix, tree: SourceTree, request: Request) -> str:
    if request.target.major not in fix.majors:
        return (
            f"{request.target.name} is not {' or '.join(f'SM{m}x' for m in fix.majors)}"
        )
    if request.arch not in fix.arches:
        return f"only an --arch {fix.arches[0]} build needs it"
    if fix.layer == "build" and tree.kind == "installed":
        return "an installed package is already compiled"
    return ""


def _off_reason(fix: Fix, severity: Severity, request: Request) -> str:
    asked = fix.id in request.only | request.also
    if fix.id in request.skip:
        return "left out with --without"
    if request.only and not asked:
        return "not named with --only"
    if severity is Severity.OPTIONAL and not asked:
        return f"optional; --with {fix.id} turns it on"
    return ""


def _upstream_place(fix: Fix, tree: SourceTree, request: Request) -> str:
    """Return where a release has what an optional fix would do; "" if it cannot be seen."""
    try:
        finding = fix.look(tree, request)
    except DriftError:
        return ""
    return "" if finding.edits else finding.reason


def with_edits(tree: SourceTree, edits: tuple[Edit, ...]) -> SourceTree:
    """Return the tree with edits spliced into its overlay."""
    texts = {}
    # groupby wants equal paths side by side; sorted keeps the order within a file.
    for path, group in groupby(
        sorted(edits, key=lambda edit: edit.path), lambda edit: edit.path
    ):
        of_file = list(group)
        creates = any(edit.creates for edit in of_file)
        if creates and (tree.exists(path) or len(of_file) > 1):
            raise DriftError(
                f"{path}: is there already ({of_file[0].note})",
                why="two fixes want to create it, or one does not look before it does",
                hint="leave one of them out with --without",
            )
        texts[path] = splice("" if creates else tree.read(path), of_file)
    return tree.with_texts(texts)
