"""Options that several verbs share, and the request they make."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from patchkit.apply import Workspace, open_workspace
from patchkit.errors import UsageError
from patchkit.patching.fix import Request
from patchkit.patching.recipe import Recipe, load_recipe
from patchkit.source.resolve import Options, Report, resolved
from patchkit.target import Target, targets

F = TypeVar("F", bound=Callable[..., Any])

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")


def source_options(command: F) -> F:
    """--vllm-src, --dest and --offline."""
    for option in reversed(
        [
            click.option(
                "--vllm-src",
                "source",
                required=True,
                metavar="SOURCE",
                help="An unpacked sdist, a git checkout, an sdist file, an installed "
                "site-packages/vllm, or a release such as vllm==0.24.0.",
            ),
            click.option(
                "--dest",
                type=click.Path(path_type=Path),
                help="Where an sdist file or a release is unpacked.  [default: build/vllm-VERSION]",
            ),
            click.option("--offline", is_flag=True, help="Use only what is in the cache."),
        ]
    ):
        command = option(command)
    return command


def request_options(command: F) -> F:
    """--target, --arch, --only, --skip and --with, handed on as one ``selection``."""

    @functools.wraps(command)
    def wrapped(
        target: str | None,
        arch: str | None,
        only: tuple[str, ...],
        skip: tuple[str, ...],
        also: tuple[str, ...],
        **rest: Any,
    ) -> Any:
        chosen = Selection(target, arch, frozenset(only), frozenset(skip), frozenset(also))
        return command(selection=chosen, **rest)

    for option in reversed(
        [
            click.option("--target", metavar="gb10|thor|h200", help="The device.  [default: gb10]"),
            click.option(
                "--arch",
                metavar="native|family",
                help="Code for this very device (12.1a) or its family (12.0f).  [default: native]",
            ),
            click.option("--only", multiple=True, metavar="ID", help="Only these fixes."),
            click.option("--skip", multiple=True, metavar="ID", help="Leave a fix out."),
            click.option(
                "--with", "also", multiple=True, metavar="ID", help="An optional fix too."
            ),
        ]
    ):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Selection:
    """What was given on the command line; None and empty where nothing was."""

    target: str | None
    arch: str | None
    only: frozenset[str]
    skip: frozenset[str]
    also: frozenset[str]

    def request(self, workspace: Workspace | None = None) -> Request:
        """The request, defaults filled in: from the ledger of ``workspace`` if there is one."""
        past = workspace.ledger.request if workspace and workspace.ledger else {}
        given = bool(self.only or self.skip or self.also)
        only, skip, also = (
            frozenset(past.get(key, ())) if not given else mine
            for key, mine in (("only", self.only), ("skip", self.skip), ("also", self.also))
        )
        return Request(
            target=find_target(self.target or past.get("target", "gb10")),
            arch=_arch(self.arch or past.get("arch", "native")),
            only=only,
            skip=skip,
            also=also,
        )


def find_target(name: str) -> Target:
    """The target of that name. Raises UsageError."""
    known = targets()
    if name not in known:
        raise UsageError(f"no target is called {name!r}", hint=f"one of {', '.join(known)}")
    return known[name]


def _arch(arch: str) -> str:
    if arch not in ("native", "family"):
        bare = arch[:1].isdigit()
        raise UsageError(
            f"--arch takes native or family, not {arch!r}",
            why="a bare 12.1 would lose the device's own instructions" if bare else "",
            hint="native builds 12.1a, family builds 12.0f",
        )
    return arch


@contextlib.contextmanager
def located(source: str, dest: Path | None, *, offline: bool, keep: bool) -> Iterator[Path]:
    """The folder of a source, fetched and unpacked under progress bars if it has to be."""
    with (
        progress() as report,
        resolved(source, resolve_options(report, dest, offline=offline), keep=keep) as path,
    ):
        yield path


@contextlib.contextmanager
def opened(source: str, dest: Path | None, *, offline: bool) -> Iterator[tuple[Recipe, Workspace]]:
    """The recipe and the workspace of a source that is only read."""
    recipe = load_recipe()
    with located(source, dest, offline=offline, keep=False) as path:
        workspace = open_workspace(path)
        recipe.check(workspace.tree.version)
        yield recipe, workspace


def resolve_options(report: Report, dest: Path | None, *, offline: bool) -> Options:
    """What the resolver has to know, from the recipe and the command line."""
    recipe = load_recipe()
    return Options(
        project=recipe.project,
        lock=recipe.home / "lock.toml",
        check=recipe.check,
        report=report,
        dest=dest,
        offline=offline,
    )


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """Progress bars on standard error, if it is a terminal; rich is imported when one is drawn."""
    with contextlib.ExitStack() as stack:
        bars: list[Any] = []

        def report(task: str) -> Callable[[int, int], None]:
            identifier: Any = None

            def update(done: int, total: int) -> None:
                nonlocal identifier
                if not bars:
                    bars.append(stack.enter_context(_bars()))
                if identifier is None:
                    identifier = bars[0].add_task(task, total=total)
                bars[0].update(identifier, completed=done, total=total)

            return update

        yield report


def _bars() -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
