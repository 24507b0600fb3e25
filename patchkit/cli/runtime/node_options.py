"""Share the options that say what a node is, between the verbs that decide by it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from patchkit.cli import complete
from patchkit.cli.out import FOLDER, PRESENT_PATH, Shown
from patchkit.cli.render import lead_word, with_options
from patchkit.runtime.envfile.env_file import locked_versions
from patchkit.runtime.envfile.header import NODES_MAX
from patchkit.runtime.host.probe import probe
from patchkit.runtime.node.decision import NodeOptions
from patchkit.runtime.rules.rule import CHOICES, RuleChoice
from patchkit.target import targets

F = TypeVar("F", bound=Callable[..., Any])

TOPOLOGIES = ("auto", "roce", "socket", "ring", "hetero")
VLLM = click.option(
    "--vllm", metavar="VERSION", default="", help="Not the installed one."
)
NCCL = click.option(
    "--nccl", metavar="VERSION", default="", help="Not the one that torch loads."
)
TRITON = click.option(
    "--triton", metavar="VERSION", default="", help="Not the installed one."
)
TARGET = click.option(
    "--target", type=click.Choice(list(targets())), help="Not the probed GPU."
)
PYTHON = click.option(
    "--python", metavar="PATH", help="That has vLLM; default: this one."
)
ROOT = click.option(
    "--root", type=FOLDER, default=Path("/"), help="What `probe --save` made."
)
# Names of options that are fields of NodeOptions.
_ASKED = (
    *("role", "nodes", "head", "topology", "executor"),
    *("vllm", "nccl", "triton", "target", "quantization"),
)
_RULE: dict[str, Any] = {
    "multiple": True,
    "metavar": "ID",
    "shell_complete": complete.rules,
}
# Without defaults: what is not given may come from an env file, or is decided.
_OPTIONS = (
    click.option(
        "--role", type=click.Choice(CHOICES["role"]), help="What this node is."
    ),
    click.option(
        "--nodes", type=click.IntRange(1, NODES_MAX), help="All nodes; default: 2."
    ),
    click.option(
        "--head-ip", "head", metavar="A", default="", help="The head's IPv4 address."
    ),
    click.option(
        "--topology", type=click.Choice(TOPOLOGIES), help="auto: RoCE, or else sockets."
    ),
    click.option(
        "--executor",
        type=click.Choice(["auto", "mp", "ray"]),
        help="What starts ranks.",
    ),
    VLLM,
    NCCL,
    TRITON,
    click.option(
        "--lock", type=PRESENT_PATH, help="A wheelhouse's versions, not the installed."
    ),
    click.option("--quantization", type=click.Choice(CHOICES["quantization"])),
    TARGET,
    PYTHON,
    ROOT,
    click.option(
        "--accept-edited", is_flag=True, help="Take a --from file that was edited."
    ),
    click.option("--with", "wanted", help="Turn an optional rule on.", **_RULE),
    click.option("--without", "unwanted", help="Turn a rule off.", **_RULE),
)


def node_options(verb: F) -> F:
    """Add the options; hand them on as ``asked``, with the ``host`` below ``root``.

    What a lock says takes the place of what is not given. Of the rules, which may be about
    variables or flags, the verb takes ``choice``.
    """

    @functools.wraps(verb)
    def wrapped(
        *arguments: Any,
        lock: Path | None,
        root: Path,
        python: str | None,
        **options: Any,
    ) -> Any:
        given = {name: options.pop(name) for name in _ASKED}
        locked = locked_versions(lock) if lock else {}
        known = {**locked, **{name: value for name, value in given.items() if value}}
        asked = NodeOptions(**{name: known[name] for name in _ASKED if name in known})
        wanted, unwanted = (
            frozenset(options.pop(name)) for name in ("wanted", "unwanted")
        )
        choice = RuleChoice(wanted=wanted, unwanted=unwanted)
        # The group of `env` has verbs of its own, for which this machine is not looked at.
        below = click.get_current_context().invoked_subcommand
        host = None if below else probe(root, python=python, environment=os.environ)
        return verb(
            *arguments, asked=asked, choice=choice, host=host, root=root, **options
        )

    return cast("F", with_options(*_OPTIONS)(wrapped))


def note_lines(notes: Iterable[str], advice: Iterable[Any]) -> Iterator[Shown]:
    """Yield what a user should know of a plan, and what no setting solves."""
    for note in notes:
        yield lead_word("note") + note
    for it in advice:
        yield lead_word("beware") + f"{it.says}; instead: {it.instead}"
