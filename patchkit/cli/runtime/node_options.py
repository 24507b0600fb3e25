"""Options that say what a node is, shared by the verbs that decide by it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from patchkit.errors import UsageError
from patchkit.runtime.envfile.facts import nodes_max
from patchkit.runtime.rules.variable_rules import QUANTIZATIONS
from patchkit.target import targets

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--role", type=click.Choice(["single", "head", "worker"]), help="What this node is."
    ),
    click.option(
        "--nodes",
        type=click.IntRange(1, nodes_max()),
        metavar="N",
        help="How many, head and all; default: 2.",
    ),
    click.option("--head-ip", metavar="A", default="", help="The head's address; here or there."),
    click.option(
        "--topology",
        type=click.Choice(["auto", "roce", "socket", "ring", "hetero"]),
        help="auto: RoCE if this node has an active RDMA device, else sockets.",
    ),
    click.option(
        "--executor",
        type=click.Choice(["auto", "mp", "ray"]),
        help="What starts the ranks. auto: mp where vLLM has --nnodes.",
    ),
    click.option("--vllm", metavar="VERSION", default="", help="Instead of the installed one."),
    click.option("--quantization", type=click.Choice(QUANTIZATIONS), help="The checkpoint's."),
    click.option("--target", type=click.Choice(list(targets())), help="Instead of the probed GPU."),
    click.option(
        "--python", metavar="EXE", help="The Python that has vLLM. Default: the present one."
    ),
    click.option(
        "--root",
        type=click.Path(path_type=Path, exists=True, file_okay=False),
        default=Path("/"),
        help="Another machine's files, such as `patchkit probe --save` writes.",
    ),
)


accept_edited = click.option(
    "--accept-edited",
    is_flag=True,
    help="Take a --from file that was edited, and show what it adds.",
)


def node_options(function: F) -> F:
    """Add them, in the order in which help shows them."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def first_version(*known: str) -> str:
    """The first vLLM that somebody names. Raises UsageError if nobody does."""
    for version in known:
        if version:
            return version
    raise UsageError(
        "for which vLLM? None is installed in the present Python",
        hint="name the Python that has it with --python, or the version: --vllm 0.25.1",
    )
