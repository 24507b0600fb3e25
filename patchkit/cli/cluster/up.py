"""Serve a model on this machine alone: `patchkit up`."""

from __future__ import annotations

import click

from patchkit.cli.cluster.cluster_options import alone
from patchkit.cli.cluster.cluster_up import DRY, MODEL, NO_WAIT, bring_up
from patchkit.cli.out import as_json
from patchkit.cluster.launch.cluster_file import MODELS, ServeChoices
from patchkit.runtime.serve.listen import CHOICES as LISTEN


@click.command()
@MODEL
@click.option("--venv", metavar="DIR", help="The environment that has vLLM; default: this one.")
@click.option("--listen", type=click.Choice(LISTEN), default=LISTEN[0], show_default=True)
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True)
@click.option("--model-folder", default=MODELS, show_default=True, metavar="DIR")
@DRY
@NO_WAIT
@as_json
def command(
    model: str,
    *,
    venv: str | None,
    listen: str,
    port: int,
    model_folder: str,
    dry_run: bool,
    no_wait: bool,
    as_json: bool,
) -> None:
    """Serve a model on this machine, by systemd: it outlives the terminal, a crash and a reboot.

    \b
      patchkit up openai/gpt-oss-20b
      patchkit cluster status --here
      patchkit cluster down --here
    """
    cluster = alone(
        venv=venv,
        model_folder=model_folder,
        serve=ServeChoices(listen=listen, port=port),  # type: ignore[arg-type]
    )
    bring_up(cluster, model, dry_run=dry_run, wait=not no_wait, as_json=as_json, here=True)
