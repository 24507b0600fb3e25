"""Everything that the command line can run."""

from __future__ import annotations

import click

from patchkit.cli import group


def runnable():
    """Words and command of each verb and each verb of a verb."""
    yield from _leaves(group, click.Context(group, info_name="patchkit"), ())


def _leaves(command, context, words):
    if not isinstance(command, click.Group) or command.invoke_without_command:
        yield words, command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            inner = click.Context(below, parent=context, info_name=name)
            yield from _leaves(below, inner, (*words, name))
