"""Define the options that describe a node, for the verbs whose decisions depend on them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from patchkit.cli.out import FOLDER, PRESENT_PATH
from patchkit.cli.render import Lines, Verb, lead_word, note, option, with_options
from patchkit.runtime.envfile.env_file import NODES_MAX, locked_versions
from patchkit.runtime.host.probe import probe
from patchkit.runtime.node.decision import NodeOptions
from patchkit.runtime.rules.rule import CHOICES, RuleChoice
from patchkit.target import targets

TOPOLOGIES = ("auto", "roce", "socket", "ring", "hetero")


VLLM = option("--vllm VERSION", "vLLM version, not the installed one.", default="")
NCCL = option(
    "--nccl VERSION", "NCCL version, not the one that torch loads.", default=""
)
TRITON = option(
    "--triton VERSION", "Triton version, not the installed one.", default=""
)
TARGET = option(
    "--target",
    "Target device, instead of the detected one.",
    type=click.Choice(list(targets())),
)
PYTHON = option("--python PATH", "Python that has vLLM; default: this one.")
LOCK = option("--lock", "Take the versions of this wheelhouse.", type=PRESENT_PATH)
ROOT = option(
    "--root", "A copy by `probe --save`, or a root.", type=FOLDER, default=Path("/")
)
# The options whose values become fields of NodeOptions.
_FIELDS = "role nodes head topology executor vllm nccl triton target quantization"
# These have no defaults: a missing value comes from an env file, or patchkit decides it.
_OPTIONS = (
    option("--role", "Role of this node.", type=click.Choice(CHOICES["role"])),
    option(
        "--nodes", "Number of nodes; default: 2.", type=click.IntRange(1, NODES_MAX)
    ),
    option("--head-ip A", "head", "The head's IPv4 address.", default=""),
    option(
        "--topology",
        "How nodes connect; auto: RoCE, or sockets.",
        type=click.Choice(TOPOLOGIES),
    ),
    option(
        "--executor",
        "Program that starts ranks.",
        type=click.Choice(["auto", "mp", "ray"]),
    ),
    VLLM,
    NCCL,
    TRITON,
    LOCK,
    option(
        "--quantization",
        "Quantization of the model.",
        type=click.Choice(CHOICES["quantization"]),
    ),
    TARGET,
    PYTHON,
    ROOT,
    option("--with ID", "wanted", "Turn an optional rule on.", multiple=True),
    option("--without ID", "unwanted", "Turn a rule off.", multiple=True),
)


def node_options(verb: Verb) -> Verb:
    """Add the options; the verb takes them as ``request``, ``choice``, ``host`` and ``root``.

    If an option for a version is missing, the version in a lock counts. ``choice`` says which rules
    for variables or flags are on or off. ``host`` has the facts that were read below ``root``.
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
        for name in _FIELDS.split():
            if value := options.pop(name):
                fields[name] = value
        choice = RuleChoice(
            wanted=frozenset(options.pop("wanted")),
            unwanted=frozenset(options.pop("unwanted")),
        )
        # `patchkit env` is a group, too: its subcommands need no facts of this machine.
        is_group = click.get_current_context().invoked_subcommand
        host = None if is_group else probe(root, python=python)
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
