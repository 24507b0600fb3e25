"""Serve a model on several machines: `patchkit cluster`."""

from __future__ import annotations

import click

from patchkit.cli.cluster.cluster_init import init
from patchkit.cli.cluster.cluster_install import install
from patchkit.cli.cluster.cluster_state import down, logs, status
from patchkit.cli.cluster.cluster_up import switch, up


@click.group()
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


for _verb in (init, install, up, status, logs, down, switch):
    command.add_command(_verb)
