"""Serve a model on several machines: `patchkit cluster`."""

from __future__ import annotations

import importlib

import click

_VERBS = {
    "init": "Look at each machine by ssh, and write cluster.toml.",
    "install": "Bring the wheelhouse to every node, the same on all.",
}
# These are verbs of their own; `patchkit up` goes on working for one release.
_FORMER = ("up", "status", "logs", "switch", "down")


class _ClusterVerbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return [*_VERBS, *_FORMER]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in (*_VERBS, *_FORMER):
            return None
        command = importlib.import_module(f"patchkit.cli.cluster.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(_VERBS.items()))


@click.group(cls=_ClusterVerbs)
def command() -> None:
    """Set up several machines to serve a model, by systemd and ssh.

    \b
      patchkit cluster init spark-1 spark-2
      patchkit cluster install
      patchkit up openai/gpt-oss-120b
      patchkit status
      patchkit down

    The first machine is the head. systemd on each keeps the ranks: the head's unit starts and
    watches the others, comes back after a crash, four times an hour at most, and after a reboot.
    """
