"""Serve a model on several machines: `patchkit cluster`."""

from __future__ import annotations

import importlib

import click

_VERBS = {
    "init": "Look at each machine by ssh, and write cluster.toml.",
    "install": "Bring the wheelhouse to every node, the same on all.",
    "up": "Start a model, and return when it has answered.",
    "status": "Show the state of every node.",
    "logs": "Show what all ranks wrote, merged by time.",
    "switch": "Serve another model, or the former one again.",
    "down": "Stop the model on every node, and check.",
}


class _ClusterVerbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _VERBS:
            return None
        command = importlib.import_module(f"patchkit.cli.cluster.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(_VERBS.items()))


@click.group(cls=_ClusterVerbs)
def command() -> None:
    """Serve a model on several machines, by systemd and ssh.

    \b
      patchkit cluster init spark-1 spark-2
      patchkit cluster install
      patchkit cluster up openai/gpt-oss-120b
      patchkit cluster status
      patchkit cluster down

    The first machine is the head. systemd on each keeps the ranks: the head's unit starts and
    watches the others, comes back after a crash, four times an hour at most, and after a reboot.
    """
