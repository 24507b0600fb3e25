"""Stand in for `patchkit bench` until it is written."""

from __future__ import annotations

import click


@click.command()
def command() -> None:
    """Stand in for what is to come."""
