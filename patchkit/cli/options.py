"""Share between the verbs about source trees: options, what they describe, and how it is shown."""

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import click

from patchkit.cli.out import (
    Shown,
    bold,
    dim,
    progress,
    style,
    table,
    tell,
)
from patchkit.cli.render import (
    BAD,
    STYLES,
    Blocks,
    Lines,
    Option,
    Row,
    Style,
    Verb,
    lead_word,
    note,
    option,
    options_of,
    with_options,
)
from patchkit.errors import UsageError
from patchkit.frozen import Fields, Texts, frozen
from patchkit.patching.fix import Request, Severity, State, Verdict
from patchkit.patching.recipe import Recipe, load_recipe
from patchkit.patching.user_patch import read_patches
from patchkit.patching.workspace import Ledger, LedgerRequest, Workspace, open_workspace
from patchkit.records import read_toml
from patchkit.source.detect import project_of
from patchkit.source.project import example, projects
from patchkit.source.releases import named_version
from patchkit.source.resolve import SourceOptions, resolved
from patchkit.source.tree import Sandboxed, SourceTree
from patchkit.target import DEFAULT_TARGET, MODES, targets

# What counts if neither an option nor the ledger of a patched tree says anything.
_DEFAULTS = LedgerRequest(
    target=DEFAULT_TARGET, arch="native", only=(), skip=(), also=()
)


_SOURCE = options_of("source")
_FETCHING = options_of("fetching")
_ARCHIVE = (options_of("archive"), _FETCHING)


def _source_adder(*options: Option, required: bool = True) -> Callable[[Verb], Verb]:
    """Return a decorator that adds options, and passes them to the verb as one ``source``."""

    def decorate(verb: Verb) -> Verb:
        @functools.wraps(verb)
        def wrapped(positional: str | None, **arguments: Any) -> Any:
            source = _take_source(positional, arguments, required=required)
            return verb(source=source, **arguments)

        return with_options(*options)(wrapped)

    return decorate


def _take_source(
    positional: str | None, arguments: Fields, *, required: bool
) -> SourceOptions | None:
    """Return the one source that a command line names; remove its options from ``arguments``.

    The version of --source-version goes into the environment variable that detection reads, and
    setuptools-scm in a build. Returns None if there is no source and none is ``required``. Raises
    UsageError for several sources, for a required one that is missing, and for a project that the
    verb does not take.
    """
    names = [name for name in projects() if f"{name}_src" in arguments]
    specs = {name: arguments.pop(f"{name}_src") for name in names}
    present = arguments.keys() & {"offline", "sha256", "trusted"}
    fetching = {name: arguments.pop(name) for name in present}
    version = arguments.pop("source_version", None)
    sources = [(name, spec) for name, spec in specs.items() if spec is not None]
    if positional is not None:
        sources.append((project_of(positional), positional))
    if not sources and not required:
        return None

    if len(sources) != 1 or sources[0][0] not in specs:
        text = ", ".join(spec for _name, spec in sources) or "no source"
        flags = " or ".join(f"--{name}-src" for name in names)
        raise UsageError(
            f"{text}: this verb takes one source, of {' or '.join(names)}",
            hint=f"name one, with {flags}",
        )

    project, spec = sources[0]
    if version is not None:
        number = str(named_version(version, f"as in {example(project)}"))
        os.environ[projects()[project].version_variable] = number
    return SourceOptions(project, spec, **fetching)


_PROJECTS = {
    name: option(
        f"--{name}-src SOURCE",
        f"Folder, archive, git+URL@COMMIT, or {example(name)}.",
    )
    for name in projects()
}
_ANY = (_SOURCE, *_PROJECTS.values())
source_options = _source_adder(*_ANY, *_ARCHIVE)
optional_source_options = _source_adder(*_ANY, *_ARCHIVE, required=False)
vllm_options = _source_adder(_SOURCE, _PROJECTS["vllm"], _FETCHING)  # vLLM alone
folder_options = _source_adder(*_ANY)  # for trees that are patched already


_ARCHS = ", ".join(
    f"{row.name} {row.native}|{row.family}" for row in targets().values()
)


_REQUEST = (
    options_of("device"),
    option(
        "--arch native|family",
        f"Device code: {_ARCHS}.",
        type=click.Choice(MODES),
    ),
    options_of("fixes"),
)


@frozen
class Selection:
    """The fixes and the device of a command line; options that are not given are None or empty."""

    target: str | None
    arch: str | None
    only: Texts
    skip: Texts
    also: Texts
    patches: tuple[Path, ...]

    @property
    def chooses(self) -> bool:
        """Return whether the command line names fixes: then the ledger's choice does not count."""
        return bool(self.only or self.skip or self.also or self.patches)

    def request(self, ledger: Ledger | None = None) -> Request:
        """Return the request, with defaults from the ledger of a patched tree if there is one."""
        past = ledger.request if ledger else _DEFAULTS
        chosen = self if self.chooses else past
        return Request(
            target=targets()[self.target or past.target],
            arch=self.arch or past.arch,
            only=frozenset(chosen.only),
            skip=frozenset(chosen.skip),
            also=frozenset(chosen.also),
            patches=read_patches(self.patches) if self.chooses else past.patches,
        )


def request_options(verb: Verb) -> Verb:
    """Add the options for device, fixes and patches; the verb takes them as one ``selection``."""

    @functools.wraps(verb)
    def wrapped(**options: Any) -> Any:
        chosen = {entry.name: options.pop(entry.name) for entry in fields(Selection)}
        return verb(selection=Selection(**chosen), **options)

    return with_options(*_REQUEST)(wrapped)


def choose_sandbox(*, locked: bool, trusted: bool) -> Sandboxed:
    """Return how a source's code may run. Code that is not ``locked`` needs the sandbox.

    ``trusted`` stands for --trust-source: no sandbox at all, which is told.
    """
    if trusted:
        tell("not sandboxed: --trust-source")
        return Sandboxed.NEVER

    if locked:
        return Sandboxed.IF_POSSIBLE
    return Sandboxed.ALWAYS


@contextlib.contextmanager
def located(
    source: SourceOptions, *, keep: bool, patches: Sequence[Path] = ()
) -> Iterator[tuple[Path, Sandboxed]]:
    """Fetch and unpack a source if needed; yield its folder, and how its code may run.

    With ``patches``, which no lock names, code runs as in an unlocked source.
    """
    with contextlib.ExitStack() as stack:
        with progress() as report:
            check = load_recipe(source.project).check
            tree = stack.enter_context(resolved(source, check, report, keep=keep))
        is_locked = tree.locked and not patches
        yield tree.path, choose_sandbox(locked=is_locked, trusted=source.trusted)


@contextlib.contextmanager
def opened(
    source: SourceOptions, patches: Sequence[Path] = ()
) -> Iterator[tuple[Recipe, Workspace]]:
    """Yield the recipe and the workspace of a source; nothing that the context fetches is kept."""
    recipe = load_recipe(source.project)
    with located(source, keep=False, patches=patches) as (path, sandboxed):
        workspace = open_workspace(path, source.project, sandboxed=sandboxed)
        recipe.check(workspace.tree.version)
        yield recipe, workspace


_STYLES = read_toml(dict[str, tuple[str, str, Style]], STYLES, key="state")
# States and severities whose fixes get a line. Optional fixes are off by default: they are counted.
# The severity of a patch that the user named is None.
_LISTED = [
    *product((State.APPLY, State.APPLIED), (*Severity, None)),
    (State.OFF, Severity.REQUIRED),
    (State.OFF, Severity.RECOMMENDED),
]
# States in which the severity of a fix does not matter.
_UNSEVERE = (State.UPSTREAM, State.NOT_APPLICABLE)


def tree_blocks(workspace: Workspace, request: Request, **more: Any) -> Blocks:
    """Yield a tree and its device; with --json also the known bugs of its release, and ``more``."""
    tree = workspace.tree
    target = request.target
    recipe = load_recipe(tree.project)
    build = recipe.facts.build
    built = build.value_for(target, request.arch)
    variable = build.variable.lower()
    fields = {
        "project": tree.project,
        "version": tree.version,
        "kind": tree.kind,
        "root": tree.root,
        "target": target.name,
        "arch": request.arch,
        **({variable: built} if variable else {}),
        **request.patch_facts,
        "known_bugs": recipe.bugs_of(tree.version),
        "recipe": recipe.digest,
        "added_recipes": recipe.added,
    }
    yield fields | more

    release = bold(f"{tree.project} {tree.version}")
    device = f"  {tree.kind}  →  {target.title}, {request.arch} "
    yield release + device + bold(built)
    if target.untried:
        yield note(target.untried)
    if recipe.added:
        yield dim(f"with recipes of yours: {', '.join(map(str, recipe.added))}")


def verdict_fields(verdict: Verdict) -> Fields:
    """Return the fields of a verdict for JSON."""
    return {
        "id": verdict.fix.id,
        "state": verdict.state.value,
        "severity": verdict.severity.value if verdict.severity else None,
        "reason": verdict.reason,
        "note": verdict.note or None,
        "edits": len(verdict.edits),
    }


def verdict_lines(verdicts: Sequence[Verdict], *, verbose: bool) -> Lines:
    """Yield a row for each fix if ``verbose``, otherwise a line for each state.

    Among the lines for states, each drifted fix has one of its own, with the reason.
    """
    if verbose:
        heads = ("", "fix", "state", "severity", "what the code says")
        yield from table(map(_verdict_row, verdicts), heads=heads)
        return

    groups: dict[tuple[State, Severity | None], list[str]] = {}
    for verdict in verdicts:
        if verdict.state is State.DRIFTED:
            name = bold(verdict.fix.id)
            yield BAD + name + f" drifted: {verdict.reason}"
        else:
            group = groups.setdefault((verdict.state, verdict.severity), [])
            group.append(verdict.fix.id)

    for state, severity in _LISTED:
        if fixes := groups.pop((state, severity), []):
            sign, title, styles = _STYLES[state]
            level = f", {severity.value}" if severity else ""
            yield style(f"{sign} {title}{level}:", **styles) + f" {', '.join(fixes)}"

    counts = Counter[State]()
    for (state, _severity), fixes in groups.items():
        counts[state] += len(fixes)
    if counts:
        texts = [f"{count} {_STYLES[state][1]}" for state, count in counts.items()]
        yield dim(f"= {', '.join(texts)}; -v lists them")


def _verdict_row(verdict: Verdict) -> Row:
    sign, _title, styles = _STYLES[verdict.state]
    severity = ""
    if verdict.severity and verdict.state not in _UNSEVERE:
        severity = verdict.severity.value

    return (
        style(sign, **styles),
        verdict.fix.id,
        style(verdict.state.value, **styles),
        severity,
        dim(verdict.reason),
    )


def verdict_notes(verdicts: Sequence[Verdict], tree: SourceTree) -> Lines:
    """Yield the notes of a tree and of verdicts, each once, and the known bugs of its release."""
    notes = [tree.note, *(verdict.note for verdict in verdicts)]
    yield from (note(text) for text in dict.fromkeys(notes) if text)

    for bug in load_recipe(tree.project).bugs_of(tree.version):
        yield lead_word("known") + f"{bug.says}; instead: {bug.instead} ({bug.source})"


def proof_lines(proofs: Sequence[str], *, verbose: bool) -> list[Shown]:
    """Return the effects that this run proved: each, or their number and the first."""
    head = style("proved", fg="green")
    if verbose or len(proofs) < 2:
        return [head + f" {proof}" for proof in proofs]

    text = f" {len(proofs)} effects with the release's own code, such as: {proofs[0]}"
    return [head + text]
