"""Define the options that describe a node, for the verbs whose decisions depend on them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from patchkit.cli.render import Lines, Verb, lead_word, note, options_of
from patchkit.runtime.envfile.env_file import locked_versions
from patchkit.runtime.host.probe import probe
from patchkit.runtime.node.decision import NodeOptions
from patchkit.runtime.rules.rule import RuleChoice

# The options whose values become fields of NodeOptions.
_FIELDS = "role nodes head topology executor vllm nccl triton target quantization"


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

    # These have no defaults: a missing value comes from an env file, or patchkit decides it.
    return options_of("node")(wrapped)


def note_lines(notes: Iterable[str], advice: Iterable[Any]) -> Lines:
    """Yield the notes of a plan, and the problems that no setting solves."""
    yield from map(note, notes)
    for problem in advice:
        yield lead_word("beware") + f"{problem.says}; instead: {problem.instead}"
