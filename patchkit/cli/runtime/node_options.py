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
from patchkit.cli.render import lead_word
from patchkit.runtime.envfile.env_file import locked_versions
from patchkit.runtime.envfile.header import nodes_max
from patchkit.runtime.host.probe import probe
from patchkit.runtime.node.decision import NodeOptions
from patchkit.runtime.rules.rule import CHOICES, RuleChoice
from patchkit.target import targets

F = TypeVar("F", bound=Callable[..., Any])

TOPOLOGIES = ("auto", "roce", "socket", "ring", "hetero")
VLLM = click.option("--vllm", metavar="VERSION", default="", help="Instead of the installed one.")
NCCL = click.option(
    "--nccl", metavar="VERSION", default="", help="Instead of the one that torch loads."
)
TRITON = click.option(
    "--triton", metavar="VERSION", default="", help="Instead of the installed one."
)
TARGET = click.option(
    "--target", type=click.Choice(list(targets())), help="Instead of the probed GPU."
)
PYTHON = click.option(
    "--python", metavar="PATH", help="The Python that has vLLM; default: the present one."
)
ROOT = click.option(
    "--root",
    type=FOLDER,
    default=Path("/"),
    help="Another machine's files, such as `patchkit probe --save` writes.",
)
# Without defaults: what is not given may come from an env file, or is decided.
_OPTIONS = (
    click.option("--role", type=click.Choice(CHOICES["role"]), help="What this node is."),
    click.option(
        "--nodes",
        type=click.IntRange(1, nodes_max()),
        metavar="N",
        help="Number of nodes, including the head; default: 2.",
    ),
    click.option(
        "--head-ip",
        metavar="A",
        default="",
        help="The head's IPv4 address. On the LAN: control goes there, data over the cable.",
    ),
    click.option(
        "--topology",
        type=click.Choice(TOPOLOGIES),
        help="auto: RoCE if this node has an active RDMA device, else sockets.",
    ),
    click.option(
        "--executor",
        type=click.Choice(["auto", "mp", "ray"]),
        help="What starts the ranks. auto: mp where vLLM has --nnodes.",
    ),
    VLLM,
    NCCL,
    TRITON,
    click.option(
        "--lock",
        type=PRESENT_PATH,
        metavar="WHEELHOUSE",
        help="Its versions, which will be installed, instead of the installed ones.",
    ),
    click.option(
        "--quantization", type=click.Choice(CHOICES["quantization"]), help="The checkpoint's."
    ),
    TARGET,
    PYTHON,
    ROOT,
    click.option(
        "--accept-edited",
        is_flag=True,
        help="Take a --from file that was edited, and show what it adds.",
    ),
    click.option(
        "--with",
        "wanted",
        metavar="ID",
        multiple=True,
        shell_complete=complete.rules,
        help="Turn an optional rule on.",
    ),
    click.option(
        "--without",
        "unwanted",
        metavar="ID",
        multiple=True,
        shell_complete=complete.rules,
        help="Turn a rule off.",
    ),
)


def node_options(function: F) -> F:
    """Add the options; hand them on as ``asked``, with the ``host`` below ``root``.

    What a lock says takes the place of what is not given. Of the rules, which may be about
    variables or flags, the verb takes ``choice``.
    """

    @functools.wraps(function)
    def wrapped(
        *arguments: Any,
        lock: Path | None,
        root: Path,
        python: str | None,
        wanted: tuple[str, ...],
        unwanted: tuple[str, ...],
        **options: Any,
    ) -> Any:
        locked = locked_versions(lock) if lock else {}
        asked = NodeOptions(
            role=options.pop("role") or "",
            nodes=options.pop("nodes") or 0,
            head=options.pop("head_ip"),
            topology=options.pop("topology") or "auto",
            executor=options.pop("executor") or "auto",
            target=options.pop("target") or "",
            quantization=options.pop("quantization") or "",
            vllm=options.pop("vllm") or locked.get("vllm", ""),
            nccl=options.pop("nccl") or locked.get("nccl", ""),
            triton=options.pop("triton") or locked.get("triton", ""),
        )
        choice = RuleChoice(wanted=frozenset(wanted), unwanted=frozenset(unwanted))
        # The group of `env` has verbs of its own, for which this machine is not looked at.
        verb = click.get_current_context().invoked_subcommand
        host = None if verb else probe(root, python=python, environment=os.environ)
        return function(*arguments, asked=asked, choice=choice, host=host, root=root, **options)

    decorated = cast("F", wrapped)
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated


def note_lines(notes: Iterable[str], advice: Iterable[Any]) -> Iterator[Shown]:
    """Yield what a user should know of a plan, and what no setting solves."""
    for note in notes:
        yield lead_word("note") + note
    for it in advice:
        yield lead_word("beware") + f"{it.says}; instead: {it.instead}"
