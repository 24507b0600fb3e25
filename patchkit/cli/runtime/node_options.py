"""Share the options that say what a node is, between the verbs that decide by it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from patchkit.cli import complete
from patchkit.runtime.envfile.facts import nodes_max
from patchkit.runtime.node.decision import NodeOptions
from patchkit.runtime.node.lock_file import locked_versions
from patchkit.runtime.rules.condition import CHOICES
from patchkit.runtime.rules.rule import RuleChoice
from patchkit.target import targets

F = TypeVar("F", bound=Callable[..., Any])

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
    type=click.Path(path_type=Path, exists=True, file_okay=False),
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
        type=click.Choice(["auto", "roce", "socket", "ring", "hetero"]),
        help="auto: RoCE if this node has an active RDMA device, else sockets.",
    ),
    click.option(
        "--executor",
        type=click.Choice(["auto", "mp", "ray"]),
        help="What starts the ranks. auto: mp where vLLM has --nnodes.",
    ),
    VLLM,
    NCCL,
    click.option(
        "--lock",
        type=click.Path(path_type=Path, exists=True),
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
    """Add the options in the order in which help shows them.

    What a lock says takes the place of what is not given.
    """

    @functools.wraps(function)
    def wrapped(*arguments: Any, lock: Path | None, **options: Any) -> Any:
        locked = locked_versions(lock) if lock else {}
        given = {
            name: options[name] or version for name, version in locked.items() if name in options
        }
        return function(*arguments, **{**options, **given})

    decorated = cast("F", wrapped)
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated


def asked_for(options: Mapping[str, Any], **more: Any) -> NodeOptions:
    """Return what the options say; ``more`` are fields of NodeOptions that one verb alone has."""
    return NodeOptions(
        role=options["role"] or "",
        nodes=options["nodes"] or 0,
        head=options["head_ip"],
        topology=options["topology"] or "auto",
        executor=options["executor"] or "auto",
        vllm=options["vllm"],
        nccl=options["nccl"],
        target=options["target"] or "",
        quantization=options["quantization"] or "",
        **more,
    )


def rule_choice(options: Mapping[str, Any]) -> RuleChoice:
    """Return the rules that are turned on and off."""
    return RuleChoice(wanted=frozenset(options["wanted"]), unwanted=frozenset(options["unwanted"]))
