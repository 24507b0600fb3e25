"""Write what other systems run: `patchkit export`."""

from __future__ import annotations

import click

from patchkit.cli.export.containerfile import command as containerfile
from patchkit.cli.export.kubernetes import kubernetes
from patchkit.cli.export.ray import ray
from patchkit.cli.render import VerbGroup


class _Exports(VerbGroup):
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        # `lws` is its former name, for one release.
        return super().get_command(ctx, "kubernetes" if cmd_name == "lws" else cmd_name)


@click.group(cls=_Exports)
def command() -> None:
    """Write what other systems run: an image's Containerfile, manifests, jobs for Ray."""


command.add_command(containerfile)
command.add_command(kubernetes)
command.add_command(ray)
