"""Share the options that describe a node, between the verbs that decide by them."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from patchkit.cli import complete
from patchkit.cli.out import FOLDER, PRESENT_PATH
from patchkit.cli.render import Lines, Option, Verb, flag, lead_word, note, with_options
from patchkit.runtime.envfile.env_file import locked_versions
from patchkit.runtime.envfile.header import NODES_MAX
from patchkit.runtime.host.probe import probe
from patchkit.runtime.node.decision import NodeOptions
from patchkit.runtime.rules.rule import CHOICES, RuleChoice
from patchkit.target import targets

TOPOLOGIES = ("auto", "roce", "socket", "ring", "hetero")


def _version_option(flag: str, text: str) -> Option:
    return click.option(
        flag,
        metavar="VERSION",
        default="",
        help=text,
    )


def _rule_option(flag: str, name: str, text: str) -> Option:
    return click.option(
        flag,
        name,
        multiple=True,
        metavar="ID",
        shell_complete=complete.rules,
        help=text,
    )


VLLM = _version_option("--vllm", "vLLM version, not the installed one.")
NCCL = _version_option("--nccl", "NCCL version, not the one that torch loads.")
TRITON = _version_option("--triton", "Triton version, not the installed one.")
TARGET = click.option(
    "--target",
    type=click.Choice(list(targets())),
    help="Target device, instead of the detected one.",
)
PYTHON = click.option(
    "--python", metavar="PATH", help="Python that has vLLM; default: this one."
)
ROOT = click.option(
    "--root", type=FOLDER, default=Path("/"), help="A copy that `probe --save` made."
)
# Options that are fields of NodeOptions.
_FIELDS = (
    "role",
    "nodes",
    "head",
    "topology",
    "executor",
    "vllm",
    "nccl",
    "triton",
    "target",
    "quantization",
)
# Without defaults: a missing value may come from an env file, or is decided.
_OPTIONS = (
    click.option(
        "--role", type=click.Choice(CHOICES["role"]), help="Role of this node."
    ),
    click.option(
        "--nodes",
        type=click.IntRange(1, NODES_MAX),
        help="Number of nodes; default: 2.",
    ),
    click.option(
        "--head-ip", "head", metavar="A", default="", help="The head's IPv4 address."
    ),
    click.option(
        "--topology",
        type=click.Choice(TOPOLOGIES),
        help="How nodes connect; auto: RoCE, or sockets.",
    ),
    click.option(
        "--executor",
        type=click.Choice(["auto", "mp", "ray"]),
        help="Program that starts ranks.",
    ),
    VLLM,
    NCCL,
    TRITON,
    click.option(
        "--lock", type=PRESENT_PATH, help="Take the versions of this wheelhouse."
    ),
    click.option(
        "--quantization",
        type=click.Choice(CHOICES["quantization"]),
        help="Quantization of the model.",
    ),
    TARGET,
    PYTHON,
    ROOT,
    flag("--accept-edited", "Accept a --from file that was edited."),
    _rule_option("--with", "wanted", "Turn an optional rule on."),
    _rule_option("--without", "unwanted", "Turn a rule off."),
)


def node_options(verb: Verb) -> Verb:
    """Add the options; the verb takes them as ``request``, ``choice``, ``host`` and ``root``.

    Versions of a lock count where an option is missing. ``choice`` is about rules for variables or
    flags; ``host`` is read below ``root``.
    """

    @functools.wraps(verb)
    def wrapped(
        *arguments: Any,
        lock: Path | None,
        root: Path,
        python: str | None,
        **options: Any,
    ) -> Any:
        fields: dict[str, Any] = dict(locked_versions(lock)) if lock else {}
        for name in _FIELDS:
            if value := options.pop(name):
                fields[name] = value
        choice = RuleChoice(
            wanted=frozenset(options.pop("wanted")),
            unwanted=frozenset(options.pop("unwanted")),
        )
        # The group of `env` has commands of its own, which need no facts of this machine.
        is_group = click.get_current_context().invoked_subcommand
        host = None if is_group else probe(root, python=python, environment=os.environ)
        return verb(
            *arguments,
            request=NodeOptions(**fields),
            choice=choice,
            host=host,
            root=root,
            **options,
        )

    return with_options(*_OPTIONS)(wrapped)


def note_lines(notes: Iterable[str], advice: Iterable[Any]) -> Lines:
    """Yield the notes of a plan, and the problems that no setting solves."""
    yield from map(note, notes)
    for problem in advice:
        yield lead_word("beware") + f"{problem.says}; instead: {problem.instead}"
