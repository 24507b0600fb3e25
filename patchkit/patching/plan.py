"""From a tree and a request to a plan: ordered verdicts and the resulting texts."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from patchkit.edit.splice import Edit, git_diff, splice
from patchkit.errors import AbsentError, DriftError, UsageError
from patchkit.patching.fix import Fix, Need, Observation, Request, Severity, State, Verdict
from patchkit.patching.fix_file import mistakes_shown
from patchkit.patching.recipe import Recipe
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
        pairs = {path: (self.stock.find(path), text) for path, text in self.patched.overlay.items()}
        return {path: pair for path, pair in sorted(pairs.items()) if pair[0] != pair[1]}

    @property
    def drifted(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.state is State.DRIFTED]

    def diff(self) -> str:
        """Return one unified diff of the whole plan, in git's format."""
        return "".join(git_diff(path, *pair) for path, pair in self.texts.items())

    def before(self) -> dict[str, SourceTree]:
        """Return fix id → the tree as that fix found it."""
        trees, tree = {}, self.stock
        for verdict in self.verdicts:
            trees[verdict.fix.id] = tree
            tree = with_edits(tree, verdict.edits)
        return trees

    def steps(self) -> Iterator[tuple[Verdict, Texts]]:
        """Yield each verdict with edits, and the texts before and after it alone."""
        tree = self.stock
        for verdict in self.verdicts:
            if verdict.edits:
                after = with_edits(tree, verdict.edits)
                paths = sorted({edit.path for edit in verdict.edits})
                yield verdict, {path: (tree.find(path), after.read(path)) for path in paths}
                tree = after


def make_plan(tree: SourceTree, recipe: Recipe, request: Request) -> Plan:
    """Ask every fix, in order, each one seeing the edits of those before it.

    Raises SourceError for an unsupported version, UsageError for an impossible selection.
    """
    recipe.check(tree.version)
    check_selection(recipe, request)
    patched, verdicts = tree, []
    for fix in recipe.fixes:
        verdict = judge(fix, patched, recipe, request)
        verdicts.append(verdict)
        patched = with_edits(patched, verdict.edits)
    _check_requirements(recipe, request, verdicts, tree)
    return Plan(request=request, stock=tree, patched=patched, verdicts=tuple(verdicts))


def judge(fix: Fix, tree: SourceTree, recipe: Recipe, request: Request) -> Verdict:
    """Return what one fix says of a tree: the version selects, the code decides, both must agree.

    A development version or pre-release may be older or newer than what a fix is about: code that
    is absent there is no drift. Code that is there in another form is.
    """
    if reason := _outside_reason(fix, tree, request):
        return Verdict(fix, State.NOT_APPLICABLE, reason)
    known = recipe.knows(tree.version)
    kind = "installed" if tree.kind == "installed" else "source"
    need, needs = fix.need(tree.version, request.arch, kind), fix.needs_of(request.arch, kind)
    # Only before the first: of a later release the code has to say that upstream has it.
    if need is None and _before_first_need(needs, tree.version):
        return Verdict(fix, State.NOT_APPLICABLE, f"not needed in {tree.version}")
    severity = (need or (needs or fix.needs)[-1]).severity
    if reason := _switched_off(fix, severity, request):
        # A release past the last that could use an optional fix should not seem to lack it.
        past = known and need is None and not (request.only or fix.id in request.skip)
        place = _upstream_place(fix, tree, request) if past else ""
        state = State.UPSTREAM if place else State.OFF
        return Verdict(fix, state, place or reason, severity=severity)
    try:
        finding = _look_at(fix, tree, request)
    except DriftError as error:
        if isinstance(error, AbsentError) and tree.version.is_prerelease and not known:
            note = f"{fix.id} is left out: {tree.version} is no release, and has no code for it"
            return Verdict(fix, State.NOT_APPLICABLE, error.what, note=note)
        return Verdict(fix, State.DRIFTED, str(error), severity=severity)
    if known and (conflict := _disagreement_with(finding, need is not None, tree.version, fix)):
        return Verdict(fix, State.DRIFTED, conflict, severity=severity)
    note = "" if known else f"{tree.version} is not in the table; decided by the code alone"
    # In a release that needs no fix, code that looks fixed is upstream's own.
    done = State.UPSTREAM if need is None and finding.state is State.APPLIED else finding.state
    return Verdict(fix, done, finding.reason, finding.edits, severity, note, finding.done)


def _look_at(fix: Fix, tree: SourceTree, request: Request) -> Observation:
    with mistakes_shown(fix):
        return fix.look(tree, request)


def with_edits(tree: SourceTree, edits: tuple[Edit, ...]) -> SourceTree:
    """Return the tree with edits spliced into its overlay."""
    # groupby wants equal paths side by side; sorted keeps the order within a file.
    ordered = sorted(edits, key=lambda edit: edit.path)
    by_path = {path: list(of) for path, of in groupby(ordered, key=lambda edit: edit.path)}
    return tree.with_texts({path: splice(_base_text(tree, of), of) for path, of in by_path.items()})


def _base_text(tree: SourceTree, edits: Sequence[Edit]) -> str:
    path = edits[0].path
    if not any(edit.creates for edit in edits):
        return tree.read(path)
    if tree.exists(path) or len(edits) > 1:
        raise DriftError(
            f"{path}: is there already ({edits[0].note})",
            why="two fixes want to create it, or one does not look before it does",
            hint="leave one of them out with --without",
        )
    return ""


def check_selection(recipe: Recipe, request: Request) -> None:
    """Raise UsageError for an id that no fix has, or one that is asked for and left out."""
    known = [fix.id for fix in recipe.fixes]
    for fix_id in sorted((request.only | request.skip | request.also) - set(known)):
        raise UsageError(f"no fix is called {fix_id!r}", hint=close_to(recipe, fix_id))
    if both := sorted((request.only | request.also) & request.skip):
        raise UsageError(f"{both[0]} is asked for and left out at once")


def close_to(recipe: Recipe, fix_id: str) -> str:
    """Return a hint for an id that no fix has."""
    close = difflib.get_close_matches(fix_id, [fix.id for fix in recipe.fixes], n=1)
    return f"did you mean {close[0]}?" if close else "`patchkit fixes` lists them"


def _outside_reason(fix: Fix, tree: SourceTree, request: Request) -> str:
    if request.target.major not in fix.majors:
        return f"{request.target.name} is not {' or '.join(f'SM{m}x' for m in fix.majors)}"
    if request.arch not in fix.arches:
        return f"only an --arch {fix.arches[0]} build needs it"
    if fix.layer == "build" and tree.kind == "installed":
        return "an installed package is already compiled"
    return ""


def _before_first_need(needs: list[Need], version: Version) -> bool:
    bounds = [
        Version(spec.version)
        for need in needs
        for spec in SpecifierSet(need.versions)
        if spec.operator in (">=", "==")
    ]
    # A pre-release of the first release that needs it counts as that release (Need.covers).
    return bool(bounds) and Version(version.base_version) < min(bounds)


def _switched_off(fix: Fix, severity: Severity, request: Request) -> str:
    if fix.id in request.skip:
        return "left out with --without"
    if request.only and fix.id not in request.only | request.also:
        return "not named with --only"
    asked = fix.id in request.only | request.also
    if severity is Severity.OPTIONAL and not asked:
        return f"optional; --with {fix.id} turns it on"
    return ""


def _upstream_place(fix: Fix, tree: SourceTree, request: Request) -> str:
    """Return where a release has what an optional fix would do; "" if it cannot be seen."""
    try:
        finding = _look_at(fix, tree, request)
    except DriftError:
        return ""
    return "" if finding.edits else finding.reason


def _disagreement_with(finding: Observation, needed: bool, version: Version, fix: Fix) -> str:
    if needed and finding.state is State.UPSTREAM:
        return f"{version} is known to need this, but the code says: {finding.reason}"
    if not needed and finding.state is State.APPLY:
        return (
            f"{version} is known to be right ({fix.upstream}), but the code says: {finding.reason}"
        )
    return ""


def _check_requirements(
    recipe: Recipe, request: Request, verdicts: list[Verdict], tree: SourceTree
) -> None:
    """Raise UsageError if a fix rests on another one that is left out."""
    active = {v.fix.id for v in verdicts if v.state in (State.APPLY, State.APPLIED)}
    off = {v.fix.id for v in verdicts if v.state is State.OFF}
    for fix in recipe.fixes:
        for required in sorted(off.intersection(fix.requires) if fix.id in active else ()):
            other = recipe.fix(required)
            assert other is not None
            # Where upstream has it already, leaving the other fix out costs nothing.
            if _look_at(other, tree, request).state is State.APPLY:
                raise UsageError(
                    f"{fix.id} without {required} would build kernels that do not work",
                    why=other.why,
                    hint=f"add --with {required}, or leave {fix.id} out too",
                )
