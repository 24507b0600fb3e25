"""Share options between verbs, and make the request of them."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from patchkit.cli import complete
from patchkit.cli.out import PATH, tell
from patchkit.cli.progress import progress
from patchkit.cli.render import Option, with_options
from patchkit.errors import UsageError
from patchkit.patching.fix import Request
from patchkit.patching.ledger import Ledger, LedgerRequest
from patchkit.patching.recipe import Recipe, load_recipe
from patchkit.patching.user_patch import read_patches
from patchkit.patching.workspace import Workspace, open_workspace
from patchkit.source.detect import VERSION_VARIABLE, project_of
from patchkit.source.releases import named_version
from patchkit.source.resolve import SourceOptions, resolved
from patchkit.source.tree import Sandboxed
from patchkit.target import DEFAULT_TARGET, MODES, targets

F = TypeVar("F", bound=Callable[..., Any])

# The defaults of a tree that has no ledger yet.
_FIRST = LedgerRequest(target=DEFAULT_TARGET, arch="native", only=(), skip=(), also=())


def _name_version(
    _context: click.Context, _option: click.Parameter, version: str | None
) -> None:
    """Put the version that a user names where a build of the tree looks for it too."""
    if version is not None:
        os.environ[VERSION_VARIABLE] = str(named_version(version, "for example 0.33.0"))


offline_option = click.option(
    "--offline", is_flag=True, help="Use only what is in the cache."
)
trust_source = click.option(
    "--trust-source",
    "trusted",
    is_flag=True,
    help="Run the source's code without a sandbox.",
)
_NAMED = (
    click.argument(
        "positional",
        metavar="[SOURCE]",
        required=False,
        shell_complete=complete.sources("vllm", "nccl"),
    ),
    click.option(
        "--vllm-src",
        metavar="SOURCE",
        shell_complete=complete.sources("vllm"),
        help="A folder, an sdist, an installed vLLM, or a release: vllm==0.33.0.",
    ),
    click.option(
        "--source-version",
        metavar="X.Y.Z",
        expose_value=False,
        callback=_name_version,
        help="What a checkout of vLLM is that has no tags, or other ones.",
    ),
)
_NCCL = click.option(
    "--nccl-src",
    metavar="SOURCE",
    shell_complete=complete.sources("nccl"),
    help="A folder, an archive, git+URL@COMMIT, or a release: nccl==2.29.7.",
)
_FETCHED = (
    click.option(
        "--sha256", metavar="HEX", help="What an unknown archive of NCCL must have."
    ),
    offline_option,
    trust_source,
)
_WAYS = ("offline", "sha256", "trusted")


def _source_adder(*options: Option, required: bool = True) -> Callable[[F], F]:
    """Return a decorator that adds options, and hands them on as one ``source``."""

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def wrapped(positional: str | None, **given: Any) -> Any:
            keys = [name for name in ("vllm_src", "nccl_src") if name in given]
            named = {key.removesuffix("_src"): given.pop(key) for key in keys}
            ways = {name: given.pop(name) for name in _WAYS if name in given}
            specs = [
                (project, spec) for project, spec in named.items() if spec is not None
            ]
            if positional is not None:
                specs.append((project_of(positional), positional))
            if not specs and not required:
                return command(source=None, **given)
            if len(specs) != 1 or specs[0][0] not in named:
                said = ", ".join(spec for _project, spec in specs) or "no source"
                hint = (
                    f"name one, with {' or '.join(f'--{name}-src' for name in named)}"
                )
                raise UsageError(f"{said}: this verb takes one source", hint=hint)
            source = SourceOptions(*specs[0], **ways)
            if source.sha256 is not None and source.project != "nccl":
                raise UsageError(
                    "--sha256 is for an archive of NCCL; vLLM's sdists are locked"
                )
            return command(source=source, **given)

        return cast("F", with_options(*options)(wrapped))

    return decorate


source_options = _source_adder(*_NAMED, _NCCL, *_FETCHED)
optional_source_options = _source_adder(*_NAMED, _NCCL, *_FETCHED, required=False)
vllm_options = _source_adder(*_NAMED, *_FETCHED[1:])  # for what only vLLM has
folder_options = _source_adder(
    *_NAMED, _NCCL
)  # where only a tree that is there will do


target_option = click.option(
    "--target", type=click.Choice(list(targets())), help="Default: gb10."
)
_FIX: dict[str, Any] = {
    "multiple": True,
    "metavar": "ID",
    "shell_complete": complete.fixes,
}
_REQUEST = (
    target_option,
    click.option(
        "--arch", metavar="native|family", help="native is 12.1a, family 12.0f."
    ),
    click.option("--only", help="Only these fixes.", **_FIX),
    click.option(
        "--without", "skip", help="Leave a fix out, or an extension of a build.", **_FIX
    ),
    click.option("--with", "also", help="An optional fix too.", **_FIX),
    click.option(
        "--patch",
        "patches",
        multiple=True,
        type=PATH,
        metavar="FILE",
        help="A unified diff too, such as that of a pull request.",
    ),
)


@dataclass(frozen=True, slots=True)
class Selection:
    """The fixes and the device that a command line names; None and empty where it names none."""

    target: str | None
    arch: str | None
    only: frozenset[str]
    skip: frozenset[str]
    also: frozenset[str]
    patches: tuple[Path, ...] = ()

    @property
    def chooses(self) -> bool:
        """Return whether fixes were named; what a ledger has of that does not count then."""
        return bool(self.only or self.skip or self.also or self.patches)

    def request(self, ledger: Ledger | None = None) -> Request:
        """Return the request, with defaults from the ledger of a patched tree if there is one."""
        past = ledger.request if ledger else _FIRST
        chosen = self if self.chooses else past
        arch = self.arch or past.arch
        # Not a click.Choice: a bare 12.1 gets the reason why it is refused.
        if arch not in MODES:
            raise UsageError(
                f"--arch takes native or family, not {arch!r}",
                why="a bare 12.1 would lose the device's own instructions",
                hint="native builds 12.1a, family builds 12.0f",
            )
        return Request(
            target=targets()[self.target or past.target],
            arch=arch,
            only=frozenset(chosen.only),
            skip=frozenset(chosen.skip),
            also=frozenset(chosen.also),
            patches=read_patches(self.patches) if self.chooses else past.patches,
        )


def request_options(command: F) -> F:
    """Add what says the device, the fixes and patches; hand it on as one ``selection``."""

    @functools.wraps(command)
    def wrapped(
        target: str | None, arch: str | None, patches: tuple[Path, ...], **given: Any
    ) -> Any:
        only, skip, also = (
            frozenset(given.pop(name)) for name in ("only", "skip", "also")
        )
        return command(
            selection=Selection(target, arch, only, skip, also, patches), **given
        )

    return cast("F", with_options(*_REQUEST)(wrapped))


def choose_sandbox(*, locked: bool, trusted: bool) -> Sandboxed:
    """Return how a source's code may run: nobody vouches for one that no lock knows."""
    if trusted:
        tell("not sandboxed: --trust-source")
        return Sandboxed.NEVER
    return Sandboxed.IF_POSSIBLE if locked else Sandboxed.ALWAYS


@contextlib.contextmanager
def located(
    source: SourceOptions, *, keep: bool, patches: Sequence[Path] = ()
) -> Iterator[tuple[Path, Sandboxed]]:
    """Yield the folder of a source, fetched and unpacked if it has to be; how its code may run.

    Nobody vouches for the code of ``patches``, which a release gets.
    """
    with contextlib.ExitStack() as stack:
        with progress() as report:
            check = load_recipe(source.project).check
            found = stack.enter_context(resolved(source, check, report, keep=keep))
        locked = found.locked and not patches
        yield found.path, choose_sandbox(locked=locked, trusted=source.trusted)


@contextlib.contextmanager
def opened(
    source: SourceOptions, patches: Sequence[Path] = ()
) -> Iterator[tuple[Recipe, Workspace]]:
    """Yield the recipe and the workspace of a source that is only read."""
    recipe = load_recipe(source.project)
    with located(source, keep=False, patches=patches) as (path, sandboxed):
        workspace = open_workspace(path, source.project, sandboxed=sandboxed)
        recipe.check(workspace.tree.version)
        yield recipe, workspace
