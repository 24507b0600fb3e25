"""Patch a tree, show the changes and take them back: `patchkit apply`, `diff`, `revert`."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from patchkit.apply import Draft, drafted, finish, plan_for, revert
from patchkit.cli.options import (
    Selection,
    folder_options,
    located,
    opened,
    optional_source_options,
    proof_lines,
    request_options,
    source_options,
    tree_blocks,
    verdict_fields,
    verdict_lines,
    verdict_notes,
    vllm_options,
)
from patchkit.cli.out import (
    LaidOut,
    bold,
    dim,
    next_verb,
    program,
    progress,
    record_fields,
    style,
    table,
    tell,
)
from patchkit.cli.render import (
    GOOD,
    LOAD_STYLES,
    Blocks,
    Data,
    ExitCode,
    Lines,
    Record,
    Row,
    count_loads,
    counted_noun,
    note,
    options_of,
    rendered,
)
from patchkit.errors import DriftError, UsageError
from patchkit.frozen import Fields
from patchkit.patching.commit import Applied, mark_applied
from patchkit.patching.fix import Fix, Request, State, Verdict
from patchkit.patching.forced_revert import revert_by_force
from patchkit.patching.plan import make_plan
from patchkit.patching.recipe import (
    Recipe,
    load_recipe,
    load_recipes,
    load_support,
)
from patchkit.patching.workspace import (
    Workspace,
    known_verdicts,
    open_workspace,
    read_ledger,
)
from patchkit.quoting import quoted
from patchkit.recipes.vllm.archs import Group, evaluate
from patchkit.source.detect import detect, project_of, state_folder
from patchkit.source.project import projects
from patchkit.source.resolve import (
    SourceOptions,
    fetch_release,
    lock_release,
    patched_tree,
)
from patchkit.target import DEFAULT_TARGET, Load, best_load

# The fields of a fix that the list of fixes prints with --json.
_FIX_FACTS = ("id", "title", "layer", "upstream", "needs")


@click.command
@source_options
@request_options
@options_of("apply")
@rendered
def apply_command(
    source: SourceOptions,
    selection: Selection,
    dry_run: bool,
    native: bool,
    verbose: bool,
) -> Blocks:
    """Patch a tree for a device, prove the effect, and keep a way back.

    \b
      patchkit apply vllm==0.33.0
      patchkit apply .venv/lib/python3.12/site-packages/vllm

    The tree ends up with exactly the fixes that you ask for, whatever was applied before; asking
    again changes nothing. Either everything is written or nothing.

    For an installed package that is patched already, such as a repacked wheel, the defaults are its
    earlier target and fixes.
    """
    recipe = load_recipe(source.project)
    selection.request()  # a mistyped option is reported before anything is fetched
    keep = not dry_run
    with located(source, keep=keep, patches=selection.patches) as (path, sandboxed):
        tree = detect(path, recipe.project)
        # The wheel of an installed package may have a ledger, with the fixes that its maker chose.
        is_installed = tree.kind == "installed"
        ledger = None
        if is_installed:
            ledger = read_ledger(state_folder(tree), recipe.project)

        request = selection.request(ledger)
        with drafted(
            path, recipe, request, dry_run=dry_run, sandboxed=sandboxed
        ) as draft:
            libraries: Mapping[str, Path] = {}
            if native:
                libraries = _make_libraries(source, draft)

            outcome = finish(draft, libraries)

        # The files may have changed: read the tree from the disk again.
        workspace = open_workspace(path, recipe.project)
        fields = {
            "dry_run": dry_run,
            "fixes": list(map(verdict_fields, outcome.verdicts)),
            **record_fields(outcome, "verdicts", "pending"),
        }
        yield from tree_blocks(workspace, request, **fields)
        yield from verdict_lines(outcome.verdicts, verbose=verbose)
        # ``tree`` was read before patching, so it still has its notes.
        yield from verdict_notes(outcome.verdicts, tree)
        yield from proof_lines(outcome.proofs, verbose=verbose)
        if outcome.recorded_proofs:
            text = f"recorded as proved by {outcome.recorded_by}, not proved again:"
            count = f" {len(outcome.recorded_proofs)} effects"
            yield style(text, fg="cyan") + count

        if ledger and ledger.verdicts and not selection.chooses:
            yield "as the package was patched before; name fixes, or revert first, for others"
        if dry_run:
            yield f"dry run: {counted_noun(len(outcome.pending), 'file')} would change"
            if outcome.pending:
                yield next_verb(*(word for word in sys.argv[1:] if word != "--dry-run"))
            return

        yield from _written_lines(outcome, recipe.project, path)
        if not is_installed:
            yield from _next_lines(recipe, request, path, selection.patches)


def _written_lines(outcome: Applied, project: str, path: Path) -> Lines:
    """Yield how many files were changed, and the command that undoes the changes."""
    if not outcome.written:
        yield "nothing to do: the tree is as asked for"
        return

    yield GOOD + f"{counted_noun(len(outcome.written), 'file')} changed in {path}"
    undo = quoted(*program(), "revert", f"--{project}-src", path)
    yield LaidOut(bold("undo:") + f" {undo}")


def _make_libraries(source: SourceOptions, draft: Draft) -> Mapping[str, Path]:
    """Make the libraries with assembled PTX; return the new files by their path in the tree.

    A dry run makes none, and returns the libraries that would be replaced.
    """
    # These modules are imported only when needed, since that takes a while.
    from patchkit.wheel.native.assemble import Assembler
    from patchkit.wheel.native.installed import make_package_native, new_files
    from patchkit.wheel.native.make import package_libraries

    workspace = draft.workspace
    target = draft.request.target
    if draft.dry_run:
        names = package_libraries(workspace.tree, target)
        return {name: workspace.tree.root / name for name in names}

    with progress() as report:
        assembler = Assembler(offline=source.offline, progress=report("Fetching ptxas"))
        bar = report("Assembling PTX")
        libraries = make_package_native(workspace, target, assembler, bar)
    for library in libraries:
        for reason in library.refused:
            tell(note(f"{reason}; it stays as it is"))

    return new_files(libraries)


def _next_lines(
    recipe: Recipe, request: Request, path: Path, patches: Sequence[Path]
) -> Lines:
    """Yield how a wheel is made of a tree: by `patchkit build` if it takes the project."""
    build = recipe.facts.build
    if build.variable:
        value = build.value_for(request.target, request.arch)
        yield f"a build of your own takes {build.variable}={value}"

    build_options = projects()[recipe.project].build_options
    if build_options is None:
        yield LaidOut(bold("next:") + f" {quoted('pip', 'wheel', '--no-deps', path)}")
        return

    words = _build_words(request, patches, build_options)
    yield next_verb("build", recipe.project, "--src", path, *words)


def _build_words(
    request: Request, patches: Sequence[Path], options: Sequence[str]
) -> Sequence[str]:
    """Return those options of `patchkit build` that say what a tree was patched for."""
    target = request.target.name
    chosen = {
        "--target": [target] if target != DEFAULT_TARGET else [],
        "--arch": [request.arch] if request.arch != "native" else [],
        "--only": sorted(request.only),
        "--without": sorted(request.skip),
        "--with": sorted(request.also),
        "--patch": map(str, patches),
    }
    words = []
    for name in options:
        for value in chosen[name]:
            words += [name, value]
    return words


@click.command
@optional_source_options
@request_options
@options_of("fixes-list")
@rendered
def fixes_command(
    source: SourceOptions | None,
    selection: Selection,
    verbose: bool,
) -> Blocks:
    """Show every fix and its state in SOURCE; write nothing. Without SOURCE, list the fixes.

    Without options, a patched tree is compared with what it was patched for. Exits with 4 if a fix
    does not fit the code.
    """
    if source is None:
        yield from _fix_list()
        return

    with opened(source, selection.patches) as (recipe, workspace):
        request = selection.request(workspace.ledger)
        verdicts = _tree_verdicts(workspace, recipe, request)

        fields = list(map(verdict_fields, verdicts))
        yield from tree_blocks(workspace, request, fixes=fields)
        yield from verdict_lines(verdicts, verbose=verbose)
        yield from verdict_notes(verdicts, workspace.tree)

    states = {verdict.state for verdict in verdicts}
    if State.DRIFTED in states:
        yield ExitCode(DriftError.exit_code)
    elif State.APPLY in states:
        left_out = ("fixes", "-v", "--verbose")
        words = [word for word in sys.argv[1:] if word not in left_out]
        yield next_verb("apply", *words)


def _tree_verdicts(
    workspace: Workspace, recipe: Recipe, request: Request
) -> Sequence[Verdict]:
    """Return the verdicts in the ledger of a tree, or else those of a new plan.

    A plan judges upstream's files. If all files of a fix hold its result already, the verdict is
    changed to "applied".
    """
    recorded = known_verdicts(workspace, recipe, request)
    if recorded is not None:
        return recorded

    plan = make_plan(workspace.tree, recipe, request)
    stock = plan.stock
    patched = set()
    for path, (_before, after) in plan.texts.items():
        is_file = (stock.root / path).is_file()
        if is_file and stock.read_bytes(path).decode() == after:
            patched.add(path)

    verdicts = []
    for verdict in plan.verdicts:
        paths = {edit.path for edit in verdict.edits}
        is_done = paths and paths <= patched

        verdicts.append(mark_applied(verdict) if is_done else verdict)
    return verdicts


def _fix_list() -> Blocks:
    """Yield a row for each fix that patchkit has."""
    fields: list[Fields] = []
    for recipe in load_recipes():
        support = load_support(recipe.project)
        for fix in recipe.fixes:
            facts = {name: getattr(fix, name) for name in _FIX_FACTS}
            releases = support.get(fix.id, {})
            fields.append({"project": recipe.project, **facts, "releases": releases})

        heads = (f"{recipe.project} fix", "what it does", "needed")
        yield from table(map(_fix_row, recipe.fixes), heads=heads)

    yield Record(fields)


def _fix_row(fix: Fix) -> Row:
    texts = []
    for need in fix.needs:
        limits = f" ({need.limits})" if need.limits else ""
        texts.append(f"{need.severity.value} {need.versions}{limits}")

    return (
        bold(fix.id),
        fix.title,
        ", ".join(texts) or "not needed",
    )


@click.command
@source_options
@request_options
@rendered
def diff_command(source: SourceOptions, selection: Selection) -> Blocks:
    """Show the changes that apply would make, or made, as a diff for git apply."""
    with opened(source, selection.patches) as (recipe, workspace):
        plan = plan_for(workspace, recipe, selection.request(workspace.ledger))
        diff = plan.diff()
        yield {
            "project": workspace.tree.project,
            "version": workspace.tree.version,
            "files": [*plan.texts],
            "diff": diff,
        }
        yield Data(diff)


@click.command
@options_of("fetch")
@rendered
def fetch_command(release: str, lock: bool, offline: bool) -> Blocks:
    """Download a release: an sdist from the package index that pip is configured for, or NCCL's
    sources from upstream's repository.

    It is verified by the hash that patchkit has of it, and kept in a cache; prints its path.
    """
    project = project_of(release)
    source = SourceOptions(project, release, offline=offline)
    with progress() as report:
        if lock:
            path = lock_release(source, report)
        else:
            path = fetch_release(source, load_recipe(project).check, report)

    yield {"path": path}
    yield Data(f"{path}\n")
    tell(next_verb("apply", release))


@click.command
@folder_options
@options_of("revert")
@rendered
def revert_command(source: SourceOptions, force: bool) -> Blocks:
    """Put back what upstream shipped, byte by byte.

    SOURCE is the folder, or the release that `apply` unpacked and patched below build/. Refuses,
    and names the file, if a patched file was edited since.
    """
    path = patched_tree(source.spec, source.project)
    if force:
        yield from _forced_blocks(path, source.project)
        return

    restored = revert(path, source.project)
    yield {"restored": restored}
    if restored:
        yield f"put back as upstream shipped them: {counted_noun(len(restored), 'file')}"
    else:
        yield "nothing to do: patchkit has changed nothing here"


def _forced_blocks(path: Path, project: str) -> Blocks:
    rescued = revert_by_force(detect(path, project))
    yield Record(rescued)

    yield f"put back as upstream shipped them: {counted_noun(len(rescued.restored), 'file')}"
    if rescued.moved:
        yield f"moved to {rescued.aside}: {', '.join(rescued.moved)}"
    if rescued.lost:
        yield f"not restored, as the original is damaged: {', '.join(rescued.lost)}"
    if not rescued.created:
        yield "no ledger says which files patchkit created: those stay where they are"


@click.command
@vllm_options
@request_options
@rendered
def archs_command(source: SourceOptions, selection: Selection) -> Blocks:
    """Compare which kernel group is built for which archs, stock beside patched.

    The release's own CMake decides; no compiler, torch or GPU is needed. The first column says how
    the patched group loads on the device: exact, family, compatible, jit (from PTX), or none. The
    last ones have the place of each group in CMake, and the features that it switches on.
    """
    with opened(source, selection.patches) as (recipe, workspace):
        request = selection.request(workspace.ledger)
        if workspace.tree.kind == "installed":
            what = f"{source.spec} is installed: its kernels are compiled already"
            raise UsageError(what)

        target = request.target
        archs = request.arch_list
        plan = plan_for(workspace, recipe, request)
        stock = evaluate(plan.stock, target, archs, target.cuda)
        patched = evaluate(plan.patched, target, archs, target.cuda)

        heads = ("loads", "patched", "stock", "kernel group", "where", "switches on")
        fields = []

        rows = []
        counts = Counter[Load]()
        for old, new in zip(stock, patched, strict=True):
            load = best_load(new.archs, target.capability)
            counts[load] += 1
            rows.append(_group_row(old, new, load))
            fields.append(
                {
                    "group": new.name,
                    "where": new.where,
                    "variable": new.variable,
                    "switches": new.switches,
                    "stock": old.archs,
                    "patched": new.archs,
                    "loads": str(load),
                }
            )

        settings = {"torch_cuda_arch_list": archs, "cuda": target.cuda}
        yield from tree_blocks(workspace, request, **settings, groups=fields)

        yield f"TORCH_CUDA_ARCH_LIST={archs}, CUDA {target.cuda}"
        yield from table(rows, heads=heads)

        changed = sum(row["stock"] != row["patched"] for row in fields)
        summary = f"{count_loads(counts)}; {changed} differ from stock"
        yield f"{len(rows)} groups on {target.title}: {summary}"


def _group_row(stock: Group, patched: Group, load: Load) -> Row:
    styles = LOAD_STYLES[str(load)]
    return (
        style(str(load), **styles),
        style(";".join(patched.archs) or "-", **styles),
        dim(";".join(stock.archs) or "-"),
        patched.name,
        patched.where,
        " ".join(patched.switches),
    )
