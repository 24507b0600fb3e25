"""Print completion for a shell: `patchkit completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from patchkit.cli.out import data


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print a completion script: eval "$(patchkit completion bash)"."""
    from patchkit.cli import group  # which loads this module: on top it would be a circle

    found = get_completion_class(shell)
    assert found is not None
    data(found(group, {}, "patchkit", "_PATCHKIT_COMPLETE").source() + "\n")
