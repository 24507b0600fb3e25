"""Patch a tree, and show every fix and its state: `patchkit apply`, `patchkit fixes`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click
from packaging.version import Version

from patchkit.apply import finish, open_to_apply, prepare
from patchkit.cli.options import (
    Selection,
    located,
    opened,
    optional_source_options,
    request_options,
    source_options,
)
from patchkit.cli.out import (
    LaidOut,
    next_step,
    program,
    record_fields,
    style,
    table,
    tell,
)
from patchkit.cli.patch.verdict_view import (
    proof_lines,
    tree_blocks,
    verdict_fields,
    verdict_lines,
    verdict_notes,
)
from patchkit.cli.progress import progress
from patchkit.cli.render import (
    GOOD,
    Block,
    ExitCode,
    Record,
    counted_noun,
    lead_word,
    rendered,
    verbose_option,
)
from patchkit.errors import DriftError, UsageError
from patchkit.patching.commit import mark_applied
from patchkit.patching.fix import Request, State
from patchkit.patching.ledger import read_ledger
from patchkit.patching.plan import make_plan
from patchkit.patching.recipe import load_recipe, load_recipes, load_support
from patchkit.patching.workspace import Workspace, known_verdicts, open_workspace
from patchkit.quoting import quoted
from patchkit.source.detect import detect, state_folder
from patchkit.source.releases import named_version
from patchkit.source.resolve import SourceOptions


@click.command("apply")
@source_options
@request_options
@click.option("--dry-run", is_flag=True, help="Plan and prove, write nothing.")
@click.option(
    "--native", is_flag=True, help="Of an installed vLLM: assemble its PTX as well."
)
@verbose_option
@rendered
def apply_command(
    source: SourceOptions,
    *,
    selection: Selection,
    dry_run: bool,
    native: bool,
    verbose: bool,
) -> Iterator[Block]:
    """Patch a tree for a device, prove the effect, and keep a way back.

    \b
      patchkit apply vllm==0.33.0
      patchkit apply .venv/lib/python3.12/site-packages/vllm

    What is asked for is what the tree becomes, whatever was applied before; asking again changes
    nothing. Either everything is written or nothing.

    Of an installed package that is patched already, which a repacked wheel gives, what it was
    patched for is the default.
    """
    recipe = load_recipe(source.project)
    selection.request()  # a mistyped option is reported before anything is fetched
    with located(source, keep=not dry_run, patches=selection.patches) as (
        path,
        sandboxed,
    ):
        tree = detect(path, recipe.project)
        # The maker of an installed package's wheel may have chosen fixes.
        kept = tree.kind == "installed"
        ledger = read_ledger(state_folder(tree), recipe.project) if kept else None
        request = selection.request(ledger)
        with open_to_apply(path, recipe, sandboxed, dry_run=dry_run) as workspace:
            prepared = prepare(workspace, recipe, request)
            libraries: Mapping[str, Path] = {}
            if native:
                libraries = _make_libraries(source, request, workspace, dry_run=dry_run)
            outcome = finish(prepared, libraries, dry_run=dry_run)

        workspace = open_workspace(path, recipe.project)  # as it lies on the disk now
        done = record_fields(outcome, "verdicts", "pending")
        fixes = list(map(verdict_fields, outcome.verdicts))
        yield from tree_blocks(workspace, request, dry_run=dry_run, fixes=fixes, **done)
        yield from verdict_lines(outcome.verdicts, verbose=verbose)
        yield from verdict_notes(
            outcome.verdicts, tree
        )  # as it was found, without a ledger
        yield from proof_lines(outcome.proofs, verbose=verbose)
        if proofs := outcome.recorded_proofs:
            said = f"recorded as proved by {outcome.recorded_by}, not proved again:"
            yield style(said, fg="cyan") + (
                "" if verbose else f" {len(proofs)} effects"
            )
            yield from (f"  {proof}" for proof in proofs if verbose)
        if ledger and ledger.verdicts and not selection.chooses:
            yield "as the package was patched before; name fixes, or revert first, for others"
        if dry_run:
            yield f"dry run: {counted_noun(len(outcome.pending), 'file')} would change"
            if outcome.pending:
                yield next_step(
                    *program(), *(word for word in sys.argv[1:] if word != "--dry-run")
                )
        elif outcome.written:
            yield (
                GOOD + f"{counted_noun(len(outcome.written), 'file')} changed in {path}"
            )
            undo = quoted(*program(), "revert", f"--{recipe.project}-src", path)
            yield LaidOut(style("undo:", bold=True) + f" {undo}")
        else:
            yield "nothing to do: the tree is as asked for"
        if not dry_run and not kept:
            yield f"a build of your own takes {recipe.build.setting(request)}"
            build = ("build", recipe.project, "--src", path)
            yield next_step(
                *program(),
                *build,
                *_build_words(recipe.project, request, selection.patches),
            )


def _make_libraries(
    source: SourceOptions,
    request: Request,
    workspace: Workspace,
    *,
    dry_run: bool,
) -> Mapping[str, Path]:
    """Return the new libraries by path, or in a dry run which there would be; tell what stays."""
    # What reads and compiles PTX takes a while to import.
    from patchkit.wheel.native.assemble import Assembler
    from patchkit.wheel.native.installed import make_package_native, new_files
    from patchkit.wheel.native.listing import package_libraries

    if dry_run:
        names = package_libraries(workspace.tree, request.target)
        return {name: workspace.tree.root / name for name in names}
    with progress() as report:
        assembler = Assembler(offline=source.offline, progress=report("Fetching ptxas"))
        bar = report("Assembling PTX")
        made = make_package_native(workspace, request.target, assembler, bar)
    for why in (why for library in made for why in library.refused):
        tell(lead_word("note") + f"{why}; it stays as it is")
    return new_files(made)


def _build_words(
    project: str, request: Request, patches: Sequence[Path]
) -> Iterator[str]:
    """Yield the options that build a tree for what it was patched for."""
    options = {
        "--target": [request.target.name] if request.target.name != "gb10" else []
    }
    if project != "nccl":  # which is cross-compiled, with all of its fixes
        options["--arch"] = [request.arch] if request.arch != "native" else []
        fixes = {
            "--only": request.only,
            "--without": request.skip,
            "--with": request.also,
        }
        options |= {option: sorted(ids) for option, ids in fixes.items()}
        options["--patch"] = list(map(str, patches))
    for option, values in options.items():
        for value in values:
            yield from (option, value)


@click.command("fixes")
@optional_source_options
@request_options
@click.option(
    "--version", "release", metavar="X.Y.Z", help="List what this release needs."
)
@verbose_option
@rendered
def fixes_command(
    source: SourceOptions | None,
    *,
    selection: Selection,
    release: str | None,
    verbose: bool,
) -> Iterator[Block]:
    """Show every fix and its state in SOURCE; write nothing. Without SOURCE, list the fixes.

    Without options, a patched tree is compared with what it was patched for. Exits with 4 if a fix
    does not fit the code.

    The list says how much a release needs each fix, by the table; the code of SOURCE decides.
    """
    if source is None:
        yield from _fix_list(
            named_version(release) if release else None, verbose=verbose
        )
        return
    if release:
        raise UsageError("--version is for the list, which takes no SOURCE")
    with opened(source, selection.patches) as (recipe, workspace):
        request = selection.request(workspace.ledger)
        verdicts = known_verdicts(workspace, recipe, request)
        if verdicts is None:
            plan = make_plan(workspace.tree, recipe, request)
            # Verdicts are of upstream's texts; what lies on disk already counts as applied.
            stock = plan.stock
            done = {
                path
                for path, (_before, after) in plan.texts.items()
                if (stock.root / path).is_file()
                and stock.read_bytes(path).decode() == after
            }
            verdicts = tuple(
                mark_applied(it)
                if it.edits and {edit.path for edit in it.edits} <= done
                else it
                for it in plan.verdicts
            )
        yield from tree_blocks(
            workspace, request, fixes=list(map(verdict_fields, verdicts))
        )
        yield from verdict_lines(verdicts, verbose=verbose)
        yield from verdict_notes(verdicts, workspace.tree)
    states = {verdict.state for verdict in verdicts}
    if State.DRIFTED in states:
        yield ExitCode(DriftError.exit_code)
    elif State.APPLY in states:
        # `status SOURCE` is the former spelling.
        left_out = ("fixes", "status", "-v", "--verbose")
        words = [word for word in sys.argv[1:] if word not in left_out]
        yield next_step(*program(), "apply", *words)


def _fix_list(version: Version | None, *, verbose: bool) -> Iterator[Block]:
    recipes = list(load_recipes())
    if version is not None:
        # A release that no recipe knows yet is taken for one of vLLM.
        recipe = next(
            (recipe for recipe in recipes if recipe.knows(version)), load_recipe()
        )
        recipe.check(version)
        recipes = [recipe]
        if not recipe.knows(version):
            tell(
                lead_word("note")
                + f"{recipe.project} {version} is not one of the {len(recipe.supported)} known "
                + f"releases, {recipe.supported[0]} to {recipe.newest}: this is what the fixes' "
                + "ranges say, and its code may say otherwise"
            )
    fields, counts = [], Counter[str]()
    tables: dict[str, list[tuple[str, ...]]] = {
        recipe.project: [] for recipe in recipes
    }
    for recipe, fix in [(each, fix) for each in recipes for fix in each.fixes]:
        needs = [need for need in fix.needs if version is None or need.covers(version)]
        releases = {
            mode: {
                name: level
                for name, level in row.items()
                if version in (None, Version(name))
            }
            for mode, row in load_support(recipe.project).get(fix.id, {}).items()
        }
        names = ("id", "title", "layer", "arches", "upstream")
        known = {name: getattr(fix, name) for name in names}
        fields.append(
            {"project": recipe.project, **known, "needs": needs, "releases": releases}
        )
        needed = [
            f"{need.severity.value} {need.versions}"
            + (f" ({need.limits})" if need.limits else "")
            for need in needs
        ]
        name = style(fix.id, bold=bool(needs) or None, dim=None if needs else True)
        row = (
            name,
            fix.title,
            ", ".join(needed) or "not needed",
            style(fix.upstream, dim=True),
        )
        if needs or verbose:
            tables[recipe.project].append(row if verbose else row[:3])
        counts.update(need.severity.value for need in needs[:1])
    yield Record(fields)
    for project, rows in tables.items():
        heads = (f"{project} fix", "what it does", "needed", "upstream")
        yield from table(rows, heads=heads if verbose else heads[:3])
    if version is not None:
        yield ", ".join(f"{count} {level}" for level, count in counts.items())
