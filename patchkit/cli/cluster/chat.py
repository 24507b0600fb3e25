"""Stand in for `patchkit chat` until it is written."""

from __future__ import annotations

import click


@click.command()
def command() -> None:
    """Stand in for what is to come."""
