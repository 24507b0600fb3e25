"""Write files for other systems: `patchkit export`."""

from __future__ import annotations

import click

from patchkit.cli.out import LaidOut, tell
from patchkit.cli.render import Blocks, Data, VerbGroup, rendered
from patchkit.reading import read_text
from patchkit.records import RECIPES


@click.group(cls=VerbGroup)
def export_command() -> None:
    """Write files for other systems: an image's."""


@export_command.command("containerfile")
@rendered
def write_containerfile() -> Blocks:
    """Write the Containerfile of an image with the wheelhouse, for docker, podman and buildah.

    \b
      patchkit export containerfile > Containerfile
    """
    text = read_text(RECIPES / "export" / "Containerfile")
    yield {"containerfile": text}
    yield Data(text)

    build = "build --file Containerfile --tag vllm-wheelhouse --build-arg BASE=IMAGE@sha256:…"
    tell(LaidOut(f"build it: docker {build} ."))
    tell("and name it in cluster.toml: `image` in [serve]")
