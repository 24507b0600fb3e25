"""Write what other systems run: `patchkit export`."""

from __future__ import annotations

import click

from patchkit.cli.export.containerfile import command as containerfile
from patchkit.cli.export.kubernetes import kubernetes
from patchkit.cli.export.ray import ray
from patchkit.errors import UsageError
from patchkit.quoting import quoted


class _Exports(click.Group):
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Take former names; name `patchkit series` to who asks for a series of patches."""
        if args[0] == "lws":  # its former name, for one release
            args = ["kubernetes", *args[1:]]
        if args[0] in self.commands or args[0].startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        raise UsageError(
            f"no export is called {args[0]!r}: {', '.join(self.commands)}",
            why="the series of patches is `patchkit series`",
            hint=quoted("patchkit", "series", *args),
        )


@click.group(cls=_Exports)
def command() -> None:
    """Write what other systems run: an image's Containerfile, manifests, jobs for Ray."""


command.add_command(containerfile)
command.add_command(kubernetes)
command.add_command(ray)
